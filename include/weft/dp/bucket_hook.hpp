// A bucket hook replaces a bucket's all-reduce: by compression, or by a reduction of the program's own. The
// thread that owns the BucketReducer uses it.
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

/// A bucket whose gradients are all ready. Valid until the finish() of its step returns; `data` has the same
/// address in every step.
struct ReadyBucket {
  /// the bucket's number in the order in which buckets are sent, which is the same on all ranks
  std::size_t number;
  /// (count): the bucket's gradients one after the other, with zeros between them
  TensorView data;
  ReduceOp op;                           ///< the reduction over the ranks: sum, or avg
  std::span<const std::size_t> members;  ///< the bucket's gradients, as the reducer numbers them
  ProcessGroup& group;                   ///< the group of the ranks that reduce
  Stream stream;                         ///< on a device: the stream for calls on `group` and for queued work
};

/// The functions of a bucket hook; PyTorch calls it a communication hook of DDP. Both functions are called
/// for every bucket in every step, in the same order on all ranks. They are not called with one rank, if
/// nothing is reduced, or for an empty bucket.
///
/// If start() or finish() throws, ready() or finish() of the reducer passes the exception on, and the reducer
/// cannot be used any more. The other ranks do not wait: their group is aborted, with the text
/// `bucket_reducer: the hook "top_k" failed: …`.
struct BucketHook {
  std::string name{};  ///< for error texts; ranks compare it, it must be equal. Empty: no hook Empty: no hook
  /// Begins the reduction of bucket.data, by any calls on bucket.group. Returns the Work of the last call, or
  /// an empty Work if the reduction is done already. It may be called between two kernels of a backward pass.
  /// The pass stops while this function waits.
  std::function<Work(const ReadyBucket& bucket)> start{};
  /// Called when the Work of start() is done (on a device: ordered after that Work). It must leave the result
  /// in bucket.data. May be empty.
  std::function<void(const ReadyBucket& bucket)> finish{};
};

/// A hook that rounds buckets of f32 to bf16, reduces them in bf16, and widens them. It sends half the bytes,
/// but has only 8 bits of precision, even in partial sums of the transport. Buckets of other dtypes are
/// reduced as they are. The hook holds a buffer for each bucket, so each reducer needs its own hook. With a
/// hook of another reducer, ready() or finish() throws bad_argument. `compute`: as in BucketOptions. It must
/// exist longer than the hook. Throws unsupported for a device without GradientKernels.
BucketHook bf16_hook(Context& context, Compute* compute = nullptr);

}  // namespace weft
