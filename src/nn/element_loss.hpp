// The passes of losses of elements, once their inputs are checked. Inside nn and domain.
#pragma once

#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft::losses {

/// The loss of y and target, laid out Partial(sum) on axes that cut y; what backward needs is kept on the
/// Frame. weights: none, or as many as the second last dimension of y has elements, one for each of its rows.
Tensor of_elements(const Module& module, Frame& frame, kernels::LossTerm term, const Tensor& y,
                   const Tensor& target, const Tensor& count, const Tensor& weights = {});
/// dy; throws bad_argument for a gradient of the loss that is not one f64.
Tensor of_elements_backward(const Module& module, Frame& frame, kernels::LossTerm term, Inputs gradients,
                            Memory memory);

}  // namespace weft::losses
