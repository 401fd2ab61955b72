// Column- and row-parallel linear layers as functions on anybody's memory (Shoeybi et al., Megatron-LM,
// arXiv:1909.08053, section 3). Modules are parallelised by weft/tp/parallelize.hpp; this is for programs that
// have layers of their own. In libweft_train: link weft::weft_train, or pkg-config weft_train.
//
// Views are on the device of the Compute (whose memory the group of `axes` moves), contiguous, and what this rank holds; n is the number
// of ranks of `axes`, a mesh of one or more axes; in and out are features of the whole layer. Every function is collective among
// the ranks of `axes` where it says that it communicates, blocks until it is done, and throws bad_argument,
// before anything is written or sent, that names the view whose shape does not fit: `row_linear_forward: w is
// (3, 4); expected (3, 5), from y (2, 3) and x (2, 5)`. What is written overlaps no other view: else
// `row_linear_backward: dx overlaps x; expected memory of its own`. One thread per rank.
//
// x, w and dy have one dtype, f32 or bf16. The others are f32 or of that dtype, each as the caller likes. Products
// and sums are f32's on each rank, rounded once where they are written; across ranks they are summed in the dtype of
// what is reduced (of y or dx), and a bias is added to that sum.
#pragma once

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// y = x wᵀ + b: each rank computes its own features of y. No communication.
/// x: (…, in), the same on all ranks; w: (out/n, in); b: (out/n), or an empty view; y: (…, out/n).
void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y);

/// What the backward functions write; an empty view: not wanted. Whether column_linear_backward() has a dx is
/// the same on all ranks: it takes part in an all-reduce only if so.
struct LinearGradients {
  TensorView dx{};          ///< overwritten
  TensorView dw{};          ///< as w; see `accumulate`
  TensorView db{};          ///< as b; see `accumulate`
  bool accumulate = false;  ///< dw and db are added to, not overwritten
};

/// dx = sum over ranks of dy w: one all-reduce over `axes`. dw = dyᵀ x and db = the sum of dy's rows are this
/// rank's own, and are computed while the all-reduce is on its way.
/// dy: (…, out/n); x and w as in forward; dx: (…, in), db: (out/n).
void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w,
                            const LinearGradients& gradients);

/// y = sum over ranks of x wᵀ, then + b, once: one all-reduce over `axes`.
/// x: (…, in/n), this rank's features; w: (out, in/n); b: (out), the same on all ranks, or an empty view; y:
/// (…, out).
void row_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y);

/// dx = dy w, dw = dyᵀ x, db = the sum of dy's rows, which is the same on all ranks and is not scaled. No
/// communication. dy: (…, out), the same on all ranks; dx: (…, in/n), db: (out).
void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& gradients);

}  // namespace weft
