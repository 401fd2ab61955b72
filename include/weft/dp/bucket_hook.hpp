// A replacement of a bucket's all-reduce: compression, or a reduction of the program's own. Used by the
// thread of the rank that owns the BucketReducer.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "weft/base/device.hpp"
#include "weft/base/op.hpp"
#include "weft/base/view.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/compute.hpp"

namespace weft {

/// A bucket whose gradients are all ready. Good until the finish() of its step is over; `data` lies in the
/// same place in every step.
struct ReadyBucket {
  std::size_t number;                    ///< in the order in which buckets are sent: the same on all ranks
  TensorView data;                       ///< (count): its gradients one after the other, zeros between them
  ReduceOp op;                           ///< its reduction over the ranks: sum, or avg
  std::span<const std::size_t> members;  ///< its gradients, as the reducer numbers them
  ProcessGroup& group;                   ///< of the ranks that reduce
  Stream stream;                         ///< on a device: calls on `group`, and queued work, go there
};

/// PyTorch calls it a communication hook of DDP. Both functions are called for every bucket in every step, in
/// the same order on all ranks; with one rank, if nothing is reduced, and for an empty bucket, not at all.
///
/// An exception of start() or finish() is thrown by ready() or finish() of the reducer, which cannot be used
/// any more. The other ranks do not wait: their group is aborted,
/// `bucket_reducer: the hook "top_k" failed: …`.
struct BucketHook {
  std::string name{};  ///< for error texts; the same on all ranks, which compare it. Empty: there is no hook
  /// Begins the reduction of bucket.data, by any calls on bucket.group; the last of them is given back, or an
  /// empty Work if all is done already. It may be called between two kernels of a backward pass: time
  /// that it waits is not overlapped.
  std::function<Work(const ReadyBucket& bucket)> start{};
  /// Once that Work is done (on a device: ordered after it), the contents of bucket.data are the result. May
  /// be empty.
  std::function<void(const ReadyBucket& bucket)> finish{};
};

/// Buckets of f32 are rounded to bf16, reduced as such, and widened: half the bytes, 8 bits of precision,
/// also in sums that a transport makes on the way. Others are reduced as they are. Holds a buffer for each
/// bucket, so each reducer gets a hook of its own: from the ready() or finish() of a second one comes
/// bad_argument. `compute`: as in BucketOptions, and outlives it. Throws unsupported for a device without
/// GradientKernels.
BucketHook bf16_hook(Context& context, Compute* compute = nullptr);

}  // namespace weft
