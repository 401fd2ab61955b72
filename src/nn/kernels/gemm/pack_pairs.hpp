// Parts of bf16 matrices packed into panels of pairs, with AVX-512. A pair is two elements that follow each
// other in k, the first in the lower half. The second is 0 behind an odd k. Included once by the file of an
// instruction set. All code is in an unnamed namespace, as in blocked.hpp.
#pragma once

#include <immintrin.h>

#include "nn/kernels/gemm/ahead.hpp"

namespace weft::kernels::gemm {
namespace {

// Packs panels of a part of a matrix whose element (i, p), i in [0, count), p in [0, k), is at from[i *
// i_step + p * p_step]. `pairs` is k / 2, rounded up, or more: the additional pairs are 0. The pair (i, q) is
// stored at place (i / kWidth * pairs + q) * kWidth + i % kWidth of `to`.

inline __mmask32 first_halves(std::int64_t count) {
  return static_cast<__mmask32>(count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1u);
}

// 32 pairs of two rows.
struct Interleaved {
  __m512i low, high;
};
inline Interleaved interleave(__m512i even, __m512i odd) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                       38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0),
                high = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55,
                                        23, 54, 22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return {_mm512_permutex2var_epi16(even, low, odd), _mm512_permutex2var_epi16(even, high, odd)};
}

// Pairs of the rows `even` and `odd`, of which `count` elements exist, for the panels that begin at `to`,
// `step` floats apart. Masks: all elements, or none if a row does not exist.
template <std::int64_t kWidth>
inline void interleave_panels(const std::uint16_t* even, const std::uint16_t* odd, __mmask32 has_even,
                              __mmask32 has_odd, float* to, std::int64_t step, std::int64_t count) {
  constexpr std::int64_t kWide = kWidth == 8 ? 32 : kWidth;
  const auto put = [&](const Interleaved& x, std::int64_t i, std::int64_t j, std::int64_t columns) {
    if constexpr (kWidth == 8) {
      const __m256i parts[4] = {_mm512_castsi512_si256(x.low), _mm512_extracti64x4_epi64(x.low, 1),
                                _mm512_castsi512_si256(x.high), _mm512_extracti64x4_epi64(x.high, 1)};
#pragma GCC unroll 4
      for (std::int64_t part = 0; part < 4; ++part)
        if (part * 8 < columns)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (i / 8 + part) * step), parts[part]);
    } else {
      float* const at = to + i / kWidth * step + j;
      _mm512_storeu_si512(at, x.low);
      if (j + 16 < kWidth) _mm512_storeu_si512(at + 16, x.high);
    }
  };
  std::int64_t i = 0;
  if ((has_even & has_odd) != 0)
    for (; i + kWide <= count; i += kWide) {
#pragma GCC unroll 4
      for (std::int64_t j = 0; j < kWide; j += 32) {
        if (j + 32 <= kWide)
          put(interleave(_mm512_loadu_si512(even + i + j), _mm512_loadu_si512(odd + i + j)), i, j, 32);
        else
          put(interleave(
                  _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + i + j))),
                  _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + i + j)))),
              i, j, 32);
      }
    }
  for (; i < count; i += kWide)
    for (std::int64_t j = 0; j < kWide && i + j < rounded_up(count, kWidth); j += 32) {
      const __mmask32 there = first_halves(count - i - j) & first_halves(kWide - j);
      put(interleave(_mm512_maskz_loadu_epi16(there & has_even, even + i + j),
                     _mm512_maskz_loadu_epi16(there & has_odd, odd + i + j)),
          i, j, count - i);
    }
}

// i_step is 1: k goes down the columns. Two pairs of rows are processed at a time, because complete lines of
// narrow panels are then written.
template <std::int64_t kWidth>
void interleave_rows(const std::uint16_t* from, std::int64_t p_step, float* to, std::int64_t count,
                     std::int64_t k, std::int64_t pairs) {
  static_assert(kWidth == 8 || kWidth % 16 == 0);
  for (std::int64_t q = 0; q < pairs; ++q) {
    const std::uint16_t* const row = from + 2 * q * p_step;
    interleave_panels<kWidth>(row, row + p_step, 2 * q < k ? ~__mmask32{0} : 0,
                              2 * q + 1 < k ? ~__mmask32{0} : 0, to + q * kWidth, pairs * kWidth, count);
  }
}

// v[i] lane j becomes v[j] lane i.
inline void transpose_16(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88),
                  b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd),
                  c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88),
                  d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

// p_step is 1: k goes along the rows, and pairs are stored there as they are. Squares of 16 by 16 pairs are
// transposed.
template <std::int64_t kWidth>
void transpose_rows(const std::uint16_t* from, std::int64_t i_step, float* to, std::int64_t count,
                    std::int64_t k, std::int64_t pairs) {
  constexpr std::int64_t kRows = kWidth == 8 ? 8 : 16;
  for (std::int64_t i = 0; i < rounded_up(count, kWidth); i += kRows) {
    float* const panel = to + i / kWidth * kWidth * pairs + i % kWidth;
    const std::uint16_t* const rows = from + i * i_step;
    const std::int64_t there = least(kRows, count - i);
    for (std::int64_t q = 0; q < pairs; q += 16) {
      const __mmask32 mask = first_halves(k - 2 * q);
      const std::int64_t left = least(16, pairs - q);
      __m512i v[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r)
        v[r] = r < there ? _mm512_maskz_loadu_epi16(mask, rows + r * i_step + 2 * q) : _mm512_setzero_si512();
      transpose_16(v);
      if (left == 16) {
#pragma GCC unroll 16
        for (int s = 0; s < 16; ++s) {
          if constexpr (kWidth == 8)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + (q + s) * 8),
                                _mm512_castsi512_si256(v[s]));
          else
            _mm512_storeu_si512(panel + (q + s) * kWidth, v[s]);
        }
      } else {
        alignas(64) __m512i square[16];
        for (int s = 0; s < 16; ++s) square[s] = v[s];
        for (std::int64_t s = 0; s < left; ++s) {
          if constexpr (kWidth == 8)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + (q + s) * 8),
                                _mm512_castsi512_si256(square[s]));
          else
            _mm512_storeu_si512(panel + (q + s) * kWidth, square[s]);
        }
      }
    }
  }
}

// Panels of kWidth; a panel's pairs are a multiple of kMultiple.
template <std::int64_t kMultiple>
struct Pairs {
  static constexpr std::int64_t kSteps = 2;

  static constexpr std::int64_t units(std::int64_t k) { return rounded_up((k + 1) / 2, kMultiple); }

  template <std::int64_t kWidth>
  static void pack(const Matrix& x, std::int64_t i_step, std::int64_t p_step, float* to, std::int64_t count,
                   std::int64_t k) {
    const auto* const from = static_cast<const std::uint16_t*>(x.data);
    if (i_step == 1)
      interleave_rows<kWidth>(from, p_step, to, count, k, units(k));
    else
      transpose_rows<kWidth>(from, i_step, to, count, k, units(k));
  }
};

}  // namespace
}  // namespace weft::kernels::gemm
