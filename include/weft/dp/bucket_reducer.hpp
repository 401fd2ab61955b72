// Gradients are reduced in buckets while other gradients are still computed. One thread per rank uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/dp/bucket_hook.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The treatment of a gradient that was not ready() since the last finish().
enum class Unused : unsigned char {
  error,  ///< finish() throws on all ranks, naming gradients and ranks
  zeros,  ///< this rank contributes zeros
};

/// One gradient as the reducer knows it, the same on all ranks of the axes.
struct BucketEntry {
  std::string name;        ///< for error texts
  std::int64_t count = 0;  ///< elements on this rank
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;  ///< sum, or avg if each rank has the mean over its own data
};

struct BucketOptions {
  std::int64_t bucket_bytes = std::int64_t{4} << 20;  ///< a bucket is closed when it has this many bytes
  Unused unused = Unused::error;
  /// The Compute whose threads copy gradients in bound memory. Null: the calling thread copies. It must exist
  /// longer than the reducer. If the Compute belongs to a device, the buckets are on that device, and all
  /// bound memory must be on it, too.
  Compute* compute = nullptr;
  /// Replaces each bucket's all-reduce: bf16_hook(), or a hook of the program. By default there is none.
  BucketHook hook = {};
};

/// While a NoSync exists, backward passes only accumulate: gradients that become ready are not reduced.
/// no_sync() of a BucketReducer, a GradientReducer or a FullySharded makes one. It may exist longer than that
/// object. Several NoSyncs may nest. Use a NoSync in a scope:
///
///   { const NoSync off = reducer.no_sync();  … micro-batches but the last … }
///   … the last micro-batch …   reducer.finish();
class [[nodiscard]] NoSync {
 public:
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync() {
    if (alive_ != nullptr) --*alive_;
  }

 private:
  friend class BucketReducer;
  friend class GradientReducer;
  friend class FullySharded;
  explicit NoSync(std::shared_ptr<int> alive) : alive_(std::move(alive)) { ++*alive_; }
  std::shared_ptr<int> alive_;  // how many there are
};

/// Cuts the gradients, in the order given, into buckets of one dtype and one reduction each. A bucket's
/// all-reduce is posted as soon as all its gradients are ready and all buckets before it are posted. So all
/// ranks post buckets in the same order, whichever gradients become ready first on each rank. Give the
/// entries in the order in which backward makes them ready. This is mostly the reverse of forward.
///
///   for each step:  compute the gradients into slot(i), or into memory bound by bind(i), calling ready(i)
///                   finish();   use the gradients, which are the reduced ones now
///
/// A gradient may lie in its slot, which is a part of a bucket in shared memory. Then nothing is copied. Or
/// it lies in the caller's memory. Then ready() copies a small gradient into its slot and finish() copies it
/// back. A gradient that fills a bucket alone is reduced in place.
///
/// To accumulate several micro-batches, add to the gradients, and call ready() only in the last micro-batch.
/// Or call it in all micro-batches, with no_sync() around those before the last. Between ready(i) and the end
/// of finish(), do not read or write gradient i.
///
/// On a device, gradients are the values that the stream of options.compute has written. Before ready(i) the
/// program must queue on that stream all work that writes gradient i. Work that it queues after finish()
/// reads the reduced gradients. The host does not wait for reductions, except in the first step, and in the
/// small exchange after the reductions that compares the missing gradients (Unused::error). If a reduction
/// fails, a later ready() or finish(), or a wait for the stream, throws the error. Bound memory must be
/// ordered on that stream, too.
///
/// Gradients are reduced over all ranks of `axes`, a mesh of one or more axes. With one rank nothing moves.
///
/// Several reducers over the same axes are independent. Each further reducer makes its own group. All ranks
/// must make and destroy them, and call finish(), in the same order. In the first step, in which ranks
/// compare and make groups, they must also call ready() in the same order. Later each rank may call ready()
/// in an order of its own.
class BucketReducer {
 public:
  /// No communication if nothing is wrong. The first finish(), or the first ready bucket, compares the
  /// entries and the options of all ranks. If they differ, all ranks throw mismatch that names the first
  /// different entry. Throws bad_argument for an empty mesh, a count below 0, bucket_bytes below 1, a
  /// reduction other than sum and avg, a dtype that is not floating, a bucket whose bytes do not fit 64 bits,
  /// or a hook without name or start. Before it throws, this rank waits, at most its deadline, until the
  /// other ranks compare (unless the mesh is empty). They throw `bucket_reducer: dp rank 1 failed: …`.
  BucketReducer(DeviceMesh axes, std::vector<BucketEntry> entries, const BucketOptions& options = {});
  /// If a reduction is still in flight, the group of the axes fails.
  ~BucketReducer();
  BucketReducer(BucketReducer&&) noexcept;
  BucketReducer& operator=(BucketReducer&&) noexcept;

  std::size_t size() const noexcept;
  const BucketEntry& entry(std::size_t i) const;
  /// The memory of gradient i in its bucket: (count) elements of shared memory, zeros at first. Valid as long
  /// as the reducer, but not after bind(i), which may free the memory.
  TensorView slot(std::size_t i) const;
  /// The slot of gradient i as a tensor that keeps the bucket's memory alive. Throws bad_argument if i is
  /// bound.
  Tensor tensor(std::size_t i) const;
  /// From now on gradient i lies in the caller's memory. `data` must have entry(i).count elements of its
  /// dtype and be contiguous. The caller must keep `data` alive as long as the reducer, or until gradient i
  /// is bound again. All ranks must bind the same entries. Throws bad_argument between ready(i) and finish(),
  /// and if `data` does not fit, has no memory, is not aligned for its dtype, or overlaps a slot of this
  /// reducer or memory bound to another entry. In the first step the other ranks are notified as by the
  /// constructor. In later steps they are not notified. So call finish() in the exception handler. finish()
  /// throws on all ranks, because gradient i is not ready on any rank (Unused::error).
  void bind(std::size_t i, const TensorView& data);

  /// States that gradient i has its final value of this step. Posts the buckets that are ready, and makes
  /// progress on the calls in flight. Throws bad_argument if i is out of range, or already ready:
  /// `bucket_reducer: "w" is ready twice; call finish() between two steps`.
  ///
  /// After a mismatch of the ranks' reducers the program may begin the step again. After a failed reduction
  /// this reducer is no longer usable: ready() and finish() throw `bucket_reducer: an earlier reduction
  /// failed: …`, with the code and the ranks of that failure.
  void ready(std::size_t i);
  bool is_ready(std::size_t i) const;

  /// While the result exists, ready(i) may be called any number of times. It only notes that gradient i has a
  /// value, and sends nothing. finish() also reduces gradients that became ready only in such passes. Throws
  /// bad_argument if a gradient is ready already: `bucket_reducer: no_sync() after "w" became ready; call
  /// finish() first`.
  NoSync no_sync();

  /// Waits until every gradient is reduced. Collective over the axes: all ranks post all buckets. While a
  /// NoSync exists, throws bad_argument before anything is sent, because the last pass must come after it. If
  /// some gradients are not ready and Unused::error is set, throws bad_argument on all ranks:
  /// `bucket_reducer: ready() was not called for "a" on dp rank 1; …`. Do not use the values of this step.
  void finish();

  /// Sets a digest of the origin of the parameters' values: of a seed, or of the settings of an optimizer.
  /// The ranks compare it in each later all-reduce, at no cost. If it differs, all ranks throw mismatch. With
  /// 0, the initial value, and with a hook, the ranks compare nothing.
  void set_history(std::uint64_t digest) noexcept;

  /// Bytes of each bucket, in the order they are posted.
  std::vector<std::int64_t> bucket_bytes() const;
  /// The number of reductions that ready(), and not finish(), has posted since the reducer was made: a
  /// measure of overlap.
  std::int64_t posted_early() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
