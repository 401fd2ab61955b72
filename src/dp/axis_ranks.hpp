// How texts name ranks of some axes of a mesh. Private to dp and train.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "weft/mesh/mesh.hpp"

namespace weft::dp {

/// "tp rank 1 (rank 3 of "world")", "tp ranks 0, 1 (ranks 2, 3 of "world")": `ranks` as `axes` numbers them, then
/// as the group of the whole mesh does. Without the second where both number alike.
std::string name_axis_ranks(const DeviceMesh& axes, std::span<const int> ranks);
std::string name_axis_rank(const DeviceMesh& axes, int rank);

/// `mesh` itself. Throws bad_argument where it is empty: `<what>: empty DeviceMesh`.
const DeviceMesh& given_mesh(std::string_view what, const DeviceMesh& mesh);

}  // namespace weft::dp
