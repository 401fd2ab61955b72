// Tensors of which each rank keeps a part. A rank holds the global tensor only while it computes with it.
// Here are the arithmetic and the transfers of fully sharded data parallelism. One thread per rank uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/base/chunk.hpp"
#include "weft/base/tensor.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/mesh/transfer.hpp"

namespace weft {

/// One tensor of a list that is gathered and reduced together. It is the same on all ranks.
struct ShardEntry {
  std::string name;  ///< for error texts
  /// The layout of the whole tensor, with which a rank computes. It is Replicate on the axes that will cut
  /// the tensor and on the axes that replicate it. Other axes may cut the tensor (tensor parallelism). Then
  /// "the whole tensor" means this rank's tensor-parallel part.
  LayoutRef layout = nullptr;
  /// the dtype of the values; gradients have the dtype ShardedParametersOptions::gradient
  DType dtype = DType::f32;
};

struct ShardedParametersOptions {
  /// Axes whose ranks hold the same shards (HSDP). Gradients are also summed over these ranks, after the
  /// reduce_scatter. Empty: none.
  DeviceMesh replicate = {};
  /// `reduce`: the dtype of gradients while ranks combine them; `gradient`: their dtype before and after.
  /// Each is f64, f32, bf16 or f16. If the two differ, elements are converted on the host.
  DType reduce = DType::f32;
  DType gradient = DType::f32;
  /// A whole tensor of at least so many bytes is sent by a separate call, directly from source to
  /// destination. Smaller tensors are packed into one call, which copies them once more.
  std::int64_t alone_bytes = std::int64_t{64} << 10;
  /// The Compute whose threads copy. Null: the calling thread copies. It must exist longer than every object
  /// made with these options. If the Compute belongs to a device, all memory must be on that device.
  Compute* compute = nullptr;
};

/// A list of tensors, each cut along its dimension 0 over all ranks of some axes, inside the cuts of all
/// other axes. The layout of a shard is layout->shard_inside(axes, 0), so a gather over the axes gives
/// exactly the tensor-parallel part. (FSDP2 of PyTorch calls this a parameter group; its shards are also
/// Shard(0).) If the rows do not divide evenly, the first size % n ranks have one row more. With fewer rows
/// than ranks, the last ranks have none. Nothing is padded, since all_gather_v and reduce_scatter_v send
/// blocks of different lengths.
///
///   ShardedParameters shards(mesh["dp"], {{"w", layout}, {"b", layout_of_b}});
///   Tensor buffer = shards.unshard({w, b});                      // views of what this rank keeps
///   … forward and backward with shards.whole(0, buffer) … into shards.gradient(0, gradients) …
///   Tensor reduced = shards.reduce_scatter(gradients);           // buffer of shards.shard_gradient(0, reduced)
///
/// A buffer is one piece of shared memory in which each tensor begins at a multiple of 64 bytes. Peers write
/// and read this memory directly. A rank's part is copied into the buffer once, and nothing else is copied.
/// To reshard, release the Tensor.
///
/// Collective over the axes. All ranks must begin the transfers of all lists over these axes in the same
/// order. Any number of transfers may be in flight. The first transfer compares the lists and the options of
/// all ranks. If they differ, all ranks throw mismatch that names the first different entry.
///
/// On a device, transfers are ordered on the stream of options.compute, and the host does not wait for that
/// stream. Conversions are `unsupported` on a device.
class ShardedParameters {
 public:
  /// No communication. Throws bad_argument for an empty mesh, an axis that both replicates and shards,
  /// alone_bytes below 1, a dtype of gradients that is not floating, and a tensor without dimensions:
  /// `sharded_parameters: "w" is a scalar; it has no dimension to cut`. Throws layout, naming the entry, if
  /// an entry has no layout, or if its layout is not Replicate on the axes.
  ShardedParameters(DeviceMesh shard, std::vector<ShardEntry> entries,
                    const ShardedParametersOptions& options = {});
  ~ShardedParameters();
  ShardedParameters(ShardedParameters&&) noexcept;
  ShardedParameters& operator=(ShardedParameters&&) noexcept;

  // --- the arithmetic ---

  std::size_t size() const noexcept;
  const ShardEntry& entry(std::size_t i) const;
  const LayoutRef& whole_layout(std::size_t i) const;
  const LayoutRef& shard_layout(std::size_t i) const;
  /// The part of tensor i that `rank` of the axes keeps, as ranges of elements of the whole tensor, in order.
  /// It is one range, or one for each segment of dimension 0. A range may be empty.
  std::vector<Chunk> ranges(std::size_t i, int rank) const;
  /// The number of elements of that part.
  std::int64_t shard_count(std::size_t i, int rank) const;
  /// Bytes that this rank receives from other ranks in an unshard: the bytes of the whole tensors, minus the
  /// bytes of this rank's shards. A reduce_scatter sends the same number of elements, of dtype
  /// options.reduce, if its algorithm sends each element once. Both functions count only transfers over the
  /// axes that shard, not over axes that replicate.
  std::int64_t unshard_bytes() const noexcept;
  std::int64_t reduce_bytes() const noexcept;

  // --- values ---

  /// Allocates memory for all whole tensors. It is uninitialised and shared.
  Tensor make_whole() const;
  /// The bytes of that memory.
  std::int64_t whole_bytes() const noexcept;
  /// Tensor i in memory of make_whole(), with whole_layout(i).
  Tensor whole(std::size_t i, const Tensor& buffer) const;
  /// Begins to gather all whole tensors. finish() returns the buffer: `into`, made by make_whole(), or a new
  /// buffer. `shards` are the parts that this rank keeps, with the dtypes of the entries. They have been
  /// copied when the function returns. Throws bad_argument if a view does not fit, naming the entry.
  Transfer start_unshard(std::span<const ConstTensorView> shards, Tensor into = {});
  Tensor unshard(std::span<const ConstTensorView> shards, Tensor into = {}) {
    return start_unshard(shards, std::move(into)).finish();
  }
  /// Like the function above, but into the caller's memory `wholes`. It must stay alive until finish(), and
  /// have the shapes of the whole tensors. finish() returns an empty Tensor.
  Transfer start_unshard(std::span<const ConstTensorView> shards, std::span<const TensorView> wholes);
  /// Sets a digest of the origin of the parts that are gathered from now on: of a seed, or of the settings of
  /// an optimizer. The first unshard compares the digests of the ranks that have one; later calls compare
  /// them at no cost. If they differ, all ranks throw mismatch. 0, the initial value, means not known.
  void set_history(std::uint64_t digest) noexcept;
  /// Copies this rank's part out of each whole tensor. No communication.
  void reshard(std::span<const ConstTensorView> wholes, std::span<const TensorView> shards) const;

  // --- gradients ---

  /// Allocates uninitialised shared memory for the gradients of all whole tensors, of dtype options.reduce.
  Tensor make_gradients() const;
  std::int64_t gradient_bytes() const noexcept;
  /// The view of tensor i in that memory, without a layout.
  Tensor gradient(std::size_t i, const Tensor& buffer) const;
  /// Begins to combine the gradients of all ranks. finish() returns a buffer with this rank's part of each
  /// gradient, of dtype options.gradient. `op`: sum, or avg if each rank has the mean over its own data. The
  /// memory of `gradients`, made by make_gradients(), is overwritten. With options.replicate the second step,
  /// an all_reduce of the shards, begins in finish().
  Transfer start_reduce_scatter(Tensor gradients, ReduceOp op = ReduceOp::sum);
  Tensor reduce_scatter(Tensor gradients, ReduceOp op = ReduceOp::sum) {
    return start_reduce_scatter(std::move(gradients), op).finish();
  }
  /// Like the function above, for gradients in the caller's memory, of dtype options.gradient. When it
  /// returns, they have been copied and converted to options.reduce.
  Transfer start_reduce_scatter(std::span<const ConstTensorView> gradients, ReduceOp op = ReduceOp::sum);
  /// Like the function above, but the results go into the caller's memory, which must stay alive until
  /// finish(). `shards` have the shapes of the shards and dtype options.gradient. finish() returns an empty
  /// Tensor.
  Transfer start_reduce_scatter(std::span<const ConstTensorView> gradients,
                                std::span<const TensorView> shards, ReduceOp op = ReduceOp::sum);
  /// The reduced gradient of tensor i in the result of finish(), with shard_layout(i).
  Tensor shard_gradient(std::size_t i, const Tensor& reduced) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

using FlatShards [[deprecated("ShardedParameters")]] = ShardedParameters;
using FlatShardOptions [[deprecated("ShardedParametersOptions")]] = ShardedParametersOptions;

}  // namespace weft
