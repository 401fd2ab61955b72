// The products of gemm.hpp for every CPU: plain loops, slow (a third of AVX-512's speed with SSE2 on the same
// core). They are written in vectors of four floats, which GCC and Clang compile for any target.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::gemm {
namespace {

constexpr std::int64_t kBlockK = 256, kLanes = 4, kTileRows = 4, kTileColumns = 2 * kLanes;
using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));

float element(const Matrix& x, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * x.row_step + column * x.column_step;
  if (!x.is_bf16) return static_cast<const float*>(x.data)[at];
  const std::uint32_t bits = std::uint32_t{static_cast<const std::uint16_t*>(x.data)[at]} << 16;
  float wide;  // bf16 is the upper half of a float
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

float multiply_add(float x, float y, float z) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

Vector multiply_add(float x, Vector y, Vector z) {
#if defined(__FP_FAST_FMAF)
  for (std::int64_t i = 0; i < kLanes; ++i) z[i] = __builtin_fmaf(x, y[i], z[i]);
  return z;
#else
  return x * y + z;
#endif
}

// A panel of b: (k, kTileColumns), with zeros beyond the edge.
void pack_panel(const Matrix& b, std::int64_t columns, std::int64_t k, float* to) {
  for (std::int64_t p = 0; p < k; ++p)
    for (std::int64_t j = 0; j < kTileColumns; ++j)
      to[p * kTileColumns + j] = j < columns ? element(b, p, j) : 0.0f;
}

// A panel of a: (k, kTileRows).
void pack_rows(const Matrix& a, std::int64_t rows, std::int64_t k, float* to) {
  for (std::int64_t p = 0; p < k; ++p)
    for (std::int64_t i = 0; i < kTileRows; ++i) to[p * kTileRows + i] = i < rows ? element(a, i, p) : 0.0f;
}

// sums: (kTileRows, kTileColumns)
void tile(const float* a, const float* b, std::int64_t k, float* sums) {
  Vector sum[kTileRows][2] = {};
  for (std::int64_t p = 0; p < k; ++p, a += kTileRows, b += kTileColumns) {
    Vector low, high;
    std::memcpy(&low, b, sizeof low);
    std::memcpy(&high, b + kLanes, sizeof high);
#pragma GCC unroll 4
    for (int i = 0; i < kTileRows; ++i) {
      sum[i][0] = multiply_add(a[i], low, sum[i][0]);
      sum[i][1] = multiply_add(a[i], high, sum[i][1]);
    }
  }
  std::memcpy(sums, sum, sizeof sum);
}

// All rows, and a panel of b.
void multiply_panel(const Product& p, std::int64_t first, std::int64_t k, std::int64_t column,
                    const float* panel, float* rows) {
  const std::int64_t width = std::min(kTileColumns, p.n - column);
  float sums[kTileRows * kTileColumns];
  for (std::int64_t row = 0; row < p.m; row += kTileRows) {
    const std::int64_t height = std::min(kTileRows, p.m - row);
    tile(rows + row * k, panel, k, sums);
    for (std::int64_t i = 0; i < height; ++i)
      for (std::int64_t j = 0; j < width; ++j) {
        float& c = p.c[(row + i) * p.ldc + column + j];
        const float sum = sums[i * kTileColumns + j];
        if (first > 0 || p.accumulate)
          c = multiply_add(p.alpha, sum, c);
        else if (p.bias != nullptr)
          c = multiply_add(p.alpha, sum, p.bias[column + j]);
        else
          c = p.alpha * sum;
      }
  }
}

constexpr std::int64_t kBlockRows = 128;

constexpr std::int64_t kPartColumns = 32 * kTileColumns, kOfOperands = (kBlockRows + kTileColumns) * kBlockK;

std::int64_t scratch(std::int64_t /*n*/, std::int64_t /*k*/) noexcept {
  return kOfOperands + kBlockRows * kPartColumns;
}

void multiply_to_floats(const Product& whole, float* scratch) {
  for (std::int64_t row = 0; row < whole.m; row += kBlockRows) {
    Product p = whole;
    p.m = std::min(kBlockRows, whole.m - row);
    p.a = whole.a.at(row, 0);
    p.c = whole.c + row * whole.ldc;
    for (std::int64_t first = 0; first < p.k; first += kBlockK) {
      const std::int64_t k = std::min(kBlockK, p.k - first);
      for (std::int64_t i = 0; i < p.m; i += kTileRows)
        pack_rows(p.a.at(i, first), std::min(kTileRows, p.m - i), k, scratch + i * k);
      for (std::int64_t column = 0; column < p.n; column += kTileColumns) {
        float* const panel = scratch + kBlockRows * kBlockK;
        if (p.packed_b == nullptr)
          pack_panel(p.b.at(first, column), std::min(kTileColumns, p.n - column), k, panel);
        multiply_panel(p, first, k, column,
                       p.packed_b == nullptr ? panel : p.packed_b + column * p.k + first * kTileColumns,
                       scratch);
      }
    }
  }
}

std::uint16_t rounded(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t even = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : even) >> 16);
}

void multiply(const Product& p, float* scratch) noexcept {
  if (p.c_bf16 == nullptr) return multiply_to_floats(p, scratch);
  float* const part = scratch + kOfOperands;  // sums of several blocks of k need floats
  for (std::int64_t column = 0; column < p.n; column += kPartColumns)
    for (std::int64_t row = 0; row < p.m; row += kBlockRows) {
      Product of = p;
      of.m = std::min(kBlockRows, p.m - row), of.n = std::min(kPartColumns, p.n - column);
      of.a = p.a.at(row, 0), of.b = p.b.at(0, column);
      of.c = part, of.ldc = of.n;
      if (p.bias != nullptr) of.bias = p.bias + column;
      if (p.packed_b != nullptr) of.packed_b = p.packed_b + column * p.k;
      multiply_to_floats(of, scratch);
      for (std::int64_t i = 0; i < of.m; ++i)
        for (std::int64_t j = 0; j < of.n; ++j)
          p.c_bf16[(row + i) * p.ldc + column + j] = rounded(part[i * of.n + j]);
    }
}

std::int64_t packed_floats(std::int64_t n, std::int64_t k) noexcept {
  return (n + kTileColumns - 1) / kTileColumns * kTileColumns * k;
}

void pack_b(const Matrix& b, std::int64_t n, std::int64_t k, std::int64_t column, float* to) noexcept {
  pack_panel(b.at(0, column), std::min(kTileColumns, n - column), k, to + column * k);
}

constexpr Kernel kKernel{"plain loops", &scratch, &multiply, kTileColumns, &packed_floats, &pack_b};

}  // namespace

const Kernel* plain() noexcept { return &kKernel; }

bool plain_is_fused() noexcept {
#if defined(__FP_FAST_FMAF)
  return true;
#else
  return false;
#endif
}

const Kernel* best_f32() noexcept {
  for (const Kernel* kernel : {avx512(), avx2()})
    if (kernel != nullptr) return kernel;
  return plain();
}

const Kernel* best_bf16() noexcept {
  for (const Kernel* kernel : {amx(), avx512_bf16()})
    if (kernel != nullptr) return kernel;
  return best_f32();
}

}  // namespace weft::kernels::gemm
