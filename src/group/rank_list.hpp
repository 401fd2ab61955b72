// Short lists of ranks: members, or ranks that are gone. Any thread.
#pragma once

#include <algorithm>
#include <vector>

namespace weft {

inline bool holds(const std::vector<int>& ranks, int r) {
  return std::find(ranks.begin(), ranks.end(), r) != ranks.end();
}

}  // namespace weft
