// A loss of maps that are cut in space: normalised by the whole map, so that every gradient is Partial(sum)
// over every axis that cuts it.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// loss = Σ weight[row] (y − target)² / (the number of elements of the whole y), as one number of f64,
/// Partial(sum) on the axes that cut y. Inputs: y, target: (batch, channels, height, width), f32, laid out
/// alike; and, unless it is left out, weights: (height), of rows of latitude, cut as the height is. backward
/// takes d(loss), f64 (1), or an empty list for 1, and gives dy. No communication. MeanSquaredError
/// (weft/nn/loss.hpp) is for any shape, and for batches that are taken in parts: its count is an input.
class MapSquaredError : public Module {
 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

}  // namespace weft
