// Checks that all replicas of a tensor have the same bits. Collective among the ranks of the axes.
#pragma once

#include <span>

#include "weft/host/compute.hpp"
#include "weft/mesh/named_view.hpp"

namespace weft {

/// `axes` is a sub-mesh of one or more axes of the tensors' root. Compares each tensor along the axes of
/// `axes` on which it is Replicate. If the tensor is Shard on another of these axes, the function compares
/// the ranks that hold the same part. Along an axis on which the tensor is Partial it compares nothing,
/// because each rank has another contribution. Reads each tensor once, with the threads of `compute` (null:
/// this thread reads). Ranks exchange hashes of the contents by one small all-gather: a few 64-bit words for
/// any number of tensors. If these words differ, a second all-gather finds the tensor that differs.
///
/// Throws mismatch on all ranks of `axes` if a replica differs: `check_replicas: "w" is Replicate on dp=3,
/// but on dp rank 1 it has other bits`. Error::ranks() are the ranks whose bits differ from the most frequent
/// bits. If there are no most frequent bits, they are all ranks that hold a replica. Also throws mismatch if
/// the ranks gave different tensors or another order. The text names the first tensor that differs in name,
/// dtype or layout.
///
/// Throws layout for a tensor without a layout on axes of several ranks, for a layout over another mesh, and
/// for a shape that is not layout->local_shape(). Throws bad_argument for a view that is not contiguous, has
/// no memory or is not on the device of `compute`, and for an empty mesh. A mistake on one rank alone is an
/// error of the same code on all ranks: `check_replicas: dp rank 1 failed: …`. An empty mesh is an exception.
///
/// On a device, the check is ordered on the Compute's stream: it reads the values that earlier work on that
/// stream has written. The values are copied to the host in blocks and compared on the host, which waits.
void check_replicas(std::span<const NamedView> tensors, const DeviceMesh& axes, Compute* compute = nullptr);

}  // namespace weft
