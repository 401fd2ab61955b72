// The passes of element losses, after their inputs are checked. For use inside nn and domain.
#pragma once

#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft::losses {

/// The loss of y and target, with layout Partial(sum) on axes that shard y; the Frame keeps what backward
/// needs. weights: none, or one for each row of y (as many as the second last dimension of y has elements).
Tensor of_elements(const Module& module, Frame& frame, kernels::LossTerm term, const Tensor& y,
                   const Tensor& target, const Tensor& count, const Tensor& weights = {});
/// Computes dy. Throws bad_argument if the gradient of the loss is not one f64.
Tensor of_elements_backward(const Module& module, Frame& frame, kernels::LossTerm term, Inputs gradients,
                            Memory memory);

}  // namespace weft::losses
