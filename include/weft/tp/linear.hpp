// Column- and row-parallel linear layers as functions on anybody's memory (Shoeybi et al., Megatron-LM,
// arXiv:1909.08053, section 3). Modules are parallelised by weft/tp/parallelize.hpp; this is for programs
// that have layers of their own. In libweft_train: link weft::weft_train, or pkg-config weft_train.
//
// Views are on the device of the Compute (whose memory the group of `axes` moves), contiguous, and this
// rank's parts; n is the number of ranks of `axes`, a mesh of one or more axes; in and out are features of
// the whole layer. Every function is collective among the ranks of `axes` where it says that it communicates,
// blocks until it is done, and throws bad_argument, before anything is written or sent, that names the view
// whose shape does not fit: `row_linear_forward: w is (3, 4); expected (3, 5), from y (2, 3) and x (2, 5)`.
// Outputs overlap no other view: else `row_linear_backward: dx overlaps x; expected memory of its own`. One
// thread per rank.
//
// x, w and dy have one dtype, f32 or bf16. The others are f32 or of that dtype, each as the caller likes.
// Products and sums are f32's on each rank, rounded once where they are written; across ranks they are
// summed in the dtype of the reduced tensor (y or dx), and a bias is added to that sum.
//
// Sequence parallel (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
// arXiv:2205.05198, section 4.2.2): with `sequence_dim` in the options, the activations outside of a column
// and row pair (norms, dropout, residuals) are divided over the ranks of `axes` along the sequence. The
// column layer all-gathers its x, and the row layer reduce-scatters its y, in place of their all-reduces. A
// sequence is cut as Shard cuts it: the first `length % n` ranks have one position more, and a rank may have
// none; of several axes the first cuts the whole, and each later one the part that is left. For modules the
// same is a style of a Plan (weft/tp/plan.hpp); these functions know neither.
#pragma once

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// Options of a column layer besides its product; every rank of `axes` gives the same.
struct ColumnOptions {
  /// y has all features on every rank: (…, out), gathered. In backward dy is (…, out), the same on all ranks,
  /// which each take their own features of it; nothing is sent for that. `out` need not divide: w is cut as
  /// Shard(0) cuts it.
  bool gather_output = false;
  /// The dimension of x and dx that is divided over the ranks: this rank's part of the sequence, where y and
  /// dy have the whole. Not the last dimension. -1: none, x is whole and the same on all ranks.
  int sequence_dim = -1;
};

/// y = x wᵀ + b: each rank computes its own features of y. No communication.
/// x: (…, in), the same on all ranks; w: (out/n, in); b: (out/n), or an empty view; y: (…, out/n).
void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y);
/// The same with options. Communicates: an all-gather of x where it is divided, one of y where it is
/// gathered.
void column_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& options);

/// The outputs of the backward functions; an empty view: not wanted. Whether column_linear_backward() has a
/// dx is the same on all ranks: it takes part in a reduction only if so. With a sequence_dim the same holds
/// for dw, for which it gathers x.
struct LinearGradients {
  TensorView dx{};          ///< overwritten
  TensorView dw{};          ///< as w; see `accumulate`
  TensorView db{};          ///< as b; see `accumulate`
  bool accumulate = false;  ///< dw and db are added to, not overwritten
};

/// dx = sum over ranks of dy w: one all-reduce over `axes`, or a reduce-scatter where x is divided. dw = dyᵀ
/// x and db = the sum of dy's rows are this rank's own, and are computed while that is on its way. If x is
/// divided it is gathered once more, which is on its way while dy w is computed: no rank keeps the whole of
/// it between the passes. dy: (…, out/n); x and w as in forward; dx: as x, db: (out/n).
void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w,
                            const LinearGradients& gradients, const ColumnOptions& options = {});

/// Options of a row layer besides its product; every rank of `axes` gives the same.
struct RowOptions {
  /// The dimension of y and dy that is divided over the ranks: this rank's part of the sequence, where x and
  /// dx have the whole. Not the last dimension. -1: none, y is whole and the same on all ranks.
  int sequence_dim = -1;
};

/// y = sum over ranks of x wᵀ, then + b, once: one all-reduce over `axes`, or a reduce-scatter where y is
/// divided. x: (…, in/n), this rank's features; w: (out, in/n); b: (out), the same on all ranks, or an empty
/// view; y: (…, out).
void row_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& options = {});

/// dx = dy w, dw = dyᵀ x, db = the sum of dy's rows, which is the same on all ranks and is not scaled. No
/// communication. dy: (…, out), the same on all ranks; dx: (…, in/n), db: (out).
void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& gradients);
/// The same with options. Communicates where dy is divided: one all-gather of it, whatever gradients are
/// wanted. So db is the sum over the whole sequence, and is the same on all ranks.
void row_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                         const RowOptions& options);

}  // namespace weft
