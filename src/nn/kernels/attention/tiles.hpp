// The products of products.hpp with AVX-512, generic in the units. The file of a format includes this file
// once, so that all code here is compiled only for the instructions of that format; therefore the namespace
// is unnamed.
//
// A tile of c, 6 x 64, stays in registers: 24 sums, four vectors of b and one unit of a. b has at most some
// 64 KB, and is read once for six rows.
//
// A format is a struct of static members:
//   kSteps                           of k in a unit
//   multiply_add(a, b, sum)          sum + a b, of vectors of units
//   along(from, left)                16 units of the floats that begin at from, of which `left` are there
//   down(first, second)              16 units of two rows; second is zero if there is none. Used where kSteps is 2
#pragma once

#include <immintrin.h>

#include "nn/kernels/attention/products.hpp"

namespace weft::kernels::blocks {
namespace {

constexpr std::int64_t kLanes = 16, kBlockK = 256;

constexpr std::int64_t least(std::int64_t x, std::int64_t y) { return x < y ? x : y; }
constexpr std::int64_t most(std::int64_t x, std::int64_t y) { return x > y ? x : y; }
inline __mmask16 first_lanes(std::int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
}
inline __m512 load_first(const float* from, std::int64_t count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
}

// v[i] lane j becomes v[j] lane i.
inline void transpose_16(__m512 (&v)[16]) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  const auto pairs = [](__m512 x, __m512 y, bool high) {
    const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = pairs(t[i], t[i + 2], false);
    v[i + 1] = pairs(t[i], t[i + 2], true);
    v[i + 2] = pairs(t[i + 1], t[i + 3], false);
    v[i + 3] = pairs(t[i + 1], t[i + 3], true);
  }
  // Each quarter of a register now holds four rows of a column. This puts the quarters in order.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    v[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    v[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

template <class Format>
struct Tiles {
  static constexpr std::int64_t kSteps = Format::kSteps, kTileRows = 6, kTileColumns = 4 * kLanes;

  static void along_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                         float* to, std::int64_t ld) noexcept {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t p = 0; p < columns; p += kSteps * kLanes)
        _mm512_storeu_ps(to + i * ld + p / kSteps, Format::along(from + i * stride + p, columns - p));
  }

  static void down_columns(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                           float* to, std::int64_t ld) noexcept {
    for (std::int64_t i = 0; i < rows; i += kSteps) {
      for (std::int64_t j = 0; j < columns; j += kLanes) {
        const float* const at = from + i * stride + j;
        const __m512 first = load_first(at, columns - j);
        if constexpr (kSteps == 1)
          _mm512_storeu_ps(to + i * ld + j, first);
        else
          _mm512_storeu_ps(
              to + i / kSteps * ld + j,
              Format::down(first, i + 1 < rows ? load_first(at + stride, columns - j) : _mm512_setzero_ps()));
      }
    }
  }

  static void transposed(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                         float* to, std::int64_t ld) noexcept {
    for (std::int64_t i = 0; i < rows; i += kLanes)
      for (std::int64_t p = 0; p < columns; p += kSteps * kLanes) {
        __m512 v[kLanes];
#pragma GCC unroll 16
        for (std::int64_t r = 0; r < kLanes; ++r)
          v[r] = i + r < rows ? Format::along(from + (i + r) * stride + p, columns - p) : _mm512_setzero_ps();
        transpose_16(v);
        const std::int64_t units = least(kLanes, (columns - p + kSteps - 1) / kSteps);
        for (std::int64_t u = 0; u < units; ++u) _mm512_storeu_ps(to + (p / kSteps + u) * ld + i, v[u]);
      }
  }

  // a: (kRows, k), its rows side by side or `step` apart; b: (k, kVectors * kLanes), c: (kRows, of which the
  // last vector's `last`)
  template <int kRows, int kVectors, bool kSideBySide>
  static void tile(const float* a, std::int64_t step, const float* b, std::int64_t ldb, float* c,
                   std::int64_t ldc, std::int64_t k, float alpha, bool accumulate, __mmask16 last) {
    __m512 sum[kRows][kVectors];
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc), _MM_HINT_T0);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_setzero_ps();
    }
#pragma GCC unroll 2
    for (std::int64_t p = 0; p < k; ++p) {
      __m512 row[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) row[j] = _mm512_loadu_ps(b + p * ldb + j * kLanes);
#pragma GCC unroll 6
      for (int i = 0; i < kRows; ++i) {
        const __m512 x = _mm512_set1_ps(kSideBySide ? a[p * step + i] : a[i * step + p]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] = Format::multiply_add(x, row[j], sum[i][j]);
      }
    }
    const __m512 factor = _mm512_set1_ps(alpha);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const __mmask16 mask = j == kVectors - 1 ? last : static_cast<__mmask16>(0xffff);
        float* const to = c + i * ldc + j * kLanes;
        const __m512 result = accumulate ? _mm512_fmadd_ps(factor, sum[i][j], _mm512_maskz_loadu_ps(mask, to))
                                         : _mm512_mul_ps(factor, sum[i][j]);
        _mm512_mask_storeu_ps(to, mask, result);
      }
    }
  }

  // c: (p.m, columns of one tile), of k units of a and b
  template <int kVectors, bool kSideBySide>
  static void tiles(const Product& p, const float* a, const float* b, float* c, std::int64_t k,
                    bool accumulate, __mmask16 last) {
    const std::int64_t step = kSideBySide ? p.a_step : p.a_row_step;
    std::int64_t i = 0;
    const auto rows = [&]<int kRows>() {
      for (; i + kRows <= p.m; i += kRows)
        tile<kRows, kVectors, kSideBySide>(a + i * p.a_row_step, step, b, p.ldb, c + i * p.ldc, p.ldc, k,
                                           p.alpha, accumulate, last);
    };
    rows.template operator()<kTileRows>();
    rows.template operator()<4>();
    rows.template operator()<2>();
    rows.template operator()<1>();
  }

  template <bool kSideBySide>
  static void columns(const Product& p, std::int64_t column, std::int64_t first, std::int64_t k) {
    const float *const a = p.a + first * p.a_step, *const b = p.b + first * p.ldb + column;
    float* const c = p.c + column;
    const std::int64_t count = least(kTileColumns, p.n - column), vectors = (count + kLanes - 1) / kLanes;
    const __mmask16 last = first_lanes(count - (vectors - 1) * kLanes);
    const bool accumulate = p.accumulate || first > 0;
    if (vectors == 4) return tiles<4, kSideBySide>(p, a, b, c, k, accumulate, last);
    if (vectors == 3) return tiles<3, kSideBySide>(p, a, b, c, k, accumulate, last);
    if (vectors == 2) return tiles<2, kSideBySide>(p, a, b, c, k, accumulate, last);
    tiles<1, kSideBySide>(p, a, b, c, k, accumulate, last);
  }

  static void multiply(const Product& p) noexcept {
    for (std::int64_t first = 0; first < most(p.k, 1); first += kBlockK / kSteps) {
      const std::int64_t k = least(kBlockK / kSteps, p.k - first);
      for (std::int64_t column = 0; column < p.n; column += kTileColumns) {
        if (p.a_row_step == 1)
          columns<true>(p, column, first, k);
        else
          columns<false>(p, column, first, k);
      }
    }
  }

  static constexpr Kernel kernel{kSteps, &along_rows, &down_columns, &transposed, &multiply};
};

}  // namespace
}  // namespace weft::kernels::blocks
