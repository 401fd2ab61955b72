// The products of gemm.hpp, generic: the file of an instruction set includes this file once, so that every
// function here is compiled for that set alone. All code is in an unnamed namespace: the linker must not use
// one set's functions for another set.
//
// A set is a struct of static members:
//   Vector, kLanes                            a vector register and how many floats it has
//   kTileRows (4 or 8), kTileVectors (2, 3)   the tile of c that stays in registers: rows, and columns in vectors
//   kBlockRows (a multiple of kTileRows)      of a block of a, which stays in the second cache with a panel of b
//   kBlockColumns (a multiple of the tile's)  of a block of b, which stays in the third
//   zero, load, load_aligned, store, fill     a vector of floats: of memory, of one float
//   stream                                    store() of aligned memory, past the caches
//   multiply_add(x, y, z), multiply(x, y)     x y + z with one rounding, x y
#pragma once

#include <immintrin.h>

#include "nn/kernels/gemm/pack.hpp"

namespace weft::kernels::gemm {
namespace {

// --- tiles

// The matrix to which a tile is added: c itself, or the bias, whose row_step is 0; or nothing.
struct Before {
  const float* data = nullptr;
  std::int64_t row_step = 0;
};

// The number of steps of k between two prefetches of lines: more prefetches at once would wait for memory.
constexpr std::int64_t kStepsOfFetch = 16;
struct Fetch {
  Ahead* ahead = nullptr;
  std::int64_t lines = 0;  // at a time
};

template <class Set>
struct Blocked {
  using Vector = typename Set::Vector;
  static constexpr std::int64_t kLanes = Set::kLanes, kTileRows = Set::kTileRows,
                                kTileColumns = Set::kTileVectors * kLanes;
  // The size of blocks of b if a is a single block: so small that a packed block is still in the second-level
  // cache when it is used, together with the next block in its stored form.
  static constexpr std::int64_t kFewColumns = 4 * kTileColumns;

  template <std::int64_t kWidth>
  static void pack_any(const Matrix& x, std::int64_t i_step, std::int64_t p_step, float* to,
                       std::int64_t count, std::int64_t k) {
    if (x.is_bf16)
      pack<kWidth, std::uint16_t>(x.data, i_step, p_step, to, count, k);
    else
      pack<kWidth, float>(x.data, i_step, p_step, to, count, k);
  }
  static void pack_a(const Matrix& a, float* to, std::int64_t rows, std::int64_t k) {
    pack_any<kTileRows>(a, a.row_step, a.column_step, to, rows, k);
  }
  static void pack_b(const Matrix& b, float* to, std::int64_t columns, std::int64_t k) {
    pack_any<kTileColumns>(b, b.column_step, b.row_step, to, columns, k);
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
          for (int j = 0; j < kVectors; ++j) sum[i][j] = Set::multiply_add(x, row[j], sum[i][j]);
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
  template <bool kStream = false>
  static void whole_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                         std::int64_t columns, std::int64_t k, float alpha, Before before, Fetch fetch = {}) {
    static_assert(kTileRows == 4 || kTileRows == 8);
    if constexpr (kTileRows == 8)
      if (rows == 8) return tile_of_rows<8, kStream>(a, b, c, ldc, columns, k, alpha, before, fetch);
    tile_of_rows<4, kStream>(a, b, c, ldc, columns, k, alpha, before, fetch);
  }

  // An incomplete tile, computed in separate memory.
  static void part_of_a_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                             std::int64_t columns, std::int64_t k, float alpha, Before before) {
    alignas(64) float whole[kTileRows * kTileColumns] = {};
    for (std::int64_t i = 0; before.data != nullptr && i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j)
        whole[i * kTileColumns + j] = before.data[i * before.row_step + j];
    whole_tile(a, b, whole, kTileColumns, rounded_up(rows, 4), rounded_up(columns, kLanes), k, alpha,
               before.data == nullptr ? before : Before{whole, kTileColumns});
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) c[i * ldc + j] = whole[i * kTileColumns + j];
  }

  // --- blocks

  // c: (rows, columns), of p and at (row, column) of it; a and b: packed, of the block of k that begins at
  // `first`
  static void multiply_packed(const Product& p, const float* a, const float* b, std::int64_t row,
                              std::int64_t rows, std::int64_t column, std::int64_t columns,
                              std::int64_t first, std::int64_t k, Ahead ahead = {}) {
    const std::int64_t tiles =
                           (rows + kTileRows - 1) / kTileRows * ((columns + kTileColumns - 1) / kTileColumns),
                       times = tiles * ((k + kStepsOfFetch - 1) / kStepsOfFetch);
    const Fetch fetch = {ahead.lines() == 0 ? nullptr : &ahead, (ahead.lines() + times - 1) / times};
    for (std::int64_t j = 0; j < columns; j += kTileColumns) {
      for (std::int64_t i = 0; i < rows; i += kTileRows) {
        float* const c = p.c + (row + i) * p.ldc + column + j;
        Before before;
        if (p.accumulate || first > 0)
          before = {c, p.ldc};
        else if (p.bias != nullptr)
          before = {p.bias + column + j, 0};
        const std::int64_t height = least(kTileRows, rows - i), width = least(kTileColumns, columns - j);
        if (height % 4 == 0 && width % kLanes == 0)
          whole_tile(a + i * k, b + j * k, c, p.ldc, height, width, k, p.alpha, before, fetch);
        else
          part_of_a_tile(a + i * k, b + j * k, c, p.ldc, height, width, k, p.alpha, before);
      }
    }
  }

  // Few rows. A block of a is packed once for each block of k, and all of b is multiplied with it.
  //
  // If b is stored as its transpose, like weights in y = x wT, its columns are rows in memory, each on a
  // separate page. So all of k is processed for some columns before the next columns, and each page is
  // visited once. For this purpose all of a is packed at once, up to so many steps of k.
  static constexpr std::int64_t kVeryFewRows = 16, kMostStepsOfAll = 4096;

  static std::int64_t floats_of_a(std::int64_t k) {
    const std::int64_t block = Set::kBlockRows * least(k, kBlockK),
                       all = (k <= kMostStepsOfAll ? Set::kBlockRows : kVeryFewRows) * k;
    return rounded_up(block > all ? block : all, kLine);
  }

  // The part that is packed after columns [column, column + columns) of the block of k that begins at
  // `first`.
  static Ahead next_of_columns(const Product& p, std::int64_t first, std::int64_t column,
                               std::int64_t columns) {
    first += kBlockK;
    if (first >= p.k) {
      first = 0;
      column += columns;
    }
    if (column >= p.n) return {};
    return {p.b.at(first, column), least(kBlockK, p.k - first), least(columns, p.n - column)};
  }

  static void few_rows_by_columns(const Product& p, float* a, float* b, std::int64_t block) {
    const std::int64_t rows = rounded_up(p.m, kTileRows);
    for (std::int64_t first = 0; first < p.k; first += kBlockK)
      pack_a(p.a.at(0, first), a + first * rows, p.m, least(kBlockK, p.k - first));
    for (std::int64_t column = 0; column < p.n; column += block) {
      const std::int64_t columns = least(block, p.n - column);
      for (std::int64_t first = 0; first < p.k; first += kBlockK) {
        const std::int64_t k = least(kBlockK, p.k - first);
        pack_b(p.b.at(first, column), b, columns, k);
        multiply_packed(p, a + first * rows, b, 0, p.m, column, columns, first, k,
                        next_of_columns(p, first, column, columns));
      }
    }
  }

  static Ahead next_of_k(const Product& p, std::int64_t first, std::int64_t column) {
    if (column == p.n) {
      column = 0;
      first += kBlockK;
    }
    if (first >= p.k) return {};
    return {p.b.at(first, column), least(kBlockK, p.k - first), least(kFewColumns, p.n - column)};
  }

  static void few_rows(const Product& p, float* a, float* b) {
    for (std::int64_t first = 0; first < p.k; first += kBlockK) {
      const std::int64_t k = least(kBlockK, p.k - first);
      pack_a(p.a.at(0, first), a, p.m, k);
      for (std::int64_t column = 0; column < p.n; column += kFewColumns) {
        const std::int64_t columns = least(kFewColumns, p.n - column);
        pack_b(p.b.at(first, column), b, columns, k);
        multiply_packed(p, a, b, 0, p.m, column, columns, first, k, next_of_k(p, first, column + columns));
      }
    }
  }

  // An element of c needs so few products that nearly all memory traffic is c's. So c is written from end to
  // end, and past the caches if c is larger than they are.
  static constexpr std::int64_t kLargeBytes = std::int64_t{16} << 20;

  template <bool kStream>
  static void rows_of_tiles(const Product& p, const float* a, const float* b, std::int64_t row,
                            std::int64_t rows, std::int64_t column, std::int64_t columns) {
    for (std::int64_t i = 0; i < rows; i += kTileRows)
      for (std::int64_t j = 0; j < columns; j += kTileColumns) {
        float* const c = p.c + (row + i) * p.ldc + column + j;
        Before before;
        if (p.accumulate)
          before = {c, p.ldc};
        else if (p.bias != nullptr)
          before = {p.bias + column + j, 0};
        const std::int64_t height = least(kTileRows, rows - i), width = least(kTileColumns, columns - j);
        if (height % 4 == 0 && width % kLanes == 0)
          whole_tile<kStream>(a + i * p.k, b + j * p.k, c, p.ldc, height, width, p.k, p.alpha, before);
        else
          part_of_a_tile(a + i * p.k, b + j * p.k, c, p.ldc, height, width, p.k, p.alpha, before);
      }
  }

  static void short_k(const Product& p, float* a, float* b) {
    constexpr std::uintptr_t kVectorBytes = static_cast<std::uintptr_t>(kLanes) * sizeof(float);
    const bool streams = !p.accumulate && p.m * p.n * 4 >= kLargeBytes && p.ldc % kLanes == 0 &&
                         reinterpret_cast<std::uintptr_t>(p.c) % kVectorBytes == 0;
    for (std::int64_t column = 0; column < p.n; column += Set::kBlockColumns) {
      const std::int64_t columns = least(Set::kBlockColumns, p.n - column);
      pack_b(p.b.at(0, column), b, columns, p.k);
      for (std::int64_t row = 0; row < p.m; row += Set::kBlockRows) {
        const std::int64_t rows = least(Set::kBlockRows, p.m - row);
        pack_a(p.a.at(row, 0), a, rows, p.k);
        if (streams)
          rows_of_tiles<true>(p, a, b, row, rows, column, columns);
        else
          rows_of_tiles<false>(p, a, b, row, rows, column, columns);
      }
    }
    if (streams) _mm_sfence();
  }

  static void many_rows(const Product& p, float* a, float* b) {
    const std::int64_t most_rows = equal_blocks(p.m, Set::kBlockRows, kTileRows),
                       most_columns = equal_blocks(p.n, Set::kBlockColumns, kTileColumns);
    for (std::int64_t column = 0; column < p.n; column += most_columns) {
      const std::int64_t columns = least(most_columns, p.n - column);
      for (std::int64_t first = 0; first < p.k; first += kBlockK) {
        const std::int64_t k = least(kBlockK, p.k - first);
        pack_b(p.b.at(first, column), b, columns, k);
        for (std::int64_t row = 0; row < p.m; row += most_rows) {
          const std::int64_t rows = least(most_rows, p.m - row);
          pack_a(p.a.at(row, first), a, rows, k);
          multiply_packed(p, a, b, row, rows, column, columns, first, k);
        }
      }
    }
  }

  static std::int64_t scratch(std::int64_t n, std::int64_t k) noexcept {
    const std::int64_t most = Set::kBlockColumns > kFewColumns ? Set::kBlockColumns : kFewColumns;
    return floats_of_a(k) + least(most, rounded_up(n, kTileColumns)) * least(k, kBlockK) + kLine;
  }

  static void multiply(const Product& p, float* scratch) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(scratch);
    constexpr std::uintptr_t kBytes = kLine * sizeof(float);
    float* const a = reinterpret_cast<float*>((address + kBytes - 1) / kBytes * kBytes);
    float* const b = a + floats_of_a(p.k);
    if (p.b.row_step == 1 && p.m <= kVeryFewRows)
      few_rows_by_columns(p, a, b, kTileColumns);
    else if (p.b.row_step == 1 && p.m <= Set::kBlockRows && p.k <= kMostStepsOfAll)
      few_rows_by_columns(p, a, b, kFewColumns);
    else if (p.m <= Set::kBlockRows)
      few_rows(p, a, b);
    else if (p.k <= kShortK)
      short_k(p, a, b);
    else
      many_rows(p, a, b);
  }

  static constexpr Kernel kernel{&scratch, &multiply};
};

}  // namespace
}  // namespace weft::kernels::gemm
