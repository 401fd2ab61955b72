#include "mesh/axis_ranks.hpp"

#include <fmt/format.h>

#include <vector>

#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {

std::string name_axis_ranks(const DeviceMesh& axes, std::span<const int> ranks) {
  const std::vector<int> whole = axes.ranks();
  bool alike = axes.size() == axes.root().size();
  for (std::size_t r = 0; r < whole.size(); ++r) alike = alike && whole[r] == static_cast<int>(r);
  const std::string text = fmt::format("{} {}", axes.name(), name_ranks(ranks));
  if (alike) return text;
  std::vector<int> there;
  for (const int r : ranks) there.push_back(whole[static_cast<std::size_t>(r)]);
  return fmt::format("{} ({} of \"{}\")", text, name_ranks(there), axes.root().group().name());
}

std::string name_axis_rank(const DeviceMesh& axes, int rank) { return name_axis_ranks(axes, {&rank, 1}); }

const DeviceMesh& given_mesh(std::string_view what, const DeviceMesh& mesh, std::string_view argument) {
  if (!mesh)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is an empty DeviceMesh, made by default or moved from", what, argument));
  return mesh;
}

}  // namespace weft
