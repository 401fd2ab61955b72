// How every text of weft names ranks. Callable from any thread.
#pragma once

#include <span>
#include <string>

namespace weft {

/// "rank 3" or "ranks 2, 3"; of more than 33 ranks the first 32, and how many more.
std::string name_ranks(std::span<const int> ranks);

}  // namespace weft
