// weft's own matrix products, for x86 CPUs with AVX2 or AVX-512, whose bits are known. Private to cpu_*.cpp
// and tests; pure functions of their arguments.
//
// How: K. Goto, R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, in the form of F.
// Van Zee, R. van de Geijn, "BLIS", 2015. Both matrices are packed in blocks that fit the caches, into panels
// of some rows of a and some columns of b, with zeros beyond the edges; a tile of c stays in registers while
// a block of k is processed (blocked.hpp).
//
// An element of c is, whatever m, n, the steps of the matrices and its place in c are,
//   fma(alpha, the sum over the last block of k,
//       … fma(alpha, the sum over the first, what was there or the bias)),
// where a block is 256 long and its sum is made by one fma after the other, in order; with avx2() and
// avx512() alike. So a product may be divided into any pieces of rows and columns, and a row of c depends on
// its row of a alone.
#pragma once

#include <cstdint>

namespace weft::kernels::gemm {

/// Products of so few steps are limited by the memory traffic of c.
inline constexpr std::int64_t kShortK = 16;

/// Element (row, column) is data[row * row_step + column * column_step], a float or a bf16; one of the steps
/// is 1.
struct Matrix {
  const void* data;
  std::int64_t row_step, column_step;
  bool is_bf16;

  [[gnu::always_inline]] Matrix at(std::int64_t row, std::int64_t column) const {
    const std::int64_t bytes = (row * row_step + column * column_step) * (is_bf16 ? 2 : 4);
    return {static_cast<const char*>(data) + bytes, row_step, column_step, is_bf16};
  }
};

/// c = alpha a b, or c += alpha a b where `accumulate`, or c = alpha a b + bias, row by row, if there is a
/// bias. a: (m, k), b: (k, n), c: (m, n) with rows ldc apart, bias: (n) or null. k > 0.
struct Product {
  Matrix a, b;
  float* c;
  std::int64_t ldc, m, n, k;
  float alpha = 1.0f;
  bool accumulate = false;
  const float* bias = nullptr;
};

/// The products of one instruction set.
struct Kernel {
  /// How many floats of scratch memory products with up to n columns and up to this k need.
  std::int64_t (*scratch)(std::int64_t n, std::int64_t k) noexcept;
  /// `scratch`: any alignment; its contents are undefined.
  void (*multiply)(const Product& p, float* scratch) noexcept;
};

/// Returns null if this build does not have it or cpu_isa() does not allow it.
const Kernel* avx2() noexcept;
const Kernel* avx512() noexcept;

}  // namespace weft::kernels::gemm
