// Guesses the known word that the user meant by an unknown one. Any thread.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/env.hpp"

namespace weft {

/// "; is run meant?", "; is run or bench meant?": the names that differ from `word` in at most a third of
/// their letters (one of three or fewer), or begin with it, the nearest first. Returns "" if there is no such
/// name.
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
