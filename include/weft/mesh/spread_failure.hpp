// Ends the other groups of a mesh after one of them has failed. Any thread may call it.
#pragma once

#include "weft/mesh/mesh.hpp"

namespace weft {

/// If a group along axes of this mesh has failed, aborts the other groups that the mesh has made along axes,
/// so that ranks that wait in them for this rank do not wait for the deadline. The text names the failed rank
/// by its number in the root: `mesh: a failure of rank 2 of pp=2 x dp=2: aborted by rank 1: …`. The ranks
/// that get it call this function as well, and pass the same text on: so all ranks of the mesh have it. A
/// root group that serves no axis stays as it is. Does not wait. Does nothing if no group has failed.
void spread_failure(const DeviceMesh& mesh) noexcept;

}  // namespace weft
