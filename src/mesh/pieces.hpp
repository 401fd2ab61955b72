// Lists that are as long as the lists that users pass. Private to mesh and the layers above.
#pragma once

#include <deque>

namespace weft {

/// A list that grows in small pieces, so that a step on many tensors allocates no large block.
template <class T>
using Pieces = std::deque<T>;

}  // namespace weft
