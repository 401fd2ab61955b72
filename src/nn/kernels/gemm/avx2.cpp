// The products of gemm.hpp. Compiled for AVX2 and FMA; called only where the CPU has them.
#include <immintrin.h>

#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::gemm {
namespace {

constexpr std::int64_t kVector = 8, kTileRows = 4, kTileVectors = 3, kTileColumns = kTileVectors * kVector;
// A panel of b, 24 KB, stays in the first cache, a block of a, 192 KB, in the second, a block of b, 4 MB, in the third.
constexpr std::int64_t kBlockK = 256, kBlockRows = 192, kBlockColumns = 172 * kTileColumns;
// Where a is one block, blocks of b are small, so that they are still in the second cache when they are used.
constexpr std::int64_t kFewColumns = 8 * kTileColumns;
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
  constexpr std::int64_t kAhead = 128;  // elements, for the prefetch
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
            _mm_prefetch(reinterpret_cast<const char*>(rows + q * i_step + p + kAhead), _MM_HINT_T0);
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

void pack_a(const Matrix& a, float* to, std::int64_t rows, std::int64_t k) {
  if (a.is_bf16)
    pack<kTileRows, std::uint16_t>(a.data, a.row_step, a.column_step, to, rows, k);
  else
    pack<kTileRows, float>(a.data, a.row_step, a.column_step, to, rows, k);
}

void pack_b(const Matrix& b, float* to, std::int64_t columns, std::int64_t k) {
  if (b.is_bf16)
    pack<kTileColumns, std::uint16_t>(b.data, b.column_step, b.row_step, to, columns, k);
  else
    pack<kTileColumns, float>(b.data, b.column_step, b.row_step, to, columns, k);
}

// What a tile is added to: c itself, or the bias, whose row_step is 0; or nothing.
struct Before {
  const float* data;
  std::int64_t row_step;
};

// a: (k, 4), b: (k, 24), of which kVectors * 8 columns are taken; c: (4, kVectors * 8)
template <int kVectors>
void tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t k, float alpha,
          Before before) {
  __m256 sum[kTileRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kTileRows; ++i) {
    _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(c + i * ldc + kVectors * kVector - 1), _MM_HINT_T0);
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm256_setzero_ps();
  }
#pragma GCC unroll 4
  for (std::int64_t p = 0; p < k; ++p) {
    __m256 row[kVectors];
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) row[j] = _mm256_load_ps(b + p * kTileColumns + j * kVector);
#pragma GCC unroll 4
    for (int i = 0; i < kTileRows; ++i) {
      const __m256 x = _mm256_broadcast_ss(a + p * kTileRows + i);
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm256_fmadd_ps(x, row[j], sum[i][j]);
    }
  }
  const __m256 factor = _mm256_set1_ps(alpha);
#pragma GCC unroll 4
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) {
      const __m256 result =
          before.data == nullptr
              ? _mm256_mul_ps(factor, sum[i][j])
              : _mm256_fmadd_ps(factor, sum[i][j],
                                _mm256_loadu_ps(before.data + i * before.row_step + j * kVector));
      _mm256_storeu_ps(c + i * ldc + j * kVector, result);
    }
  }
}

// columns is a multiple of 8
void whole_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t columns,
                std::int64_t k, float alpha, Before before) {
  switch (columns / kVector) {
    case 1: return tile<1>(a, b, c, ldc, k, alpha, before);
    case 2: return tile<2>(a, b, c, ldc, k, alpha, before);
    default: return tile<3>(a, b, c, ldc, k, alpha, before);
  }
}

// One that is not: made in memory of its own.
void part_of_a_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                    std::int64_t columns, std::int64_t k, float alpha, Before before) {
  alignas(64) float whole[kTileRows * kTileColumns] = {};
  for (std::int64_t i = 0; before.data != nullptr && i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j)
      whole[i * kTileColumns + j] = before.data[i * before.row_step + j];
  whole_tile(a, b, whole, kTileColumns, rounded_up(columns, kVector), k, alpha,
             before.data == nullptr ? before : Before{whole, kTileColumns});
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) c[i * ldc + j] = whole[i * kTileColumns + j];
}

// c: (rows, columns), of p and at (row, column) of it; a and b: packed, of the block of k that begins at `first`
void multiply_packed(const Product& p, const float* a, const float* b, std::int64_t row, std::int64_t rows,
                     std::int64_t column, std::int64_t columns, std::int64_t first, std::int64_t k) {
  for (std::int64_t j = 0; j < columns; j += kTileColumns) {
    for (std::int64_t i = 0; i < rows; i += kTileRows) {
      float* const c = p.c + (row + i) * p.ldc + column + j;
      Before before{nullptr, 0};
      if (p.accumulate || first > 0)
        before = {c, p.ldc};
      else if (p.bias != nullptr)
        before = {p.bias + column + j, 0};
      const std::int64_t height = least(kTileRows, rows - i), width = least(kTileColumns, columns - j);
      if (height == kTileRows && width % kVector == 0)
        whole_tile(a + i * k, b + j * k, c, p.ldc, width, k, p.alpha, before);
      else
        part_of_a_tile(a + i * k, b + j * k, c, p.ldc, height, width, k, p.alpha, before);
    }
  }
}

struct Blocks {
  std::int64_t rows, columns;  // of a and of b

  Blocks(std::int64_t m, std::int64_t n)
      : rows(equal_blocks(m, kBlockRows, kTileRows)),
        columns(m <= kBlockRows ? kFewColumns : equal_blocks(n, kBlockColumns, kTileColumns)) {}
};

std::int64_t floats_of_a(std::int64_t k) { return rounded_up(kBlockRows * least(k, kBlockK), kLine); }

// a is one block: it is packed once for each block of k.
void few_rows(const Product& p, const Blocks& blocks, float* a, float* b) {
  for (std::int64_t first = 0; first < p.k; first += kBlockK) {
    const std::int64_t k = least(kBlockK, p.k - first);
    pack_a(p.a.at(0, first), a, p.m, k);
    for (std::int64_t column = 0; column < p.n; column += blocks.columns) {
      const std::int64_t columns = least(blocks.columns, p.n - column);
      pack_b(p.b.at(first, column), b, columns, k);
      multiply_packed(p, a, b, 0, p.m, column, columns, first, k);
    }
  }
}

void many_rows(const Product& p, const Blocks& blocks, float* a, float* b) {
  for (std::int64_t column = 0; column < p.n; column += blocks.columns) {
    const std::int64_t columns = least(blocks.columns, p.n - column);
    for (std::int64_t first = 0; first < p.k; first += kBlockK) {
      const std::int64_t k = least(kBlockK, p.k - first);
      pack_b(p.b.at(first, column), b, columns, k);
      for (std::int64_t row = 0; row < p.m; row += blocks.rows) {
        const std::int64_t rows = least(blocks.rows, p.m - row);
        pack_a(p.a.at(row, first), a, rows, k);
        multiply_packed(p, a, b, row, rows, column, columns, first, k);
      }
    }
  }
}

}  // namespace

std::int64_t avx2_scratch(std::int64_t n, std::int64_t k) noexcept {
  return floats_of_a(k) + least(kBlockColumns, rounded_up(n, kTileColumns)) * least(k, kBlockK) + kLine;
}

void avx2(const Product& p, float* scratch) noexcept {
  const Blocks blocks(p.m, p.n);
  const auto address = reinterpret_cast<std::uintptr_t>(scratch);
  constexpr std::uintptr_t kBytes = kLine * sizeof(float);
  float* const a = reinterpret_cast<float*>((address + kBytes - 1) / kBytes * kBytes);
  float* const b = a + floats_of_a(p.k);
  if (p.m <= kBlockRows)
    few_rows(p, blocks, a, b);
  else
    many_rows(p, blocks, a, b);
}

bool has_avx2() noexcept { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace weft::kernels::gemm
