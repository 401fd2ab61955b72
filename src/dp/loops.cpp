#include "dp/loops.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
namespace weft::dp::loops {
namespace {

template <class T, class Term>
[[gnu::always_inline]] inline void add(const T* x, std::size_t n, double* lanes, const Term& term) {
  double sums[kLanes];
  for (std::size_t l = 0; l < kLanes; ++l) sums[l] = lanes[l];
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) sums[l] += term(static_cast<double>(x[i + l]));
  for (std::size_t l = 0; i + l < n; ++l) sums[l] += term(static_cast<double>(x[i + l]));
  for (std::size_t l = 0; l < kLanes; ++l) lanes[l] = sums[l];
}

}  // namespace

void add_squares(const float* x, std::size_t n, double* lanes) noexcept {
  add(x, n, lanes, [](double v) { return v * v; });
}
void add_squares(const double* x, std::size_t n, double* lanes) noexcept {
  add(x, n, lanes, [](double v) { return v * v; });
}
void add_magnitudes(const float* x, std::size_t n, double* lanes) noexcept {
  add(x, n, lanes, [](double v) { return std::abs(v); });
}
void add_magnitudes(const double* x, std::size_t n, double* lanes) noexcept {
  add(x, n, lanes, [](double v) { return std::abs(v); });
}
void multiply(float* x, std::size_t n, double factor) noexcept {
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(static_cast<double>(x[i]) * factor);
}
void multiply(double* x, std::size_t n, double factor) noexcept {
  for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
}
void widen(const bf16* from, float* to, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) to[i] = std::bit_cast<float>(std::uint32_t{from[i].bits} << 16);
}
void widen(const f16* from, float* to, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    // Exponent and mantissa where a float has them make a number that is too small by 2^112, also a subnormal one.
    const std::uint32_t magnitude = from[i].bits & 0x7fffu,
                        sign = std::uint32_t{from[i].bits & 0x8000u} << 16;
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
    const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity, NaN
    to[i] = std::bit_cast<float>(scaled | special | sign);
  }
}
void narrow(const float* from, bf16* to, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {  // as bf16(float), without a branch
    const auto u = std::bit_cast<std::uint32_t>(from[i]);
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
    to[i].bits = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}
void narrow(const float* from, f16* to, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) to[i] = f16(from[i]);
}

}  // namespace weft::dp::loops
