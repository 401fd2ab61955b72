// The products of a block of attention. Their matrices are first laid out in the form in which the products
// read them, because each matrix is used more than once. Private to the files in this folder and to tests.
// All are pure functions of their arguments.
//
// A unit is what one multiply-add takes from a row of the left matrix. It is a float, or two bf16 that follow
// each other in k; the second of these is 0 behind the end of k. A unit has four bytes in both cases, and
// matrices of units lie in arrays of float. A row of units is padded to a multiple of kUnitsOfLine, so that
// it can be read and written in complete vectors. The contents of the padding have no effect.
#pragma once

#include <cstdint>

namespace weft::kernels::blocks {

inline constexpr std::int64_t kUnitsOfLine = 16;
constexpr std::int64_t padded(std::int64_t units) {
  return (units + kUnitsOfLine - 1) / kUnitsOfLine * kUnitsOfLine;
}

/// c = alpha a b, or c += alpha a b where `accumulate`. a: (m, k), element (row, p) at row * a_row_step + p *
/// a_step, of which one is 1; b: (k, n) with rows ldb apart, c: (m, n) floats with rows ldc apart; k in
/// units. An element of c is computed as in gemm/gemm.hpp, whatever m and n are. In f32 it has the same bits.
struct Product {
  const float* a;
  std::int64_t a_row_step, a_step;
  const float* b;
  std::int64_t ldb;
  float* c;
  std::int64_t ldc, m, n, k;
  float alpha = 1.0f;
  bool accumulate = false;
};

/// Lays out a matrix of floats, whose rows are `stride` apart, in rows of units that are `ld` apart.
using LayOut = void (*)(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                        float* to, std::int64_t ld) noexcept;

/// The products of one instruction set and one format of units.
struct Kernel {
  std::int64_t steps;   ///< of k in a unit: 1 or 2
  LayOut along_rows;    ///< k goes along the rows of `from`. to: (rows, units of columns)
  LayOut down_columns;  ///< k goes down its columns. to: (units of rows, columns)
  LayOut transposed;    ///< k goes along its rows. to: (units of columns, rows)
  void (*multiply)(const Product& p) noexcept;

  std::int64_t units(std::int64_t k) const { return (k + steps - 1) / steps; }
};

/// Returns null if this build does not have it or cpu_isa() does not allow it.
const Kernel* avx512() noexcept;
/// Operands are rounded to bf16; sums are in f32. Numbers below 2^-126 count as 0, as the CPU treats them.
const Kernel* avx512_bf16() noexcept;

}  // namespace weft::kernels::blocks
