#include "dp/missing.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {

void expect_none_missing(const MissingText& text, const DeviceMesh& axes, std::size_t count,
                         const std::vector<std::size_t>& missing,
                         const std::function<std::string_view(std::size_t)>& name_of, ProcessGroup* group) {
  const std::size_t words = (count + 63) / 64;
  std::vector<std::uint64_t> own(words), all(words * static_cast<std::size_t>(axes.size()));
  for (const std::size_t i : missing) own[i / 64] |= std::uint64_t{1} << (i % 64);
  if (axes.size() == 1)
    all = own;
  else if (words > 0)
    gather_on_host(group != nullptr ? *group : axes.group(), view(own), view(all));
  if (std::all_of(all.begin(), all.end(), [](std::uint64_t word) { return word == 0; })) return;

  std::string found;
  std::vector<int> ranks;
  for (int rank = 0; rank < axes.size(); ++rank) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i)
      if ((all[static_cast<std::size_t>(rank) * words + i / 64] >> (i % 64) & 1) != 0)
        names.push_back(fmt::format("\"{}\"", name_of(i)));
    if (names.empty()) continue;
    ranks.push_back(rank);
    found += fmt::format("{}{} on {}", found.empty() ? "" : "; ", fmt::join(names, ", "),
                         name_axis_rank(axes, rank));
  }
  throw Error(Failure{ErrorCode::bad_argument,
                      fmt::format("{} {}; {}::unused = zeros lets such ranks contribute zeros", text.lacks,
                                  found, text.options),
                      Op::none, kNoCall, std::move(ranks)});
}

}  // namespace weft::dp
