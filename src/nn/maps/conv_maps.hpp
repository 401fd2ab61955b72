// The parts of convolutions and their adjoints: three products of maps and a kernel. Included only inside nn,
// tp and domain.
//
// w: (out, in / groups, kernel height, kernel width); x: (batch, in, height, width), y: (batch, out, out
// height, out width). Inputs may be f32 or bf16, results are f32. A shape's padding is zeros. It may be
// negative if a rank has a part of the maps.
//
// The bits of an element of y or dx depend only on the values from which it is computed, not on the size of
// the maps or its place in them. Sums run over channels and kernel in the order of the matrix product, which
// in f32 is the same for any number of columns (kernels/gemm/gemm.hpp).
#pragma once

#include <functional>

#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/parameter.hpp"

namespace weft::conv {

/// A rectangle of pixels of a map.
struct Pixels {
  std::int64_t row = 0, rows = 0, column = 0, columns = 0;
};

/// y[o, r, s] = Σ w[o, i, j, k] x[i, r·stride + j·dilation − padding, s·… + k·…]. `of`: the parameter whose
/// weight w is, so that a packed form may be kept. Null: none.
void correlate(Frame& frame, const Tensor& x, const Tensor& w, std::int64_t groups,
               const kernels::UnfoldShape& s, const Tensor& y, const Parameter* of = nullptr);
/// Like correlate() above, for these pixels of y alone, of every sample. Calls `between`, unless it is empty,
/// from time to time.
void correlate(Frame& frame, const Tensor& x, const Tensor& w, std::int64_t groups,
               const kernels::UnfoldShape& s, const Tensor& y, const Pixels& pixels,
               const std::function<void()>& between, const Parameter* of = nullptr);
/// The adjoint in x: dx[i, a, b] = the sum of w[o, i, j, k] dy[o, r, s] over all outputs that used the pixel;
/// in the order of (j, k).
void spread(Frame& frame, const Tensor& dy, const Tensor& w, std::int64_t groups,
            const kernels::UnfoldShape& s, const Tensor& dx, const Parameter* of = nullptr);
/// The adjoint in w: dw = or += Σ dy[o, r, s] x[i, …]. `like`: the dtype to which operands are rounded.
/// Pixels are summed in blocks of rows, and the blocks pairwise, so that the error does not grow with the
/// map. For f32 operands it is about one rounding of the largest sums, in whatever parts the map is sharded.
void weight_gradient(Frame& frame, const Tensor& x, const Tensor& dy, std::int64_t groups,
                     const kernels::UnfoldShape& s, DType like, const Tensor& dw, bool add);

/// y += bias, channel by channel. The gradient of the bias: dbias = or += the sum of dy over samples and
/// pixels.
void add_bias(Frame& frame, const Tensor& bias, const Tensor& y);
void bias_gradient(Frame& frame, const Tensor& dy, const Tensor& dbias, bool add);

}  // namespace weft::conv
