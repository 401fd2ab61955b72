// How texts name the ranks of some axes of a mesh. Private to mesh and the layers above.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "weft/mesh/mesh.hpp"

namespace weft {

/// "tp rank 1 (rank 3 of "world")", "tp ranks 0, 1 (ranks 2, 3 of "world")": first `ranks` in the numbering
/// of `axes`, then in that of the group of the whole mesh. The second part is left out if both numberings are
/// equal.
std::string name_axis_ranks(const DeviceMesh& axes, std::span<const int> ranks);
std::string name_axis_rank(const DeviceMesh& axes, int rank);

/// "tp=2"
inline std::string axis_text(const DeviceMesh& axis) {
  return std::string(axis.name()) + "=" + std::to_string(axis.size());
}

/// Returns `mesh` itself. Throws bad_argument if the mesh is empty: `<what>: <argument> is an empty
/// DeviceMesh, made by default or moved from`.
const DeviceMesh& given_mesh(std::string_view what, const DeviceMesh& mesh,
                             std::string_view argument = "axes");

}  // namespace weft
