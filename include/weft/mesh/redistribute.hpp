// Moves a tensor from one layout to another, and between the global tensor and a rank's part. Collective
// among the ranks of the axes whose placement changes. All of these ranks must call the functions in the same
// order, from one thread per rank.
#pragma once

#include "weft/mesh/layout.hpp"
#include "weft/mesh/transfer.hpp"

namespace weft {

/// Begins to give a tensor another layout of the same root mesh and global shape. For each axis:
///
/// - Replicate → Shard: each rank keeps its part
/// - Replicate → Partial: for sum, rank 0 of the axis keeps its values and the others hold zeros; for avg,
/// min and max all ranks keep their values; for other reductions it throws layout, because no contributions
/// give the value
/// - Shard(i) → Replicate: all-gather
/// - Shard(i) → Shard(j): all-to-all, each pair of ranks exchanges a block
/// - Shard(i) → Partial: as Shard(i) → Replicate → Partial
/// - Partial → Replicate: all-reduce
/// - Partial → Shard: reduce-scatter
/// - Partial(a) → Partial(b): as Partial(a) → Replicate → Partial(b)
///
/// If several axes change from Partial(op) to Replicate, there is one all-reduce over their common group. If
/// axes nest in one dimension (LayoutSpec::nesting) and an outer axis changes, the inner axes are gathered
/// first and cut again afterwards. If an inner axis changes, nothing moves along the outer axes. Messages of
/// unequal parts are padded. Reductions run in the backend's native order, which on shm is canonical. The
/// result always has the same bits on all ranks.
///
/// All work is done on the device of `in`, whose memory the groups of the mesh must move. It is ordered on
/// the stream of `in`. Tensors of any dtype may be moved. Reductions need a dtype that the backend reduces.
/// Tensors that are sent to other ranks are allocated in Memory::shared. If nothing moves, the result may
/// share the storage of `in`. `in` is not written. The Transfer keeps it until the end. Throws layout if `in`
/// is plain or does not have the local shape of its layout, or if `to` has another mesh or global shape.
/// Throws bad_argument if `in` has no memory. Each exchange carries a digest of both layouts. If ranks gave
/// different layouts, it throws mismatch, even if their messages have equal sizes.
Transfer start_redistribute(const Tensor& in, const LayoutRef& to);
/// Like the function above. The first of these functions takes new placements, one per axis of the tensor's
/// root mesh. The second changes the placement only on `axes`, a sub-mesh of one or more axes of the tensor's
/// root (see Layout::with).
Transfer start_redistribute(const Tensor& in, const Placements& to);
Transfer start_redistribute(const Tensor& in, const DeviceMesh& axes, const Placement& to);

/// Like start_redistribute(), but wait for the result.
Tensor redistribute(const Tensor& in, const LayoutRef& to);
Tensor redistribute(const Tensor& in, const Placements& to);
Tensor redistribute(const Tensor& in, const DeviceMesh& axes, const Placement& to);

/// Like start_redistribute(), but in the caller's memory: `in` is this rank's part in layout `from`, and
/// `out` becomes its part in layout `to`. Both have one dtype, are contiguous and on one device, and are
/// ordered on `stream` of that device (Stream{}: its default stream). The caller must keep `in` and `out`
/// alive until finish(), which writes `out` last and returns a tensor that borrows `out`. `in` and `out` may
/// overlap only if both begin at the same address. Throws layout if `in` or `out` does not have the local
/// shape of its layout. Throws bad_argument if memory is missing, dtypes or devices differ, or memory
/// overlaps otherwise.
Transfer start_redistribute(const ConstTensorView& in, const LayoutRef& from, const TensorView& out,
                            const LayoutRef& to, Stream stream = {});
void redistribute(const ConstTensorView& in, const LayoutRef& from, const TensorView& out,
                  const LayoutRef& to, Stream stream = {});

/// Returns the global tensor on every rank, as a plain tensor (PyTorch: full_tensor()). If `in` is plain,
/// returns `in`.
Tensor full(const Tensor& in);

/// Returns this rank's part of `whole`, a global tensor of which every rank has the same copy. No
/// communication. Throws layout if the shapes differ, and bad_argument if `layout` is null.
Tensor distribute(const Tensor& whole, const LayoutRef& layout);

}  // namespace weft
