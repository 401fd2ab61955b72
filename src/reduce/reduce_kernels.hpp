// The reduction kernels, written once and included by one file per instruction set. Vectors, numbers,
// reductions and loops are in kernels/. The table of kernels is here. reduce_isa.hpp explains why all code
// lies in an unnamed namespace and calls nothing of the C++ library.
//
// The design: a *number* defines how a dtype is stored and in which type it is accumulated (16-bit floats in
// f32, integers in their unsigned twin, so that sums wrap). A *reduction* of a number and a kind can load a
// chunk of W elements into an accumulator, combine two accumulators, and finish an accumulator: divide for
// avg, make NaNs canonical, round to the stored form. The *tree* over n inputs is unrolled in registers for n
// <= 4 (a leaf). Larger n recurse over blocks of accumulators that stay in the first-level cache, in halves
// split at the largest power of two below n. A chunk is one vector. The remainder of a count is processed in
// chunks of half the width, a quarter, … one element.
//
// Sums, averages, minima and maxima are the most frequent reductions. They have separate loops for few
// inputs. All other reductions use one shape, blocks of accumulators. Rarer reductions share code. A bit
// operation on any type works on bytes. A logical operation first converts elements to 0 and 1. A sum of
// complex numbers is a sum of twice as many reals.
//
// Element i is loaded from all inputs before it is stored to any output, so outputs may be inputs.
//
// Equal bits on all machines: each operation below is one IEEE operation per element, whatever the width.
// Hardware leaves the sign and payload of a NaN open, so every NaN result, including those of sum and avg,
// becomes the canonical quiet NaN (positive, no payload). Conversions of 16-bit floats equal those in
// weft/base/dtype.hpp for all values except NaN.
#pragma once

#include <cstddef>

#include "reduce/kernels/loops.hpp"
#include "reduce/kernels/numbers.hpp"
#include "reduce/kernels/reductions.hpp"
#include "reduce/kernels/stream_copy.hpp"
#include "reduce/reduce_isa.hpp"

namespace weft {
namespace {

template <KernelKind kind, int bytes>
constexpr ReduceKernel kBits = kernel_of_parts<Reduction<U8, kind>, bytes>;

// Averages of f32, in f64. For two numbers, a sum in f32, if it is finite, gives the same bits in half of the
// time. An f64 holds more than twice the digits of an f32, so rounding twice gives the result of rounding
// once.
using AverageOfF32 = Reduction<F32InF64, KernelKind::avg>;
using AverageOfTwoF32 = Reduction<F32, KernelKind::avg>;

// One row for each DType, in its order; in each row one kernel for each KernelKind, in its order. A sum or
// product that wraps has the same bits for signed and unsigned integers, so both use one kernel. f8 is never
// combined.
#define WEFT_REDUCE_FLOAT(Number, average)                                                           \
  {                                                                                                  \
    kernel<Reduction<Number, KernelKind::sum>>, average, kernel<Reduction<Number, KernelKind::min>>, \
        kernel<Reduction<Number, KernelKind::max>>, kernel<Reduction<Number, KernelKind::prod>>,     \
        kernel<Reduction<Number, KernelKind::premul_sum>>                                            \
  }
#define WEFT_REDUCE_COMPLEX(Part, average, product) \
  { kernel_of_parts<Reduction<Part, KernelKind::sum>, 2>, average, nullptr, nullptr, product }
#define WEFT_REDUCE_COMMON_INT(Number, Wraps)                                  \
  kernel<Reduction<Wraps, KernelKind::sum>>,                                   \
      kernel<Reduction<Number, KernelKind::avg>, AverageOfTwo<Number, Wraps>>, \
      kernel<Reduction<Number, KernelKind::min>>, kernel<Reduction<Number, KernelKind::max>>
#define WEFT_REDUCE_TRUTHS(Wraps, bytes)                                                                   \
  kBits<KernelKind::bit_and, bytes>, kBits<KernelKind::bit_or, bytes>, kBits<KernelKind::bit_xor, bytes>,  \
      kernel<Reduction<Wraps, KernelKind::logical_and>>, kernel<Reduction<Wraps, KernelKind::logical_or>>, \
      kernel<Reduction<Wraps, KernelKind::logical_xor>>

#define WEFT_REDUCE_INT(Number, Wraps, bytes)                                              \
  {                                                                                        \
    WEFT_REDUCE_COMMON_INT(Number, Wraps), kernel<Reduction<Wraps, KernelKind::prod>>,     \
        kernel<Reduction<Wraps, KernelKind::premul_sum>>, WEFT_REDUCE_TRUTHS(Wraps, bytes) \
  }
#define WEFT_REDUCE_BOOL                                                                              \
  {                                                                                                   \
    nullptr, nullptr, kernel<Reduction<U8, KernelKind::min>>, kernel<Reduction<U8, KernelKind::max>>, \
        nullptr, nullptr, WEFT_REDUCE_TRUTHS(U8, 1)                                                   \
  }

#define WEFT_REDUCE_TABLE(name)                                                          \
  {                                                                                      \
    name,                                                                                \
        {WEFT_REDUCE_FLOAT(F64, (kernel<Reduction<F64, KernelKind::avg>>)),              \
         WEFT_REDUCE_FLOAT(F32, (kernel<AverageOfF32, AverageOfTwoF32>)),                \
         WEFT_REDUCE_FLOAT(F16, (kernel<Reduction<F16, KernelKind::avg>>)),              \
         WEFT_REDUCE_FLOAT(Bf16, (kernel<Reduction<Bf16, KernelKind::avg>>)),            \
         WEFT_REDUCE_INT(I8, U8, 1),                                                     \
         WEFT_REDUCE_INT(I16, U16, 2),                                                   \
         WEFT_REDUCE_INT(I32, U32, 4),                                                   \
         WEFT_REDUCE_INT(I64, U64, 8),                                                   \
         WEFT_REDUCE_INT(U8, U8, 1),                                                     \
         WEFT_REDUCE_INT(U16, U16, 2),                                                   \
         WEFT_REDUCE_INT(U32, U32, 4),                                                   \
         WEFT_REDUCE_INT(U64, U64, 8),                                                   \
         WEFT_REDUCE_BOOL,                                                               \
         {},                                                                             \
         {},                                                                             \
         WEFT_REDUCE_COMPLEX(F32, (kernel_of_parts<AverageOfF32, 2, AverageOfTwoF32>),   \
                             kernel<ComplexProduct<F32>>),                               \
         WEFT_REDUCE_COMPLEX(F64, (kernel_of_parts<Reduction<F64, KernelKind::avg>, 2>), \
                             kernel<ComplexProduct<F64>>)},                              \
        stream_copy                                                                      \
  }

}  // namespace
}  // namespace weft
