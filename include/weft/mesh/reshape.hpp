// Gives tensors, and views that have a layout, another shape or another order of dimensions. The layout
// changes with them. No communication, and no element moves. The arithmetic is Layout::reshaped() and
// Layout::transposed(). Any thread.
#pragma once

#include "weft/mesh/named_view.hpp"

namespace weft {

/// Returns `t` as a tensor of global shape `global`, on the same storage. For example, take a q (batch, seq,
/// heads · head_dim) whose features are cut along an axis: reshape(q, {batch, seq, heads, head_dim}) gives
/// each rank of this axis its heads. A plain tensor is reshaped on this rank only, as by Tensor::reshape().
/// Throws layout if a rank's part would not be a part of a tensor of that shape (Layout::reshaped), and
/// bad_argument if a plain tensor has another number of elements.
Tensor reshape(const Tensor& t, const Shape& global);

/// Like the function above, for a view. Throws layout if the view is not contiguous.
NamedView reshape(const NamedView& view, const Shape& global);
MutableNamedView reshape(const MutableNamedView& view, const Shape& global);

/// The view whose dimension i is dimension order[i] of `view`, made by a change of strides (torch: permute).
/// Throws layout unless `order` has each dimension once.
NamedView transpose(const NamedView& view, const Dims& order);
MutableNamedView transpose(const MutableNamedView& view, const Dims& order);

}  // namespace weft
