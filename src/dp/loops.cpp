#include "dp/loops.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "host/clones.hpp"

namespace weft::dp::loops {
namespace {

template <class T, class Term>
WEFT_INLINE inline void add(const T* x, std::size_t n, double* lanes, const Term& term) {
  double sums[kLanes];
  for (std::size_t l = 0; l < kLanes; ++l) sums[l] = lanes[l];
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) sums[l] += term(static_cast<double>(x[i + l]));
  for (std::size_t l = 0; i + l < n; ++l) sums[l] += term(static_cast<double>(x[i + l]));
  for (std::size_t l = 0; l < kLanes; ++l) lanes[l] = sums[l];
}

// Without their sign, floats are ordered like their bits, and NaNs are beyond infinity.
template <class Bits, class T>
WEFT_INLINE inline double largest_of(const T* x, std::size_t n) {
  Bits most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Bits magnitude = std::bit_cast<Bits>(x[i]) & (~Bits{0} >> 1);
    most = magnitude > most ? magnitude : most;
  }
  const T largest = std::bit_cast<T>(most);
  return std::isnan(largest) ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(largest);
}

}  // namespace

WEFT_CPU_CLONES(void, add_squares, (const float* x, std::size_t n, double* lanes) noexcept, (x, n, lanes)) {
  add(x, n, lanes, [](double v) WEFT_INLINE { return v * v; });
}
WEFT_CPU_CLONES(void, add_squares, (const double* x, std::size_t n, double* lanes) noexcept, (x, n, lanes)) {
  add(x, n, lanes, [](double v) WEFT_INLINE { return v * v; });
}
WEFT_CPU_CLONES(void, add_magnitudes, (const float* x, std::size_t n, double* lanes) noexcept,
                (x, n, lanes)) {
  add(x, n, lanes, [](double v) WEFT_INLINE { return std::abs(v); });
}
WEFT_CPU_CLONES(void, add_magnitudes, (const double* x, std::size_t n, double* lanes) noexcept,
                (x, n, lanes)) {
  add(x, n, lanes, [](double v) WEFT_INLINE { return std::abs(v); });
}
WEFT_CPU_CLONES(double, largest, (const float* x, std::size_t n) noexcept, (x, n)) {
  return largest_of<std::uint32_t>(x, n);
}
WEFT_CPU_CLONES(double, largest, (const double* x, std::size_t n) noexcept, (x, n)) {
  return largest_of<std::uint64_t>(x, n);
}
WEFT_CPU_CLONES(void, multiply, (float* x, std::size_t n, double factor) noexcept, (x, n, factor)) {
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(static_cast<double>(x[i]) * factor);
}
WEFT_CPU_CLONES(void, multiply, (double* x, std::size_t n, double factor) noexcept, (x, n, factor)) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
}
WEFT_CPU_CLONES(void, widen, (const bf16* from, float* to, std::size_t n) noexcept, (from, to, n)) {
  for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}
WEFT_CPU_CLONES(void, widen, (const f16* from, float* to, std::size_t n) noexcept, (from, to, n)) {
  for (std::size_t i = 0; i < n; ++i) {
    // If the exponent and mantissa are put at the places that a float has for them, the result is too small
    // by 2^112, for subnormal numbers, too.
    const std::uint32_t magnitude = from[i].bits & 0x7fffu,
                        sign = std::uint32_t{from[i].bits & 0x8000u} << 16;
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
    const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity, NaN
    to[i] = std::bit_cast<float>(scaled | special | sign);
  }
}
WEFT_CPU_CLONES(void, narrow, (const float* from, bf16* to, std::size_t n) noexcept, (from, to, n)) {
  for (std::size_t i = 0; i < n; ++i) to[i] = bf16(from[i]);
}
void narrow(const float* from, f16* to, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) to[i] = f16(from[i]);
}

}  // namespace weft::dp::loops
