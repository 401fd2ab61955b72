// For an unknown word, guesses the known word that the user meant. Any thread.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/env.hpp"

namespace weft {

/// Returns a text such as "; is run meant?" or "; is run or bench meant?". It lists the names that begin with
/// `word`, or differ from `word` in at most a third of their letters (in one letter if they have three or
/// fewer), the nearest name first. Returns "" if there is no such name.
inline std::string is_meant(std::string_view word, const std::vector<std::string>& names) {
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const std::string& name : names) {
    const std::size_t apart = env::letters_apart(word, name);
    const std::size_t most = std::max<std::size_t>(1, std::max(word.size(), name.size()) / 3);
    if (apart <= most || (word.size() > 1 && name.starts_with(word))) near.emplace_back(apart, name);
  }
  if (near.empty()) return "";
  std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> nearest;
  for (const auto& [apart, name] : near)
    if (nearest.size() < 3) nearest.push_back(name);
  return fmt::format("; is {} meant?", fmt::join(nearest, " or "));
}

}  // namespace weft
