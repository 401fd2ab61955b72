// Makes the usual mesh of a job from its sizes of data, tensor and domain parallelism. The names are those
// that users know from miles-credit (NCAR) and KempnerForge.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "weft/base/device.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The kinds of parallelism of a job. The size of data parallelism is ranks / (tensor x domain).
struct Parallelism {
  /// "fsdp2": sharded parameters; "ddp": replicated parameters, averaged gradients; or "none"
  std::string data = "none";
  int tensor = 1;  ///< ranks that share each layer
  int domain = 1;  ///< ranks that share each sample's map
};

/// A mesh, and its axes that are larger than 1.
struct ParallelMesh {
  /// has the axes "dp", "tp" and "domain", even those of size 1; empty if nothing is parallel
  DeviceMesh mesh;
  std::map<std::string, DeviceMesh> axes;  ///< mesh[name] of each axis larger than 1
};

/// Makes the mesh of `group`'s ranks, row-major: dp is the outermost axis, and the ranks of one domain are
/// neighbours. With one rank and all sizes 1 the mesh is empty, without axes. `device`: the device on which
/// tensors will lie. `group` must be able to move its memory. The mesh borrows the group, which must exist
/// longer than the mesh. No communication. Throws bad_argument:
///   - `parallelism.data is "zero"; expected "fsdp2", "ddp" or "none"`
///   - `parallelism.tensor is 0; expected 1 or more`
///   - `mesh: 6 ranks do not divide into tensor=4 x domain=1`
///   - `parallelism.data is "none", but of 4 ranks tensor=2 x domain=1 leave dp=2; expected "fsdp2" or "ddp",
///     or 2 ranks`
///   - `device is cuda:0, but the group's transport, shm, moves memory of cpu`
ParallelMesh build_device_mesh(ProcessGroup& group, const Parallelism& parallelism, Device device = {});

/// mesh["tp"]. Nothing if there is no such axis, its size is 1, or the mesh is empty.
std::optional<DeviceMesh> get_tp_mesh(const DeviceMesh& mesh);
/// Whether one of the axes of data parallelism, "dp", "dp_replicate" and "dp_shard", is larger than 1. False
/// for an empty mesh.
bool has_dp_mesh(const DeviceMesh& mesh);
/// The axes of data parallelism, of any size: mesh[{"dp_replicate", "dp_shard"}] if the mesh has both axes,
/// otherwise the one data axis that it has. Throws bad_argument if it has none: `get_dp_mesh: tp=2 x pp=2 has
/// none of the axes "dp", "dp_replicate" and "dp_shard"; call has_dp_mesh() first`.
DeviceMesh get_dp_mesh(const DeviceMesh& mesh);

}  // namespace weft
