// Lists as long as those that users give. Private to mesh and the layers above.
#pragma once

#include <deque>

namespace weft {

/// A list that grows in small pieces: a step on many tensors allocates no large block.
template <class T>
using Pieces = std::deque<T>;

}  // namespace weft
