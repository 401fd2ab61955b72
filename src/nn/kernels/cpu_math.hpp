// Building blocks of loops that the compiler turns into vector code. Private to cpu_*.cpp; everything here is
// pure.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "host/clones.hpp"

namespace weft::kernels {

/// An element, float or bf16, in the form in which kernels compute with it.
template <class T>
WEFT_INLINE inline float wide(T x) {
  return static_cast<float>(x);
}

/// e^x in f32, within 1.1 ulp (measured over the whole range: 1.03). Results below 2^-124.8 (x < -86.5) are
/// 0, results above the largest float are infinity; NaN stays NaN.
///
/// x = n ln2 + r with n the nearest integer, so |r| ≤ ln2/2, and e^x = 2^n e^r. n ln2 is subtracted in two
/// parts; the first has 15 bits, so that its product with n is exact. e^r = 1 + r + r^2 q(r), where q
/// interpolates (e^r - 1 - r) / r^2 in the five Chebyshev nodes of the interval: relative error 9.8e-9, a
/// sixth of half an ulp. 2^n is made from bits as 2 * 2^(n-1), because n may be 128.
WEFT_INLINE inline float exp_f32(float x) {
  constexpr float kLog2E = 1.44269502f;
  constexpr float kLn2High = 0x1.62e4p-1f;
  constexpr float kLn2Low = 1.42860677e-06f;
  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits.
  constexpr float kRounder = 12582912.0f;
  const float shifted = x * kLog2E + kRounder;
  const float n = shifted - kRounder;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float q = 0.00139261759f;
  q = q * r + 0.00836317334f;
  q = q * r + 0.0416665561f;
  q = q * r + 0.166665778f;
  q = q * r + 0.5f;
  const float exp_r = r * r * q + r + 1.0f;
  const float half_power = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 126u) << 23);
  float result = exp_r * half_power * 2.0f;
  result = x < -86.5f ? 0.0f : result;
  result = x > 89.0f ? std::numeric_limits<float>::infinity() : result;
  return result;
}

/// 1 / (1 + e^-x).
WEFT_INLINE inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

/// erf(x) in f32, within 1e-7 (measured over the whole range: 6.5e-8; a sixth of that below 0.1).
///
/// With t = |x|: if t < 1, erf is t + t P(t^2), where P approximates erf(t) / t - 1 (error 1.3e-9). Otherwise
/// it is 1 - e^(t Q(t)), where Q approximates ln(erfc(t)) / t up to t = 4; beyond 4, f32 has no other value
/// than 1. Both are least-squares fits. The fit of Q is weighted by erfc(t) t.
WEFT_INLINE inline float erf_f32(float x) {
  const float t = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
  const float s = t * t;
  float p = 7.88249711e-05f;
  p = p * s - 8.01885499e-04f;
  p = p * s + 5.18931194e-03f;
  p = p * s - 2.68543288e-02f;
  p = p * s + 1.12835975e-01f;
  p = p * s - 3.76126269e-01f;
  p = p * s + 1.28379166e-01f;
  const float near = t + t * p;
  const float far_t = t > 4.0f ? 4.0f : t;
  float q = 2.13040394e-04f;
  q = q * far_t - 3.20626359e-03f;
  q = q * far_t + 2.28592768e-02f;
  q = q * far_t - 1.05209710e-01f;
  q = q * far_t - 6.35761051e-01f;
  q = q * far_t - 1.12850080e+00f;
  const float far = 1.0f - exp_f32(far_t * q);
  const float size = t < 1.0f ? near : far;
  const float result = std::bit_cast<float>(std::bit_cast<std::uint32_t>(size) |
                                            (std::bit_cast<std::uint32_t>(x) & 0x80000000u));
  return x == x ? result : x;
}

inline constexpr int kLanes = 16;

/// The sum of term(i) for i in [0, n): 16 sums of every 16th term, added pairwise at the end. The order is
/// fixed by this code, not by the width of the CPU's registers, and the compiler keeps the 16 sums in
/// registers.
template <class T, class Term>
WEFT_INLINE inline T lane_sum(std::int64_t n, Term term) {
  T lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += term(i);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

/// The largest of x[0..n). -infinity if n is 0. This function ignores NaNs. The code that uses the maximum
/// reads the same elements and sees them.
WEFT_INLINE inline float lane_max(const float* x, std::int64_t n) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = -std::numeric_limits<float>::infinity();
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] = x[i] > lanes[lane] ? x[i] : lanes[lane];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      lanes[lane] = lanes[lane + width] > lanes[lane] ? lanes[lane + width] : lanes[lane];
    }
  }
  return lanes[0];
}

}  // namespace weft::kernels
