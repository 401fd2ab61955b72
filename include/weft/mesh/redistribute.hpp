// Moves a tensor from one layout to another, and between whole and part. Collective among the ranks of the
// axes whose placement changes; called by all of them in the same order, from one thread per rank. Blocks
// until done.
#pragma once

#include "weft/mesh/layout.hpp"

namespace weft {

/// The same tensor with placements `to` (one per axis of its root mesh). Axis by axis:
///
/// - Replicate → Shard: each rank keeps its part
/// - Replicate → Partial: for a sum the axis's rank 0 keeps its values and the others hold zeros; for avg,
///   min and max all keep theirs
/// - Shard(i) → Replicate: all-gather
/// - Shard(i) → Shard(j): each pair of ranks exchanges a block
/// - Shard(i) → Partial: as Shard(i) → Replicate → Partial
/// - Partial → Replicate: all-reduce
/// - Partial → Shard: reduce-scatter
/// - Partial(a) → Partial(b): as Partial(a) → Replicate → Partial(b)
///
/// Several Partial(op) axes becoming Replicate are one all-reduce over their common group. Where axes nest in
/// one dimension (see Layout) and an outer one changes, the inner ones are gathered first and cut again
/// afterwards. Parts of unequal size are padded on the wire. Reductions run in the backend's native order,
/// which on shm is canonical: the same bits on all ranks, always.
///
/// Any dtype may move; reductions need one the backend reduces. What crosses ranks is allocated in
/// Memory::shared. The result may share `in`'s storage where nothing moves. Throws layout where `in` is
/// plain, or `to` does not fit it.
Tensor redistribute(const Tensor& in, const Placements& to);
/// The same, changing one axis only (a sub-mesh of one axis of the tensor's root).
Tensor redistribute(const Tensor& in, const DeviceMesh& axis, const Placement& to);

/// The whole tensor on every rank, as a plain tensor. A plain tensor is returned as it is.
Tensor full(const Tensor& in);

/// This rank's part of `whole`, of which every rank has the same copy. No communication. Throws layout where
/// the shapes differ.
Tensor distribute(const Tensor& whole, LayoutRef layout);

}  // namespace weft
