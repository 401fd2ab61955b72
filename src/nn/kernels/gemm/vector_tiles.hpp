// Tiles of blocked.hpp in vector registers, generic in the instruction set.
//
// A set is a struct of static members:
//   kName, kSteps, kBlockUnits, kBlockRows, kBlockColumns   as in blocked.hpp
//   Vector, kLanes                            a vector register and how many floats it has
//   kTileRows (4 or 8), kTileVectors (2, 3)   the tile: rows, and columns in vectors
//   zero, load, load_aligned, store, fill     a vector of floats: of memory, of one float
//   stream                                    store() of aligned memory, past the caches
//   multiply_add(x, y, z), multiply(x, y)     x y + z with one rounding, x y, of floats
//   add_product(x, y, sum)                    sum + x y, of vectors of units
//   pack<kWidth>(x, i_step, p_step, to, count, k)   panels of kWidth, as described in pack.hpp
#pragma once

#include <immintrin.h>

#include "nn/kernels/gemm/ahead.hpp"

namespace weft::kernels::gemm {
namespace {

template <class Set>
struct VectorTiles {
  using Vector = typename Set::Vector;
  static constexpr const char* kName = Set::kName;
  static constexpr std::int64_t kLanes = Set::kLanes, kTileRows = Set::kTileRows,
                                kTileColumns = Set::kTileVectors * kLanes, kSteps = Set::kSteps,
                                kBlockUnits = Set::kBlockUnits, kRowStep = 4, kPanelRows = kTileRows,
                                kColumnStep = kLanes, kBlockRows = Set::kBlockRows,
                                kBlockColumns = Set::kBlockColumns;

  struct Use {};

  static constexpr std::int64_t units(std::int64_t k) { return (k + kSteps - 1) / kSteps; }
  static void pack_a(const Matrix& a, float* to, std::int64_t rows, std::int64_t k) {
    Set::template pack<kTileRows>(a, a.row_step, a.column_step, to, rows, k);
  }
  static void pack_b(const Matrix& b, float* to, std::int64_t columns, std::int64_t k) {
    Set::template pack<kTileColumns>(b, b.column_step, b.row_step, to, columns, k);
  }

  // a: (k, kTileRows), of which kRows are used, b: (k, kTileColumns), of which kVectors * kLanes are used; c:
  // (kRows, kVectors * kLanes)
  template <int kRows, int kVectors, bool kStream>
  static void tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t k, float alpha,
                   Before before, Fetch fetch) {
    Vector sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      if constexpr (!kStream) {
        _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc + kVectors * kLanes - 1), _MM_HINT_T0);
      }
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Set::zero();
    }
    for (std::int64_t first = 0; first < k; first += kStepsOfFetch) {
      if (fetch.ahead != nullptr) fetch.ahead->fetch(fetch.lines);
      const std::int64_t last = least(k, first + kStepsOfFetch);
#pragma GCC unroll 4
      for (std::int64_t p = first; p < last; ++p) {
        Vector row[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) row[j] = Set::load_aligned(b + p * kTileColumns + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          const Vector x = Set::fill(a[p * kTileRows + i]);
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) sum[i][j] = Set::add_product(x, row[j], sum[i][j]);
        }
      }
    }
    const Vector factor = Set::fill(alpha);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const Vector result =
            before.data == nullptr
                ? Set::multiply(factor, sum[i][j])
                : Set::multiply_add(factor, sum[i][j],
                                    Set::load(before.data + i * before.row_step + j * kLanes));
        if constexpr (kStream)
          Set::stream(c + i * ldc + j * kLanes, result);
        else
          Set::store(c + i * ldc + j * kLanes, result);
      }
    }
  }

  // columns is a multiple of kLanes
  template <int kRows, bool kStream>
  static void tile_of_rows(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t columns,
                           std::int64_t k, float alpha, Before before, Fetch fetch) {
    static_assert(Set::kTileVectors == 2 || Set::kTileVectors == 3);
    if (columns == kLanes) return tile<kRows, 1, kStream>(a, b, c, ldc, k, alpha, before, fetch);
    if constexpr (Set::kTileVectors == 3)
      if (columns == 3 * kLanes) return tile<kRows, 3, kStream>(a, b, c, ldc, k, alpha, before, fetch);
    tile<kRows, 2, kStream>(a, b, c, ldc, k, alpha, before, fetch);
  }

  // rows is a multiple of 4, columns of kLanes
  template <bool kStream>
  static void whole_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                         std::int64_t columns, std::int64_t k, float alpha, Before before, Fetch fetch) {
    static_assert(kTileRows == 4 || kTileRows == 8);
    if constexpr (kTileRows == 8)
      if (rows == 8) return tile_of_rows<8, kStream>(a, b, c, ldc, columns, k, alpha, before, fetch);
    tile_of_rows<4, kStream>(a, b, c, ldc, columns, k, alpha, before, fetch);
  }
};

}  // namespace
}  // namespace weft::kernels::gemm
