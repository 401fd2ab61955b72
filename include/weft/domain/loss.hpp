// A loss of maps that are cut in space. It is normalised by the global map, so every gradient is Partial(sum)
// over every axis that cuts the maps.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// loss = Σ weight[row] (y − target)² / (the number of elements of the global y), one f64 number that is
/// Partial(sum) on the axes that cut y. Inputs: y and target: (batch, channels, height, width), f32, with the
/// same layout; and optionally weights: (height), one for each row of latitude, sharded like the height.
/// backward takes d(loss), f64 (1), or an empty list that means 1, and gives dy. No communication. For other
/// shapes, and for batches that are processed in parts, use MeanSquaredError (weft/nn/loss.hpp), which gets
/// the number of elements as an input.
class MapSquaredError : public Module {
 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

}  // namespace weft
