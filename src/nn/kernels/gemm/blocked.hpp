// The products of gemm.hpp, generic in the tiles. The file of an instruction set includes this file once, so
// that every function here is compiled for that set alone. All code is in an unnamed namespace, since the
// linker must not use one set's functions for another set.
//
// Tiles is a struct of static members (VectorTiles, MatrixTiles):
//   kName                                     for reports
//   kSteps                                    of k in a unit: 1, a float, or 2, a pair of bf16
//   kBlockUnits                               of k in a block, whose sum stays in registers
//   kTileRows, kTileColumns                   the tile of c that stays in registers
//   kRowStep, kColumnStep                     smaller tiles have multiples of these
//   kPanelRows                                rows of a packed part of a are a multiple of this
//   kBlockRows (a multiple of the tile's)     of a block of a, which stays in the second cache with a panel
//                                             of b
//   kBlockColumns (likewise)                  of a block of b, which stays in the third
//   units(k)                                  that a panel has in memory
//   pack_a, pack_b                            a part of a matrix into panels of kTileRows, kTileColumns
//   whole_tile<kStream>                       c = alpha a b + what was before, of packed panels
//   Use                                       an object that a thread has while it makes tiles
#pragma once

#include <cstring>

#include "nn/kernels/gemm/ahead.hpp"

namespace weft::kernels::gemm {
namespace {

template <class Tiles>
struct Blocked {
  static constexpr std::int64_t kTileRows = Tiles::kTileRows, kTileColumns = Tiles::kTileColumns,
                                kBlockK = Tiles::kBlockUnits * Tiles::kSteps;
  // The size of blocks of b if a is a single block. It is so small that a packed block is still in the
  // second-level cache when it is used, together with the next block in its stored form.
  static constexpr std::int64_t kFewColumns = 4 * kTileColumns * 256 / Tiles::kBlockUnits;

  static constexpr std::int64_t units(std::int64_t k) { return Tiles::units(k); }
  static void pack_a(const Matrix& a, float* to, std::int64_t rows, std::int64_t k) {
    Tiles::pack_a(a, to, rows, k);
  }
  static void pack_b(const Matrix& b, float* to, std::int64_t columns, std::int64_t k) {
    Tiles::pack_b(b, to, columns, k);
  }

  // An incomplete tile, computed in separate memory.
  static void part_of_a_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                             std::int64_t columns, std::int64_t k, float alpha, Before before) {
    alignas(64) float whole[kTileRows * kTileColumns] = {};
    for (std::int64_t i = 0; before.data != nullptr && i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j)
        whole[i * kTileColumns + j] = before.data[i * before.row_step + j];
    Tiles::template whole_tile<false>(a, b, whole, kTileColumns, rounded_up(rows, Tiles::kRowStep),
                                      rounded_up(columns, Tiles::kColumnStep), k, alpha,
                                      before.data == nullptr ? before : Before{whole, kTileColumns}, {});
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) c[i * ldc + j] = whole[i * kTileColumns + j];
  }

  // --- blocks

  // Packed columns of b: the panel that begins at column j is at data + j * step.
  struct Panels {
    const float* data;
    std::int64_t step;  // units of k that a panel has
  };

  // Columns [column, column + columns) of the block of k that begins at `first`, from what is kept, or packed
  // into `memory`.
  static Panels panels(const Product& p, float* memory, std::int64_t first, std::int64_t column,
                       std::int64_t columns) {
    if (p.packed_b != nullptr)
      return {p.packed_b + column * units(p.k) + units(first) * kTileColumns, units(p.k)};
    const std::int64_t k = least(kBlockK, p.k - first);
    pack_b(p.b.at(first, column), memory, columns, k);
    return {memory, units(k)};
  }

  // To what the tile of c at (row, column) is added, in the block of k that begins at `first`.
  static Before before_tile(const Product& p, std::int64_t row, std::int64_t column, std::int64_t first) {
    if (p.accumulate || first > 0) return {p.c + row * p.ldc + column, p.ldc};
    if (p.bias != nullptr) return {p.bias + column, 0};
    return {};
  }

  // c: (rows, columns), of p and at (row, column) of it; a: packed; k elements from `first` on
  static void multiply_packed(const Product& p, const float* a, Panels b, std::int64_t row, std::int64_t rows,
                              std::int64_t column, std::int64_t columns, std::int64_t first,
                              Ahead ahead = {}) {
    const std::int64_t k = units(least(kBlockK, p.k - first)),
                       tiles =
                           (rows + kTileRows - 1) / kTileRows * ((columns + kTileColumns - 1) / kTileColumns),
                       times = tiles * ((k + kStepsOfFetch - 1) / kStepsOfFetch);
    const Fetch fetch = {ahead.lines() == 0 ? nullptr : &ahead, (ahead.lines() + times - 1) / times};
    for (std::int64_t j = 0; j < columns; j += kTileColumns) {
      for (std::int64_t i = 0; i < rows; i += kTileRows) {
        float* const c = p.c + (row + i) * p.ldc + column + j;
        const Before before = before_tile(p, row + i, column + j, first);
        const std::int64_t height = least(kTileRows, rows - i), width = least(kTileColumns, columns - j);
        if (height % Tiles::kRowStep == 0 && width % Tiles::kColumnStep == 0)
          Tiles::template whole_tile<false>(a + i * k, b.data + j * b.step, c, p.ldc, height, width, k,
                                            p.alpha, before, fetch);
        else
          part_of_a_tile(a + i * k, b.data + j * b.step, c, p.ldc, height, width, k, p.alpha, before);
      }
    }
  }

  // Few rows. A block of a is packed once for each block of k, and all of b is multiplied with it.
  //
  // If b is stored as its transpose, like weights in y = x wT, its columns are rows in memory, each on a
  // separate page. So all of k is processed for some columns before the next columns, and each page is
  // visited once. For this purpose all of a is packed at once, up to so many units of k.
  static constexpr std::int64_t kVeryFewRows = 16, kMostUnitsOfAll = 4096;

  static std::int64_t floats_of_a(std::int64_t k) {
    const std::int64_t block = Tiles::kBlockRows * units(least(k, kBlockK)),
                       all = (units(k) <= kMostUnitsOfAll ? Tiles::kBlockRows : kVeryFewRows) * units(k);
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
    if (column >= p.n || p.packed_b != nullptr) return {};
    return {p.b.at(first, column), least(kBlockK, p.k - first), least(columns, p.n - column)};
  }

  static void few_rows_by_columns(const Product& p, float* a, float* b, std::int64_t block) {
    const std::int64_t rows = rounded_up(p.m, Tiles::kPanelRows);
    for (std::int64_t first = 0; first < p.k; first += kBlockK)
      pack_a(p.a.at(0, first), a + units(first) * rows, p.m, least(kBlockK, p.k - first));
    for (std::int64_t column = 0; column < p.n; column += block) {
      const std::int64_t columns = least(block, p.n - column);
      for (std::int64_t first = 0; first < p.k; first += kBlockK)
        multiply_packed(p, a + units(first) * rows, panels(p, b, first, column, columns), 0, p.m, column,
                        columns, first, next_of_columns(p, first, column, columns));
    }
  }

  static Ahead next_of_k(const Product& p, std::int64_t first, std::int64_t column) {
    if (column == p.n) {
      column = 0;
      first += kBlockK;
    }
    if (first >= p.k || p.packed_b != nullptr) return {};
    return {p.b.at(first, column), least(kBlockK, p.k - first), least(kFewColumns, p.n - column)};
  }

  static void few_rows(const Product& p, float* a, float* b) {
    for (std::int64_t first = 0; first < p.k; first += kBlockK) {
      pack_a(p.a.at(0, first), a, p.m, least(kBlockK, p.k - first));
      for (std::int64_t column = 0; column < p.n; column += kFewColumns) {
        const std::int64_t columns = least(kFewColumns, p.n - column);
        multiply_packed(p, a, panels(p, b, first, column, columns), 0, p.m, column, columns, first,
                        next_of_k(p, first, column + columns));
      }
    }
  }

  // An element of c needs so few products that nearly all memory traffic is c's. So c is written from end to
  // end, and past the caches if c is larger than they are.
  static constexpr std::int64_t kLargeBytes = std::int64_t{16} << 20;

  template <bool kStream>
  static void rows_of_tiles(const Product& p, const float* a, Panels b, std::int64_t row, std::int64_t rows,
                            std::int64_t column, std::int64_t columns) {
    const std::int64_t k = units(p.k);
    for (std::int64_t i = 0; i < rows; i += kTileRows)
      for (std::int64_t j = 0; j < columns; j += kTileColumns) {
        float* const c = p.c + (row + i) * p.ldc + column + j;
        const Before before = before_tile(p, row + i, column + j, 0);
        const std::int64_t height = least(kTileRows, rows - i), width = least(kTileColumns, columns - j);
        if (height % Tiles::kRowStep == 0 && width % Tiles::kColumnStep == 0)
          Tiles::template whole_tile<kStream>(a + i * k, b.data + j * b.step, c, p.ldc, height, width, k,
                                              p.alpha, before, {});
        else
          part_of_a_tile(a + i * k, b.data + j * b.step, c, p.ldc, height, width, k, p.alpha, before);
      }
  }

  static void short_k(const Product& p, float* a, float* b) {
    constexpr std::uintptr_t kVectorBytes = static_cast<std::uintptr_t>(Tiles::kColumnStep) * sizeof(float);
    const bool streams = !p.accumulate && p.m * p.n * 4 >= kLargeBytes && p.ldc % Tiles::kColumnStep == 0 &&
                         reinterpret_cast<std::uintptr_t>(p.c) % kVectorBytes == 0;
    for (std::int64_t column = 0; column < p.n; column += Tiles::kBlockColumns) {
      const std::int64_t columns = least(Tiles::kBlockColumns, p.n - column);
      const Panels of_b = panels(p, b, 0, column, columns);
      for (std::int64_t row = 0; row < p.m; row += Tiles::kBlockRows) {
        const std::int64_t rows = least(Tiles::kBlockRows, p.m - row);
        pack_a(p.a.at(row, 0), a, rows, p.k);
        if (streams)
          rows_of_tiles<true>(p, a, of_b, row, rows, column, columns);
        else
          rows_of_tiles<false>(p, a, of_b, row, rows, column, columns);
      }
    }
    if (streams) _mm_sfence();
  }

  static void many_rows(const Product& p, float* a, float* b) {
    const std::int64_t most_rows = equal_blocks(p.m, Tiles::kBlockRows, kTileRows),
                       most_columns = equal_blocks(p.n, Tiles::kBlockColumns, kTileColumns);
    for (std::int64_t column = 0; column < p.n; column += most_columns) {
      const std::int64_t columns = least(most_columns, p.n - column);
      for (std::int64_t first = 0; first < p.k; first += kBlockK) {
        const Panels of_b = panels(p, b, first, column, columns);
        for (std::int64_t row = 0; row < p.m; row += most_rows) {
          const std::int64_t rows = least(most_rows, p.m - row);
          pack_a(p.a.at(row, first), a, rows, least(kBlockK, p.k - first));
          multiply_packed(p, a, of_b, row, rows, column, columns, first);
        }
      }
    }
  }

  static void multiply_to_floats(const Product& p, float* a, float* b) {
    const bool by_columns = p.packed_b != nullptr || p.b.row_step == 1;
    if (by_columns && p.m <= kVeryFewRows)
      few_rows_by_columns(p, a, b, kTileColumns);
    else if (by_columns && p.m <= Tiles::kBlockRows && units(p.k) <= kMostUnitsOfAll)
      few_rows_by_columns(p, a, b, kFewColumns);
    else if (p.m <= Tiles::kBlockRows)
      few_rows(p, a, b);
    else if (p.k <= kShortK)
      short_k(p, a, b);
    else
      many_rows(p, a, b);
  }

  // c in bf16: sums of several blocks of k need floats, so that a part of c is made in memory that stays in
  // the caches, and is rounded from there.
  static constexpr std::int64_t kPartRows = 2 * Tiles::kBlockRows, kPartColumns = 8 * kTileColumns;

  static std::uint16_t rounded(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t even = bits + 0x7fffu + (bits >> 16 & 1u);
    return static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : even) >> 16);
  }

  static void multiply_to_bf16(const Product& p, float* a, float* b, float* part) {
    for (std::int64_t column = 0; column < p.n; column += kPartColumns) {
      for (std::int64_t row = 0; row < p.m; row += kPartRows) {
        Product of = p;
        of.m = least(kPartRows, p.m - row), of.n = least(kPartColumns, p.n - column);
        of.a = p.a.at(row, 0), of.b = p.b.at(0, column);
        of.c = part, of.ldc = of.n;
        if (p.bias != nullptr) of.bias = p.bias + column;
        if (p.packed_b != nullptr) of.packed_b = p.packed_b + column * units(p.k);
        multiply_to_floats(of, a, b);
        for (std::int64_t i = 0; i < of.m; ++i) {
          std::uint16_t* const to = p.c_bf16 + (row + i) * p.ldc + column;
#pragma GCC ivdep
          for (std::int64_t j = 0; j < of.n; ++j) to[j] = rounded(part[i * of.n + j]);
        }
      }
    }
  }

  // a, b, and a part of c.
  static std::int64_t floats_of_b(std::int64_t n, std::int64_t k) {
    const std::int64_t most = Tiles::kBlockColumns > kFewColumns ? Tiles::kBlockColumns : kFewColumns;
    return least(most, rounded_up(n, kTileColumns)) * units(least(k, kBlockK));
  }

  static std::int64_t scratch(std::int64_t n, std::int64_t k) noexcept {
    return floats_of_a(k) + floats_of_b(n, k) + kPartRows * least(kPartColumns, n) + kLine;
  }

  static void multiply(const Product& p, float* scratch) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(scratch);
    constexpr std::uintptr_t kBytes = kLine * sizeof(float);
    float* const a = reinterpret_cast<float*>((address + kBytes - 1) / kBytes * kBytes);
    float* const b = a + floats_of_a(p.k);
    [[maybe_unused]] const typename Tiles::Use registers;
    if (p.c_bf16 != nullptr)
      multiply_to_bf16(p, a, b, b + floats_of_b(p.n, p.k));
    else
      multiply_to_floats(p, a, b);
  }

  // --- kept matrices

  static std::int64_t packed_floats(std::int64_t n, std::int64_t k) noexcept {
    return rounded_up(n, kTileColumns) * units(k);
  }

  static void pack_for_keeping(const Matrix& b, std::int64_t n, std::int64_t k, std::int64_t column,
                               float* to) noexcept {
    float* const panel = to + column * units(k);
    for (std::int64_t first = 0; first < k; first += kBlockK)
      pack_b(b.at(first, column), panel + units(first) * kTileColumns, least(kTileColumns, n - column),
             least(kBlockK, k - first));
  }

  static constexpr Kernel kernel{Tiles::kName, &scratch,       &multiply,
                                 kTileColumns, &packed_floats, &pack_for_keeping};
};

}  // namespace
}  // namespace weft::kernels::gemm
