#include "weft/nn/path_pattern.hpp"

namespace weft {

// Both texts are read from the left. At a `*` the shortest stretch is tried first. If the remaining text then
// does not match, the stretch of the last `*` grows by one character, never across a dot.
bool matches(std::string_view pattern, std::string_view path) noexcept {
  constexpr std::size_t kNone = std::string_view::npos;
  std::size_t p = 0, at = 0, star = kNone, stretch_end = 0;
  while (true) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      stretch_end = at;
      continue;
    }
    if (p == pattern.size() && at == path.size()) return true;
    if (p < pattern.size() && at < path.size() && pattern[p] == path[at]) {
      ++p, ++at;
      continue;
    }
    if (star == kNone || stretch_end == path.size() || path[stretch_end] == '.') return false;
    p = star + 1;
    at = ++stretch_end;
  }
}

bool matches_part(std::string_view pattern, std::string_view path) noexcept {
  for (std::size_t end = path.find('.'); end != std::string_view::npos; end = path.find('.', end + 1))
    if (matches(pattern, path.substr(0, end))) return true;
  return matches(pattern, path);
}

}  // namespace weft
