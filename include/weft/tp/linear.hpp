// Column- and row-parallel linear layers as functions on any memory (Shoeybi et al., Megatron-LM,
// arXiv:1909.08053, section 3). weft/tp/parallelize.hpp parallelises modules. The functions here are for
// programs with their own layers. In libweft_train: link weft::weft_train, or pkg-config weft_train.
//
// Views must be contiguous and on the device of the Compute, whose memory the group of `axes` must move. They
// are this rank's parts. n is the number of ranks of `axes`, a mesh of one or more axes. in and out are the
// numbers of features of the whole layer. A function is collective among the ranks of `axes` if its comment
// says that it communicates. Every function blocks until it is done. It throws bad_argument, before anything
// is written or sent, if the shape of a view does not fit. The text names the view: `row_linear_forward: w is
// (3, 4); expected (3, 5), from y (2, 3) and x (2, 5)`. Outputs must not overlap any other view. Otherwise it
// throws `row_linear_backward: dx overlaps x; expected memory of its own`. One thread per rank.
//
// x, w and dy have one dtype, f32 or bf16. Each of the other views is f32 or of that dtype. Each rank
// computes products and sums in f32, and rounds once when it writes a result. Across ranks, results are
// summed in the dtype of the reduced tensor (y or dx). A bias is added to that sum.
//
// Sequence parallel (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
// arXiv:2205.05198, section 4.2.2): with `sequence_dim` in the options, the activations outside a pair of a
// column layer and a row layer (norms, dropout, residuals) are divided over the ranks of `axes` along the
// sequence. The column layer all-gathers its x, and the row layer reduce-scatters its y, in place of their
// all-reduces. A sequence is cut as Shard cuts it: the first `length % n` ranks have one position more, and a
// rank may have none. If there are several axes, the first axis cuts the whole sequence, and each later axis
// cuts the parts of the axis before it. For modules, sequence parallelism is a style of a Plan
// (weft/tp/plan.hpp). These functions use neither modules nor Plans.
#pragma once

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// Options of a column layer. All ranks of `axes` must give the same options.
struct ColumnOptions {
  /// Gathers y, so that y has all features on every rank: (…, out). In backward dy is (…, out), the same on
  /// all ranks. Each rank uses its own features of dy, so nothing is sent for dy. `out` need not be a
  /// multiple of n, since w is cut as Shard(0) cuts it.
  bool gather_output = false;
  /// The dimension of x and dx that is divided over the ranks, such as the sequence. y and dy have all of it.
  /// Not the last dimension. -1: none; x is the same on all ranks.
  int sequence_dim = -1;
};

/// The forward pass of a column layer: y = x wᵀ + b. Each rank computes its own features of y. No
/// communication. x: (…, in), the same on all ranks; w: (out/n, in); b: (out/n), or an empty view; y: (…,
/// out/n).
void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y);
/// Like the function above, with options. Communicates: if x is divided, one all-gather of x; if y is
/// gathered, one all-gather of y.
void column_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& options);

/// The outputs of the backward functions. An empty view means that the gradient is not requested. Either all
/// ranks or none must give column_linear_backward() a dx, because it reduces dx over the ranks. With a
/// sequence_dim this is also so for dw, for which it gathers x.
struct LinearGradients {
  TensorView dx{};          ///< overwritten
  TensorView dw{};          ///< like w; see `accumulate`
  TensorView db{};          ///< like b; see `accumulate`
  bool accumulate = false;  ///< true: results are added to dw and db; false: dw and db are overwritten
};

/// The backward pass of a column layer. dx = sum over ranks of dy w. This takes one all-reduce over `axes`,
/// or a reduce-scatter if x is divided. dw = dyᵀ x and db = the sum of dy's rows are this rank's own, and are
/// computed during that communication. If x is divided, it is gathered once more while dy w is computed, so
/// no rank keeps all of x between the passes. dy: (…, out/n); x and w as in forward; dx: like x, db: (out/n).
void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w,
                            const LinearGradients& gradients, const ColumnOptions& options = {});

/// Options of a row layer. All ranks of `axes` must give the same options.
struct RowOptions {
  /// The dimension of y and dy that is divided over the ranks, such as the sequence. x and dx have all of it.
  /// Not the last dimension. -1: none; y is the same on all ranks.
  int sequence_dim = -1;
};

/// The forward pass of a row layer: y = sum over ranks of x wᵀ. b is added once, after the sum. This takes
/// one all-reduce over `axes`, or a reduce-scatter if y is divided. x: (…, in/n), this rank's features; w:
/// (out, in/n); b: (out), the same on all ranks, or an empty view; y: (…, out).
void row_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& options = {});

/// The backward pass of a row layer: dx = dy w, dw = dyᵀ x, db = the sum of dy's rows. db is the same on all
/// ranks and is not scaled. No communication. dy: (…, out), the same on all ranks; dx: (…, in/n), db: (out).
void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& gradients);
/// Like the function above, with options. Communicates if dy is divided: one all-gather of dy, whichever
/// gradients are requested. So db is the sum over the whole sequence, and is the same on all ranks.
void row_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                         const RowOptions& options);

}  // namespace weft
