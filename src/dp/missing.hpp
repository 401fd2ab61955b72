// Which gradients which ranks have not given: told by every rank to all, so that all throw or none. Collective
// among the ranks of the axes. Private to dp and train.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dp/axis_ranks.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft::dp {

struct MissingGradients {
  std::string text;        ///< `"b" on dp rank 0; "b", "c" on dp rank 1`; empty: nothing is missing
  std::vector<int> ranks;  ///< those on which something is
};

/// `missing`: indices below `count` on this rank; `name_of(i)`: of gradient i. One bit per gradient from every
/// rank. `group`: of the same ranks; null: that of the axes.
template <class NameOf>
MissingGradients gather_missing(const DeviceMesh& axes, std::size_t count,
                                const std::vector<std::size_t>& missing, const NameOf& name_of,
                                ProcessGroup* group = nullptr) {
  const std::size_t words = (count + 63) / 64;
  std::vector<std::uint64_t> own(words), all(words * static_cast<std::size_t>(axes.size()));
  for (const std::size_t i : missing) own[i / 64] |= std::uint64_t{1} << (i % 64);
  if (axes.size() == 1)
    all = own;
  else if (words > 0)
    (group != nullptr ? *group : axes.group()).all_gather(view(own), view(all)).wait();
  MissingGradients found;
  for (int rank = 0; rank < axes.size(); ++rank) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i)
      if ((all[static_cast<std::size_t>(rank) * words + i / 64] >> (i % 64) & 1) != 0)
        names.push_back(fmt::format("\"{}\"", name_of(i)));
    if (names.empty()) continue;
    found.ranks.push_back(rank);
    found.text += fmt::format("{}{} on {}", found.text.empty() ? "" : "; ", fmt::join(names, ", "),
                              name_axis_rank(axes, rank));
  }
  return found;
}

}  // namespace weft::dp
