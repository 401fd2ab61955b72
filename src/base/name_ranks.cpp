#include "weft/base/name_ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>

namespace weft {

std::string name_ranks(std::span<const int> ranks) {
  constexpr std::size_t kNamed = 32;
  const std::size_t named = ranks.size() <= kNamed + 1 ? ranks.size() : kNamed;
  std::string text =
      fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks.first(named), ", "));
  if (named < ranks.size()) text += fmt::format(" and {} more", ranks.size() - named);
  return text;
}

}  // namespace weft
