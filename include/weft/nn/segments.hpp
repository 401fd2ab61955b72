// The outputs of several layers that were made by one product, such as q, k and v, or gate and up: splits
// them, and joins them again.
#pragma once

#include <span>

#include "weft/nn/module.hpp"

namespace weft {

/// y: (…, Σ sizes), cut along its last dimension into parts of these sizes; copies. If axes split the
/// features of y they are in segments of these sizes, and each part is split on these axes as one (see
/// Linear::set_segments). Throws layout if they are in other segments, bad_argument if the sizes do not
/// add up; `what` names y.
Tensors split_features(const Tensor& y, std::span<const std::int64_t> sizes, Compute& compute,
                       const TensorName& what);

/// The reverse, which is also its adjoint: the parts side by side, f32. `layout` is that of the result (null:
/// plain). Throws layout if a part is not cut as split_features() would cut it; a part may be Partial(sum)
/// on an axis where the layout is.
Tensor join_features(std::span<const Tensor> parts, const LayoutRef& layout, Compute& compute,
                     const TensorName& what, Memory memory = Memory::local);

}  // namespace weft
