// Decides, element by element, whether strided views have a byte in common. The functions have no state; any
// thread may call them.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "weft/base/view.hpp"

namespace weft {

/// Returns the begin of the lowest element of a view, and the end of the highest; two equal pointers if the
/// view is empty.
std::pair<const std::byte*, const std::byte*> span_of(const ConstTensorView& v) noexcept;

/// Returns whether an element of `a` and an element of `b` share a byte. The answer is exact for any strides,
/// so interleaved views count as disjoint. The difference of two addresses is a sum of strides times
/// differences of indices. A search, the largest stride first, finds whether that sum can be 0. If strides
/// are so entangled that a million steps do not decide, the views count as sharing memory.
bool share_memory(const ConstTensorView& a, const ConstTensorView& b) noexcept;

/// Returns whether two different elements of `v` share a byte (a stride of 0, for example). The answer is as
/// exact as that of share_memory().
bool overlaps_itself(const ConstTensorView& v) noexcept;

}  // namespace weft
