// Column- and row-parallel 1x1 convolutions over maps (batch, channels, height, width), as functions on any
// memory. They are the linear layers of weft/tp/linear.hpp with the channels, dimension 1, as features, and
// every pixel as a token. The rules of weft/tp/linear.hpp for views, dtypes, errors, gradients and options
// also hold here. In libweft_train.
//
// x: (batch, in, height, width) and y: (batch, out, height, width) hold this rank's part of the channels. in
// and out are the numbers of channels of the whole layer, and n is the number of ranks of `axes`. w is the
// weight of torch.nn.Conv2d, (out, in, 1, 1). Only a plain 1x1 convolution (stride 1, no padding, dilation 1,
// one group) is a product over channels. The functions refuse a w with another kernel.
//
// A sequence_dim in the options is 0, 2 or 3. Outside a pair of a column layer and a row layer, samples, rows
// or columns of the maps are then divided over the ranks. Apart from that, a rank may hold any part of the
// maps (domain parallelism). Pixels do not depend on each other, and dw and db are sums over the pixels that
// this rank passes.
#pragma once

#include "weft/tp/linear.hpp"

namespace weft {

/// The forward pass of a column layer: y[:, o] = Σ w[o, i] x[:, i] + b[o]. Each rank computes its own
/// channels of y. No communication. x: (batch, in, height, width), the same on all ranks; w: (out/n, in, 1,
/// 1); b: (out/n), or an empty view; y: (batch, out/n, height, width).
void column_conv2d_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y);
/// Like the function above, with options. If x is divided, there is one all-gather of x. If y is gathered,
/// there is one all-gather of y: (batch, out, …).
void column_conv2d_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& options);

/// The backward pass of a column layer. dx = sum over ranks of wᵀ dy. This takes one all-reduce over `axes`,
/// or a reduce-scatter if x is divided. dw[o, i] = the sum of dy[:, o] x[:, i] and db[o] = the sum of dy[:,
/// o], over samples and pixels, are this rank's own, and are computed during that communication. dy: like y;
/// x and w as in forward; dx: like x, dw: like w, db: (out/n).
void column_conv2d_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w,
                            const LinearGradients& gradients, const ColumnOptions& options = {});

/// The forward pass of a row layer: y[:, o] = sum over ranks of Σ w[o, i] x[:, i]. b[o] is added once, after
/// the sum. This takes one all-reduce over `axes`, or a reduce-scatter if y is divided. x: (batch, in/n,
/// height, width), this rank's channels; w: (out, in/n, 1, 1); b: (out), the same on all ranks, or an empty
/// view; y: (batch, out, height, width).
void row_conv2d_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& options = {});

/// The backward pass of a row layer: dx = wᵀ dy. dw and db are as for the column layer. db is the same on all
/// ranks and is not scaled. No communication. dy: (batch, out, height, width), the same on all ranks; dx:
/// like x, dw: like w, db: (out).
void row_conv2d_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& gradients);
/// Like the function above, with options. If dy is divided, there is one all-gather of dy, whichever
/// gradients are requested.
void row_conv2d_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                         const RowOptions& options);

}  // namespace weft
