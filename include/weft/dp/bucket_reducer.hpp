// Gradients reduced in buckets while the rest of them is still computed. Used by one thread per rank.
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

/// One gradient as the reducer knows it; the same on all ranks of the axes.
struct BucketEntry {
  std::string name;        ///< for error texts
  std::int64_t count = 0;  ///< elements on this rank
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;  ///< sum, or avg where each rank has the mean over its own data
};

struct BucketOptions {
  std::int64_t bucket_bytes = std::int64_t{4} << 20;  ///< a bucket is closed when it has this many
  Unused unused = Unused::error;
  /// Copies what is bound with its threads; null: with the calling one. It outlives the reducer. If it is
  /// of a device, the buckets are there, and so is all that is bound.
  Compute* compute = nullptr;
  /// In the place of each bucket's all-reduce: bf16_hook(), or the program's own. By default there is none.
  BucketHook hook = {};
};

/// While one lives, backward passes only accumulate: gradients that become ready are not reduced. Made by
/// no_sync() of a BucketReducer, a GradientReducer or a FullySharded, which it may outlive; several nest.
/// Goes with a scope:
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
/// all-reduce is posted as soon as all its gradients are ready and all buckets before it are posted, so that
/// ranks cannot disagree on the order, whatever becomes ready first on each. Give the entries in the order in
/// which backward makes them ready: mostly the reverse of forward.
///
///   for each step:  compute the gradients into slot(i), or into memory bound by bind(i), calling ready(i)
///                   finish();   use the gradients, which are the reduced ones now
///
/// A gradient may lie in its slot, a part of a bucket in shared memory: then nothing is copied. Or it lies
/// in memory of the caller's: a small one is copied into its slot by ready() and back by finish(); one that
/// fills a bucket alone is reduced where it lies.
///
/// To accumulate several micro-batches, add to the gradients, and call ready() in the last one only, or in
/// all with no_sync() around those before the last. Between ready(i) and the end of finish() gradient i
/// belongs to the reduction: neither read nor write it.
///
/// On a device: gradients are the values that the stream of options.compute has written. Before ready(i) the
/// program queues on that stream all work that writes gradient i; work that it queues after finish() finds
/// the reduced gradients. The host does not wait for reductions, except in the small exchange after them that
/// compares the missing gradients (Unused::error) and in the first step; a later ready() or finish(), or a
/// wait for the stream, throws a failure. Memory that is bound lies on that stream, too.
///
/// Gradients are reduced over all ranks of `axes`, a mesh of one or more axes. With one rank nothing moves.
///
/// Several reducers over the same axes are independent: where one is alive already, the next one makes a
/// group of its own. All ranks make and destroy them, and call finish(), in the same order; also ready() in
/// the first step, in which ranks compare and make groups. Later each rank may call ready() in an order of
/// its own.
class BucketReducer {
 public:
  /// No communication if nothing is wrong; the first finish(), or the first bucket that is ready, compares
  /// the entries of all ranks, and the options: mismatch, on all of them, that names the first entry that
  /// differs. Throws bad_argument for an empty mesh, a count below 0, bucket_bytes below 1, a reduction other
  /// than sum and avg, a dtype that is not floating, a bucket whose bytes do not fit 64 bits, or a hook
  /// without name or start. Unless the mesh is empty, this rank then waits, at most its deadline, until the
  /// others compare: they get `bucket_reducer: dp rank 1 failed: …`.
  BucketReducer(DeviceMesh axes, std::vector<BucketEntry> entries, const BucketOptions& options = {});
  /// A reduction still in flight is given up, and with it the group of the axes.
  ~BucketReducer();
  BucketReducer(BucketReducer&&) noexcept;
  BucketReducer& operator=(BucketReducer&&) noexcept;

  std::size_t size() const noexcept;
  const BucketEntry& entry(std::size_t i) const;
  /// Where gradient i lies in its bucket: (count) elements of shared memory, zeros at first. Valid as long as
  /// the reducer, but not after bind(i), which may free it.
  TensorView slot(std::size_t i) const;
  /// The same as a tensor that keeps the bucket's memory alive. Throws bad_argument if i is bound.
  Tensor tensor(std::size_t i) const;
  /// Gradient i is in the caller's memory from now on: `data` has entry(i).count elements of its dtype, is
  /// contiguous and lives as long as the reducer or until bound again. The same entries are bound on all
  /// ranks. Throws bad_argument if it does not fit, has no memory or is not aligned for its dtype, where
  /// it overlaps a slot of this reducer or what is bound to another entry, or between ready(i) and finish().
  /// In the first step the other ranks are notified as by the constructor. Later they are not: call finish()
  /// in the handler, which throws on all ranks that nobody made i ready (Unused::error).
  void bind(std::size_t i, const TensorView& data);

  /// Gradient i has its final value of this step. Posts the buckets that can be posted, and takes steps of
  /// the calls in flight. Throws bad_argument if i is out of range, or ready already: `bucket_reducer: "w" is
  /// ready twice; finish() comes between two steps`.
  ///
  /// After a mismatch of the ranks' reducers the step begins again. After a failed reduction this reducer is
  /// no longer usable: ready() and finish() throw `bucket_reducer: an earlier reduction failed: …`, with the
  /// code and the ranks of that failure.
  void ready(std::size_t i);
  bool is_ready(std::size_t i) const;

  /// While the result lives, ready(i) notes that gradient i has a value, any number of times, and sends
  /// nothing. Gradients that are ready in such passes alone are reduced by finish(). Throws bad_argument
  /// if a gradient is ready already: `bucket_reducer: no_sync() after "w" became ready; finish() comes
  /// first`.
  NoSync no_sync();

  /// Waits until every gradient is reduced. Collective over the axes: all ranks post all buckets. Throws
  /// bad_argument while a NoSync lives, before anything is sent: the last pass comes after it; and on all
  /// ranks if some are not ready and Unused::error is set:
  /// `bucket_reducer: nobody made ready "a" on dp rank 1; …`; the values of this step are then not usable.
  void finish();

  /// A digest that the ranks compare with each all-reduce that is posted from now on, at no cost. It stands
  /// for the origin of the values whose gradients these are: a seed, or the settings of an optimizer.
  /// mismatch on all ranks if it differs. 0, as at first: nothing is compared. Not with a hook.
  void set_history(std::uint64_t digest) noexcept;

  /// Bytes of each bucket, in the order they are posted.
  std::vector<std::int64_t> bucket_bytes() const;
  /// Reductions posted by ready() rather than by finish(), since the reducer was made: a measure of overlap.
  std::int64_t posted_early() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
