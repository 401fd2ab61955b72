// The function by which all texts of weft name ranks. Any thread may call it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "weft/base/cxx20.hpp"

namespace weft {

/// "rank 3" or "ranks 2, 3". For more than 33 ranks, the first 32 and the number of the others.
inline std::string name_ranks(std::span<const int> ranks) {
  constexpr std::size_t kNamed = 32;
  const std::size_t named = ranks.size() <= kNamed + 1 ? ranks.size() : kNamed;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < named; ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (named < ranks.size()) text += " and " + std::to_string(ranks.size() - named) + " more";
  return text;
}

}  // namespace weft
