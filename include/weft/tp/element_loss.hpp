// Losses of elements that each have a target, as functions on any memory. The modules MeanSquaredError and
// BinaryCrossEntropy (weft/nn/loss.hpp) compute the same by layouts. In libweft_train.
//
// y and its targets may be split over ranks in any way: each rank passes the elements that it has. There is
// no communication: a rank's loss is its part of a sum, and the sum of the ranks' losses (one all-reduce of a
// number, if the program wants it) is the total loss.
//
// Views are on the device of the Compute and contiguous, f32 or bf16; sums are made in f64. Every function
// blocks until it is done, and throws bad_argument, naming the view, if a view does not fit. One thread per
// rank.
#pragma once

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"

namespace weft {

struct ElementLossOptions {
  /// The number of elements of the whole batch: of this call and of all other calls whose gradients are added
  /// to those of this call, on all ranks. More than 0.
  std::int64_t count = 0;
  double scale = 1;  ///< a factor for dy only: the gradient of the loss
};

/// The sum of (y - target)² of this rank's elements, divided by count. y, target: of one shape. dy, if it is
/// given: the gradient with regard to y; like y; it may be the same memory if it has the same dtype.
double mean_squared_error(Compute& compute, const ConstTensorView& y, const ConstTensorView& target,
                          const ElementLossOptions& options, const TensorView& dy = {});

/// The sum of -target log p - (1 - target) log(1 - p), with p = 1 / (1 + e^-y), of this rank's elements,
/// divided by count: y are logits. For the rest like mean_squared_error(). Throws bad_argument for a target
/// that is not from 0 to 1.
double binary_cross_entropy(Compute& compute, const ConstTensorView& y, const ConstTensorView& target,
                            const ElementLossOptions& options, const TensorView& dy = {});

}  // namespace weft
