// The same elements as a tensor of another shape, or with its dimensions in another order, on tensors and on
// views that have a layout: the layout is changed with them. No communication, and no element moves. The
// arithmetic is Layout::reshaped() and Layout::transposed(). Any thread.
#pragma once

#include "weft/mesh/named_view.hpp"

namespace weft {

/// `t` as a tensor whose whole has the shape `global`, on the same storage: reshape(q, {batch, seq, heads,
/// head_dim}) of a q (batch, seq, heads · head_dim) gives each rank of an axis that cuts the features its
/// heads. Plain: this rank's alone, as Tensor::reshape(). Throws layout if a rank's part is no part of
/// that shape (Layout::reshaped), bad_argument if a plain one has another number of elements.
Tensor reshape(const Tensor& t, const Shape& global);

/// The same of a view, which must be contiguous; otherwise layout.
NamedView reshape(const NamedView& view, const Shape& global);
MutableNamedView reshape(const MutableNamedView& view, const Shape& global);

/// The view whose dimension i is dimension order[i] of this one, by its strides (torch: permute). Throws
/// layout unless `order` has each dimension once.
NamedView transpose(const NamedView& view, const Dims& order);
MutableNamedView transpose(const MutableNamedView& view, const Dims& order);

}  // namespace weft
