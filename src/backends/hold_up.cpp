#include "weft/backends/hold_up.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace weft {

std::vector<int> to_blame(std::span<const int> awaited, const HoldUp& found) {
  std::vector<int> ranks;
  for (const int r : awaited)
    if (std::binary_search(found.ranks.begin(), found.ranks.end(), r)) ranks.push_back(r);
  return ranks;
}

std::string tell(std::vector<int>& awaited, const HoldUp& found,
                 const std::function<std::string(std::span<const int>)>& simple, bool all_answer) {
  if (found.ranks.empty() || found.ranks == awaited) return simple(awaited);
  const std::vector<int> near = to_blame(awaited, found);
  std::vector<int> far, others;
  std::set_difference(found.ranks.begin(), found.ranks.end(), near.begin(), near.end(),
                      std::back_inserter(far));
  std::set_difference(awaited.begin(), awaited.end(), near.begin(), near.end(), std::back_inserter(others));
  const bool wait = !all_answer || std::none_of(others.begin(), others.end(), [&](int r) {
    return std::binary_search(found.ends.begin(), found.ends.end(), r);
  });
  std::string story = simple(near.empty() ? awaited : near);
  // Names the ranks by number instead of "it", because the text before may end with another rank's call.
  if ((wait || !near.empty()) && !others.empty())
    story += fmt::format("; {} {}{}{}", name_ranks(others), wait ? "wait" : "answer",
                         others.size() == 1 ? "s" : "", wait ? ", too" : "");
  if (!far.empty())
    story += fmt::format("; {} {}", name_ranks(far),
                         found.silent ? (far.size() == 1 ? "does not answer" : "do not answer")
                                      : (far.size() == 1 ? "waits for nobody here" : "wait for nobody here"));
  awaited = found.ranks;
  return story;
}

std::vector<int> tell_all_arrived(const HoldUp& found, std::string& story) {
  story = "all ranks had arrived";
  if (!found.silent || found.ranks.empty()) return {};
  story +=
      fmt::format("; {} {} not answer", name_ranks(found.ranks), found.ranks.size() == 1 ? "does" : "do");
  return found.ranks;
}

}  // namespace weft
