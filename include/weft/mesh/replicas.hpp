// Whether replicas are what they are called: the same bits on every rank that holds one. Collective among the ranks of
// the axes.
#pragma once

#include <span>

#include "weft/mesh/named_view.hpp"

namespace weft {

/// Compares every tensor along those of `axes` (a sub-mesh of one or more axes of its root) on which it is Replicate.
/// Sharded along another of them, ranks that hold the same part are compared; what is Partial on an axis is another
/// contribution on each rank, and not compared along it. Reads each tensor once, and sends one small all-gather of
/// 64-bit hashes of the contents, of a few words whatever the number of tensors; where something differs, a second
/// one finds out what.
///
/// Throws mismatch on all ranks of `axes` where a replica drifted: `check_replicas: "w" is Replicate on dp=3, but on
/// dp rank 1 it has other bits`; ranks() are those whose bits are not most ranks', or all that hold one where no bits
/// are more frequent than others. Throws mismatch, too, where the ranks gave other tensors or another order, naming
/// the first that differs in name, dtype or layout.
///
/// Throws layout for a tensor without a layout on axes of several ranks, for a layout over another mesh, and for a
/// shape that is not layout->local_shape(); bad_argument for an empty mesh, and for a view that is not contiguous, has
/// no memory or is not on the host.
void check_replicas(std::span<const NamedView> tensors, const DeviceMesh& axes);

}  // namespace weft
