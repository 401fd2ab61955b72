// Matrix products whose bits are known. Private to cpu_*.cpp and tests; pure functions of their arguments.
//
// How: K. Goto, R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, in the form of F.
// Van Zee, R. van de Geijn, "BLIS", 2015. Both matrices are packed in blocks that fit the caches, into panels
// of some rows of a and some columns of b, with zeros beyond the edges. A tile of c stays in registers while
// a block of k is processed (blocked.hpp).
//
// An element of c is, whatever m, n, the steps of the matrices and its place in c are,
//   fma(alpha, the sum over the last block of k,
//       … fma(alpha, the sum over the first, what was there or the bias)).
// So a product may be divided into any pieces of rows and columns, and a row of c depends on its row of a
// alone. Only the bit pattern of a NaN may change. The block and its sum depend on the kind of instructions:
//
// avx2(), avx512(): a block is 256 long, and its sum is made by one fma after the other, in order; both have
// the same bits. Operands in bf16 are widened, so that the bits are those of f32.
//
// plain(): the same blocks and order; each product is rounded before it is added, unless the compiler's
// target has an fma.
//
// avx512_bf16(): a block is 1024 long, of pairs (k, k + 1). A missing second element is 0. VDPBF16PS adds the
// products of one pair after the other: first that of k + 1, then that of k. Each is an fma to nearest even
// that takes and gives numbers below 2^-126 as 0.
//
// amx(): the same blocks. A block's sum is that of parts of 32, in order, the last one filled up with 0.
// TDPBF16PS makes a part from two sums, of its even and of its odd k, each by one fma after the other, adds
// the even to the odd sum, and the result to the block's, all to nearest even, with numbers below 2^-126 as
// 0.
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
  /// If not null, b was packed by the same Kernel's pack_b, and the elements of `b` are not read.
  const float* packed_b = nullptr;
  /// If this is not null, c is written here, each element rounded once, to nearest even, and `c` is not used.
  /// It is not for `accumulate`.
  std::uint16_t* c_bf16 = nullptr;
};

/// The products of one instruction set.
struct Kernel {
  const char* name;  ///< for reports
  /// How many floats of scratch memory products with up to n columns and up to this k need.
  std::int64_t (*scratch)(std::int64_t n, std::int64_t k) noexcept;
  /// `scratch`: any alignment. Its contents are undefined.
  void (*multiply)(const Product& p, float* scratch) noexcept;
  /// A packed matrix consists of panels of this many columns, each with all of k. From column j on, a
  /// multiple of `columns`, it begins at packed + packed_floats(j, k).
  std::int64_t columns;
  /// How many floats a packed matrix (k, n) takes.
  std::int64_t (*packed_floats)(std::int64_t n, std::int64_t k) noexcept;
  /// Packs the panel of b, (k, n), that begins at `column`, into the packed matrix `to`, whose alignment is
  /// 64 bytes.
  void (*pack_b)(const Matrix& b, std::int64_t n, std::int64_t k, std::int64_t column, float* to) noexcept;
};

/// Products of floats, and of bf16 that are widened when they are packed. Returns null if this build does not
/// have it or cpu_isa() does not allow it.
const Kernel* avx2() noexcept;
const Kernel* avx512() noexcept;
/// For every CPU, in plain loops.
const Kernel* plain() noexcept;
/// Whether plain() adds a product with one rounding.
bool plain_is_fused() noexcept;

/// Products of bf16 alone. Returns null like the others.
const Kernel* avx512_bf16() noexcept;
const Kernel* amx() noexcept;

/// The best for floats, and for bf16.
const Kernel* best_f32() noexcept;
const Kernel* best_bf16() noexcept;

}  // namespace weft::kernels::gemm
