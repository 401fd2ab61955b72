// The products of gemm.hpp, generic: the file of an instruction set includes it once, so that every function here is compiled for
// that set alone. All is in an unnamed namespace: the linker must not take one set's functions for another's.
//
// What a set is, a struct of static members:
//   Vector, kLanes                            a vector register and how many floats it has
//   kTileRows (4 or 8), kTileVectors (2, 3)   the tile of c that stays in registers: rows, and columns in vectors
//   kBlockRows (a multiple of kTileRows)      of a block of a, which stays in the second cache with a panel of b
//   kBlockColumns (a multiple of the tile's)  of a block of b, which stays in the third
//   zero, load, load_aligned, store, fill     a vector of floats: of memory, of one float
//   multiply_add(x, y, z), multiply(x, y)     x y + z with one rounding, x y
#pragma once

#include <immintrin.h>

#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::gemm {
namespace {

constexpr std::int64_t kBlockK = 256;
constexpr std::int64_t kLine = 16;  // floats

constexpr std::int64_t least(std::int64_t x, std::int64_t y) { return x < y ? x : y; }
constexpr std::int64_t rounded_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }
// The size of the blocks of x, as equal as they can be, of at most `most`, which is a multiple of `to` as they are.
constexpr std::int64_t equal_blocks(std::int64_t x, std::int64_t most, std::int64_t to) {
  const std::int64_t count = (x + most - 1) / most;
  return count == 0 ? to : rounded_up((x + count - 1) / count, to);
}

inline __m128 four(const float* from) { return _mm_loadu_ps(from); }
inline __m128 four(const std::uint16_t* from) {  // bf16 is the upper half of a float
  const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
}
inline float one(const float* from) { return *from; }
inline float one(const std::uint16_t* from) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(*from) << 16)));
}

// Panels are packed of a part of a matrix whose element (i, p), i in [0, count), p in [0, k), is at from[i * i_step + p * p_step]:
// to[(i / kWidth * k + p) * kWidth + i % kWidth].

// i_step is 1. Four steps of k at a time, so that the lines of panels, which lie some power of two apart, are written whole.
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
void pack(const void* data, std::int64_t i_step, std::int64_t p_step, float* to, std::int64_t count,
          std::int64_t k) {
  if (i_step == 1)
    pack_rows<kWidth>(static_cast<const In*>(data), p_step, to, count, k);
  else
    pack_columns<kWidth>(static_cast<const In*>(data), i_step, to, count, k);
}

// --- tiles

// What a tile is added to: c itself, or the bias, whose row_step is 0; or nothing.
struct Before {
  const float* data;
  std::int64_t row_step;
};

template <class Set>
struct Blocked {
  using Vector = typename Set::Vector;
  static constexpr std::int64_t kLanes = Set::kLanes, kTileRows = Set::kTileRows,
                                kTileColumns = Set::kTileVectors * kLanes;
  // Where a is one block, blocks of b are small, so that they are still in the second cache when they are used.
  static constexpr std::int64_t kFewColumns = 8 * kTileColumns;

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

  // a: (k, kTileRows), of which kRows are taken, b: (k, kTileColumns), of which kVectors * kLanes; c: (kRows, kVectors * kLanes)
  template <int kRows, int kVectors>
  static void tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t k, float alpha,
                   Before before) {
    Vector sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc + kVectors * kLanes - 1), _MM_HINT_T0);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Set::zero();
    }
#pragma GCC unroll 4
    for (std::int64_t p = 0; p < k; ++p) {
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
        Set::store(c + i * ldc + j * kLanes, result);
      }
    }
  }

  // columns is a multiple of kLanes
  template <int kRows>
  static void tile_of_rows(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t columns,
                           std::int64_t k, float alpha, Before before) {
    static_assert(Set::kTileVectors == 2 || Set::kTileVectors == 3);
    if (columns == kLanes) return tile<kRows, 1>(a, b, c, ldc, k, alpha, before);
    if constexpr (Set::kTileVectors == 3)
      if (columns == 3 * kLanes) return tile<kRows, 3>(a, b, c, ldc, k, alpha, before);
    tile<kRows, 2>(a, b, c, ldc, k, alpha, before);
  }

  // rows is a multiple of 4, columns of kLanes
  static void whole_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                         std::int64_t columns, std::int64_t k, float alpha, Before before) {
    static_assert(kTileRows == 4 || kTileRows == 8);
    if constexpr (kTileRows == 8)
      if (rows == 8) return tile_of_rows<8>(a, b, c, ldc, columns, k, alpha, before);
    tile_of_rows<4>(a, b, c, ldc, columns, k, alpha, before);
  }

  // One that is not: made in memory of its own.
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

  // c: (rows, columns), of p and at (row, column) of it; a and b: packed, of the block of k that begins at `first`
  static void multiply_packed(const Product& p, const float* a, const float* b, std::int64_t row,
                              std::int64_t rows, std::int64_t column, std::int64_t columns,
                              std::int64_t first, std::int64_t k) {
    for (std::int64_t j = 0; j < columns; j += kTileColumns) {
      for (std::int64_t i = 0; i < rows; i += kTileRows) {
        float* const c = p.c + (row + i) * p.ldc + column + j;
        Before before{nullptr, 0};
        if (p.accumulate || first > 0)
          before = {c, p.ldc};
        else if (p.bias != nullptr)
          before = {p.bias + column + j, 0};
        const std::int64_t height = least(kTileRows, rows - i), width = least(kTileColumns, columns - j);
        if (height % 4 == 0 && width % kLanes == 0)
          whole_tile(a + i * k, b + j * k, c, p.ldc, height, width, k, p.alpha, before);
        else
          part_of_a_tile(a + i * k, b + j * k, c, p.ldc, height, width, k, p.alpha, before);
      }
    }
  }

  // Of so few rows all of a is packed at once, where b is stored as its transpose: b, which is nearly all there is to read, is then
  // read from end to end.
  static constexpr std::int64_t kVeryFewRows = 16;

  static std::int64_t floats_of_a(std::int64_t k) {
    const std::int64_t block = Set::kBlockRows * least(k, kBlockK), all = kVeryFewRows * k;
    return rounded_up(block > all ? block : all, kLine);
  }

  static void very_few_rows(const Product& p, float* a, float* b) {
    const std::int64_t rows = rounded_up(p.m, kTileRows);
    for (std::int64_t first = 0; first < p.k; first += kBlockK)
      pack_a(p.a.at(0, first), a + first * rows, p.m, least(kBlockK, p.k - first));
    for (std::int64_t column = 0; column < p.n; column += kTileColumns) {
      const std::int64_t columns = least(kTileColumns, p.n - column);
      for (std::int64_t first = 0; first < p.k; first += kBlockK) {
        const std::int64_t k = least(kBlockK, p.k - first);
        pack_b(p.b.at(first, column), b, columns, k);
        multiply_packed(p, a + first * rows, b, 0, p.m, column, columns, first, k);
      }
    }
  }

  // a is one block: it is packed once for each block of k.
  static void few_rows(const Product& p, float* a, float* b) {
    for (std::int64_t first = 0; first < p.k; first += kBlockK) {
      const std::int64_t k = least(kBlockK, p.k - first);
      pack_a(p.a.at(0, first), a, p.m, k);
      for (std::int64_t column = 0; column < p.n; column += kFewColumns) {
        const std::int64_t columns = least(kFewColumns, p.n - column);
        pack_b(p.b.at(first, column), b, columns, k);
        multiply_packed(p, a, b, 0, p.m, column, columns, first, k);
      }
    }
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
    if (p.m <= kVeryFewRows && p.b.row_step == 1)
      very_few_rows(p, a, b);
    else if (p.m <= Set::kBlockRows)
      few_rows(p, a, b);
    else
      many_rows(p, a, b);
  }

  static constexpr Kernel kernel{&scratch, &multiply};
};

}  // namespace
}  // namespace weft::kernels::gemm
