// The inner loops over elements of gradients. Each is so simple that the compiler vectorises it. Any thread
// may call them. Private to dp.
#pragma once

#include <cmath>
#include <cstddef>

#include "weft/base/dtype.hpp"

namespace weft::dp::loops {

constexpr std::size_t kLanes = 8;

/// Returns whether powers with this exponent are summed directly. For other exponents the powers of x over a
/// scale are summed.
constexpr bool plain(double p) { return p >= 1 && p <= 4; }
inline double power(double x, double p) {
  if (p == 1) return x;
  if (p == 2) return x * x;
  return std::pow(x, p);
}

/// lanes[i % kLanes] += x[i]², or |x[i]|, in f64.
void add_squares(const float* x, std::size_t n, double* lanes) noexcept;
void add_squares(const double* x, std::size_t n, double* lanes) noexcept;
void add_magnitudes(const float* x, std::size_t n, double* lanes) noexcept;
void add_magnitudes(const double* x, std::size_t n, double* lanes) noexcept;
/// The largest |x[i]|; 0 if n is 0, NaN if any element is NaN.
double largest(const float* x, std::size_t n) noexcept;
double largest(const double* x, std::size_t n) noexcept;
/// x[i] *= factor, in f64, rounded once.
void multiply(float* x, std::size_t n, double factor) noexcept;
void multiply(double* x, std::size_t n, double factor) noexcept;
/// Converts like dtype.hpp.
void widen(const bf16* from, float* to, std::size_t n) noexcept;
void widen(const f16* from, float* to, std::size_t n) noexcept;
void narrow(const float* from, bf16* to, std::size_t n) noexcept;
void narrow(const float* from, f16* to, std::size_t n) noexcept;

}  // namespace weft::dp::loops
