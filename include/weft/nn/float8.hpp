// Numbers of eight bits for training: scales, casts that saturate, and the casts back. Functions on views of
// matrices. Like kernels, they use only their KernelContext. They run on the CPU. One thread at a time uses a
// KernelContext.
#pragma once

#include <cstdint>

#include "weft/base/view.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::float8 {

/// The elements of a matrix that share a scale: all of them, those of a row, or those of a column. The
/// columns of a tensor are its last dimension. All other dimensions together are its rows.
enum class Granularity : unsigned char { tensorwise, rowwise, columnwise };

/// The numbers of rows and columns of a tensor that is treated as a matrix. A scalar has one of each.
struct MatrixSize {
  std::int64_t rows, columns;
};
MatrixSize matrix_size(const Shape& shape) noexcept;
/// The number of scales of such a tensor: 1, its rows, or its columns.
std::int64_t scale_count(const Shape& shape, Granularity granularity) noexcept;

/// The largest finite value: 448 for f8e4m3, 57344 for f8e5m2. Throws bad_argument for other dtypes.
double largest_of(DType format);

/// Writes the largest magnitude of each group of elements that share a scale. x: f32 or bf16; amax:
/// scale_count() numbers. A NaN in a group gives a NaN. An empty group gives 0. Throws bad_argument for other
/// dtypes and for a view that is not contiguous, and unsupported on a device. All functions below do so, too.
void amax(kernels::KernelContext& ctx, const ConstTensorView& x, Granularity granularity, float* amax);

/// The factor that brings a tensor with this largest magnitude into the range of `format`. It is
/// largest_of(format) / max(amax, 1e-12), divided in f64 and rounded to f32. With `power_of_two` it is
/// rounded down to a power of two. These are the scales of torchao 0.18 (torchao/float8/float8_utils.py). An
/// infinite amax gives 0. A NaN gives a NaN.
float scale_of(float amax, DType format, bool power_of_two);

/// codes = x · scale, rounded to nearest, ties to even. The product is rounded to f32 first. Values beyond
/// the largest finite value become that value, infinities too. A NaN becomes the code 0x7f with its sign, as
/// in PyTorch (the NaN of a cast by f8e5m2(float) has other bits). x: f32 or bf16; codes: f8e4m3 or f8e5m2,
/// of x's shape; scales: scale_count() numbers.
void quantise(kernels::KernelContext& ctx, const ConstTensorView& x, Granularity granularity,
              const float* scales, const TensorView& codes);
/// Like quantise(), but writes the values of the codes as bf16, which holds each of them exactly.
void quantise_to_bf16(kernels::KernelContext& ctx, const ConstTensorView& x, Granularity granularity,
                      const float* scales, DType format, const TensorView& values);
/// The values of codes, exactly. values: bf16 or f32, of the codes' shape. Each NaN becomes the NaN
/// 0x7fc00000 of f32 with its sign. The infinities of f8e5m2 stay infinite.
void widen(kernels::KernelContext& ctx, const ConstTensorView& codes, const TensorView& values);

/// One scale for all rows (or columns), or one for each.
struct ScaleList {
  const float* scales;
  bool each;  ///< false: `scales` is one number
};
/// The last step of a product of scaled values: out = product · (1 / row scale) · (1 / column scale) + bias,
/// or out += this value. Each operation is rounded to f32, in this order. product, out: (rows, columns), may
/// be the same memory; bias: (columns), or null.
void rescale(kernels::KernelContext& ctx, const float* product, MatrixSize size, ScaleList rows,
             ScaleList columns, const float* bias, float* out, bool add);

}  // namespace weft::float8
