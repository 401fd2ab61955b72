// Losses between elements and their targets, as functions on any memory. The modules MeanSquaredError and
// BinaryCrossEntropy (weft/nn/loss.hpp) compute the same losses of tensors with layouts. In libweft_train.
//
// y and its targets may be split over ranks in any way. Each rank passes the elements that it has. There is
// no communication, since a rank's loss is its part of a sum. The total loss is the sum of the ranks' losses.
// The program can compute it by an all-reduce of one number.
//
// Views are on the device of the Compute and contiguous, f32 or bf16. Sums are made in f64. Every function
// blocks until it is done, and throws bad_argument, naming the view, if a view does not fit. One thread per
// rank.
#pragma once

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"

namespace weft {

struct ElementLossOptions {
  /// The number of elements of the whole batch, on all ranks: the elements of this call, and those of all
  /// other calls whose gradients are added to this call's gradients. More than 0.
  std::int64_t count = 0;
  double scale = 1;  ///< the gradient of the loss: a factor for dy only
};

/// Returns the sum of (y - target)² over this rank's elements, divided by count. y and target have one shape.
/// If dy is given, it becomes the gradient with regard to y. dy has the shape of y, and may be the memory of
/// y if it has the same dtype.
double mean_squared_error(Compute& compute, const ConstTensorView& y, const ConstTensorView& target,
                          const ElementLossOptions& options, const TensorView& dy = {});

/// Returns the sum of -target log p - (1 - target) log(1 - p), with p = 1 / (1 + e^-y), over this rank's
/// elements, divided by count. y are logits. All other rules are as in mean_squared_error(). Throws
/// bad_argument for a target that is not from 0 to 1.
double binary_cross_entropy(Compute& compute, const ConstTensorView& y, const ConstTensorView& target,
                            const ElementLossOptions& options, const TensorView& dy = {});

}  // namespace weft
