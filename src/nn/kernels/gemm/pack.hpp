// Parts of matrices packed into panels of floats. bf16 is widened. A part of blocked.hpp. The file of an
// instruction set includes it once. All code is in an unnamed namespace, as in blocked.hpp.
#pragma once

#include "nn/kernels/gemm/ahead.hpp"

namespace weft::kernels::gemm {
namespace {

inline __m128 four(const float* from) { return _mm_loadu_ps(from); }
inline __m128 four(const std::uint16_t* from) {  // bf16 is the upper half of a float
  const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
}
inline float one(const float* from) { return *from; }
inline float one(const std::uint16_t* from) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(*from) << 16)));
}

// Packs panels of a part of a matrix whose element (i, p), i in [0, count), p in [0, k), is at from[i *
// i_step + p * p_step]: to[(i / kWidth * k + p) * kWidth + i % kWidth].

// i_step is 1. It processes four steps of k at a time, because it then writes complete lines of panels. (The
// lines lie some power of two apart.)
template <std::int64_t kWidth, class In>
void pack_rows(const In* from, std::int64_t p_step, float* to, std::int64_t count, std::int64_t k) {
  constexpr std::int64_t kSteps = 4;
  const std::int64_t whole = count / kWidth * kWidth;
  for (std::int64_t first = 0; first < k; first += kSteps) {
    const std::int64_t steps = least(kSteps, k - first);
    float* panel = to + first * kWidth;
    for (std::int64_t i = 0; i < whole; i += kWidth, panel += k * kWidth) {
      for (std::int64_t p = 0; p < steps; ++p) {
        const In* const row = from + (first + p) * p_step + i;
        _mm_prefetch(reinterpret_cast<const char*>(row + kSteps * p_step), _MM_HINT_T0);
        for (std::int64_t j = 0; j < kWidth; j += 4) _mm_storeu_ps(panel + p * kWidth + j, four(row + j));
      }
    }
    if (whole == count) continue;
    for (std::int64_t p = 0; p < steps; ++p) {
      const In* const row = from + (first + p) * p_step + whole;
      for (std::int64_t j = 0; j < kWidth; ++j)
        panel[p * kWidth + j] = j < count - whole ? one(row + j) : 0.0f;
    }
  }
}

// p_step is 1: squares of four by four are transposed.
template <std::int64_t kWidth, class In>
void pack_columns(const In* from, std::int64_t i_step, float* to, std::int64_t count, std::int64_t k) {
  constexpr std::int64_t kAhead = 4;  // rows, for the prefetch
  for (std::int64_t i = 0; i < rounded_up(count, kWidth); i += 4) {
    float* const panel = to + i / kWidth * kWidth * k + i % kWidth;
    const In* const rows = from + i * i_step;
    std::int64_t p = 0;
    if (i + 4 <= count) {
      for (; p + 4 <= k; p += 4) {
        __m128 v[4];
        for (std::int64_t q = 0; q < 4; ++q) {
          v[q] = four(rows + q * i_step + p);
          if (p % 16 == 0)
            _mm_prefetch(reinterpret_cast<const char*>(rows + (kAhead + q) * i_step + p), _MM_HINT_T0);
        }
        _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
        for (std::int64_t q = 0; q < 4; ++q) _mm_storeu_ps(panel + (p + q) * kWidth, v[q]);
      }
    }
    for (; p < k; ++p)
      for (std::int64_t q = 0; q < 4; ++q)
        panel[p * kWidth + q] = i + q < count ? one(rows + q * i_step + p) : 0.0f;
  }
}

template <std::int64_t kWidth, class In>
void pack_floats(const In* from, std::int64_t i_step, std::int64_t p_step, float* to, std::int64_t count,
                 std::int64_t k) {
  if (i_step == 1)
    pack_rows<kWidth>(from, p_step, to, count, k);
  else
    pack_columns<kWidth>(from, i_step, to, count, k);
}

// The packing of sets whose units are floats.
struct Floats {
  static constexpr std::int64_t kSteps = 1, kBlockUnits = 256;

  template <std::int64_t kWidth>
  static void pack(const Matrix& x, std::int64_t i_step, std::int64_t p_step, float* to, std::int64_t count,
                   std::int64_t k) {
    if (x.is_bf16)
      pack_floats<kWidth>(static_cast<const std::uint16_t*>(x.data), i_step, p_step, to, count, k);
    else
      pack_floats<kWidth>(static_cast<const float*>(x.data), i_step, p_step, to, count, k);
  }
};

}  // namespace
}  // namespace weft::kernels::gemm
