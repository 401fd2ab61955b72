// Moves a tensor from one layout to another, and between whole and part. Collective among the ranks of the
// axes whose placement changes; called by all of them in the same order, from one thread per rank.
#pragma once

#include "weft/mesh/layout.hpp"
#include "weft/mesh/transfer.hpp"

namespace weft {

/// Begins to give the same tensor another layout of the same root mesh and global shape. Axis by axis:
///
/// - Replicate → Shard: each rank keeps its part
/// - Replicate → Partial: for a sum the axis's rank 0 keeps its values and the others hold zeros; for avg,
///   min and max all keep theirs; for others layout, since no contributions give the value
/// - Shard(i) → Replicate: all-gather
/// - Shard(i) → Shard(j): all-to-all, each pair of ranks exchanges a block
/// - Shard(i) → Partial: as Shard(i) → Replicate → Partial
/// - Partial → Replicate: all-reduce
/// - Partial → Shard: reduce-scatter
/// - Partial(a) → Partial(b): as Partial(a) → Replicate → Partial(b)
///
/// Several Partial(op) axes becoming Replicate are one all-reduce over their common group. If axes nest in
/// one dimension (LayoutSpec::nesting) and an outer one changes, the inner ones are gathered first and cut
/// again afterwards; an inner one that changes moves nothing of the outer. Parts of unequal size are padded
/// on the wire. Reductions run in the backend's native order, which on shm is canonical: the same bits on all
/// ranks, always.
///
/// It happens on the device of `in`, whose memory the groups of the mesh move, in order on its stream. Any
/// dtype may move; reductions need one the backend reduces. Tensors that cross ranks are allocated in
/// Memory::shared. The result may share `in`'s storage if nothing moves; `in` is not written, and is kept
/// until the end. Throws layout if `in` is plain, or not of its layout's local shape, or `to` is of
/// another mesh or global shape; bad_argument if it has no memory. Each exchange carries a digest of both
/// layouts: mismatch if ranks gave different ones, shapes that have as many elements, too.
Transfer start_redistribute(const Tensor& in, const LayoutRef& to);
/// The same with other placements, one per axis of its root mesh; with another one on some axes, a sub-mesh
/// of one or more axes of the tensor's root (see Layout::with).
Transfer start_redistribute(const Tensor& in, const Placements& to);
Transfer start_redistribute(const Tensor& in, const DeviceMesh& axes, const Placement& to);

/// The same, blocking until it is done.
Tensor redistribute(const Tensor& in, const LayoutRef& to);
Tensor redistribute(const Tensor& in, const Placements& to);
Tensor redistribute(const Tensor& in, const DeviceMesh& axes, const Placement& to);

/// The same on memory of the caller's: `in` is this rank's part as `from`, `out` becomes its part as `to`.
/// Both are of one dtype, contiguous and on one device, ordered on `stream` there (Stream{}: its default
/// one). They live until finish(), which writes `out` at its end, and gives it as a tensor that borrows it;
/// they may overlap only if both begin at the same address. Throws layout if one has not the local
/// shape of its layout; bad_argument if memory is missing, dtypes or devices differ, or memory overlaps
/// otherwise.
Transfer start_redistribute(const ConstTensorView& in, const LayoutRef& from, const TensorView& out,
                            const LayoutRef& to, Stream stream = {});
void redistribute(const ConstTensorView& in, const LayoutRef& from, const TensorView& out,
                  const LayoutRef& to, Stream stream = {});

/// The whole tensor on every rank, as a plain tensor (PyTorch: full_tensor()). A plain tensor is returned as
/// it is.
Tensor full(const Tensor& in);

/// This rank's part of `whole`, of which every rank has the same copy. No communication. Throws layout if
/// the shapes differ; bad_argument if `layout` is null.
Tensor distribute(const Tensor& whole, const LayoutRef& layout);

}  // namespace weft
