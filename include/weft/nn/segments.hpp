// Split the joint output of several layers that one product computes, such as q, k and v, or gate and up.
// Join it again.
#pragma once

#include <span>

#include "weft/nn/module.hpp"

namespace weft {

/// Splits y: (…, Σ sizes) along its last dimension into parts of these sizes. The parts are copies. If axes
/// split the features of y, y must have segments of these sizes, and each part is split on these axes (see
/// Linear::set_segments). Throws ErrorCode::layout if y has other segments, and bad_argument if the sizes do
/// not add up. `what` is the name of y in the text.
Tensors split_features(const Tensor& y, std::span<const std::int64_t> sizes, Compute& compute,
                       const TensorName& what);

/// The reverse of split_features(), which is also its adjoint. It joins the parts in their last dimension, in
/// f32. `layout` is the layout of the result (null: plain). Throws ErrorCode::layout if a part is not cut as
/// split_features() would cut it. A part may be Partial(sum) on an axis on which `layout` is Partial(sum).
Tensor join_features(std::span<const Tensor> parts, const LayoutRef& layout, Compute& compute,
                     const TensorName& what, Memory memory = Memory::local);

}  // namespace weft
