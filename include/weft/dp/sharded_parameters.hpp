// Tensors of which each rank keeps a part, and has the whole for as long as it computes with it: the
// arithmetic and the transfers of fully sharded data parallelism, on anybody's memory. Used by one thread per
// rank.
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

/// One tensor of a list that is gathered and reduced together; the same on all ranks.
struct ShardEntry {
  std::string name;  ///< for error texts
  /// The layout of the whole, as one rank computes with it: Replicate on the axes that will cut it and on
  /// those that replicate it. Other axes may cut it (tensor parallelism): "the whole" is then this rank's
  /// tensor-parallel part.
  LayoutRef layout = nullptr;
  DType dtype = DType::f32;  ///< of its values; that of gradients is ShardedParametersOptions::gradient
};

struct ShardedParametersOptions {
  /// Ranks that hold the same shards (HSDP): gradients are summed over them, too, after the reduce_scatter.
  /// Empty: none.
  DeviceMesh replicate = {};
  /// The dtype of gradients while ranks combine them, and before and after: f64, f32, bf16 or f16. If the
  /// two differ, elements are converted on the host.
  DType reduce = DType::f32;
  DType gradient = DType::f32;
  /// A tensor whose whole has as many bytes travels in a call of its own, from where it lies to where it
  /// belongs; smaller ones are packed into one call, and copied once more.
  std::int64_t alone_bytes = std::int64_t{64} << 10;
  /// Copies with its threads; null: with the calling one. It outlives all. If it is of a device, all
  /// memory is there.
  Compute* compute = nullptr;
};

/// A list of tensors, each cut along its dimension 0 over all ranks of some axes, inside the cuts of all
/// other axes: the layout of a shard is layout->shard_inside(axes, 0), so that gathering the axes gives
/// exactly the tensor-parallel part. (PyTorch: what FSDP2 calls a parameter group; its shards are Shard(0)
/// likewise.) Uneven: the first size % n ranks have one row more; with fewer rows than ranks the last ones
/// have none. Nothing is padded: blocks of different length travel as all_gather_v and reduce_scatter_v.
///
///   ShardedParameters shards(mesh["dp"], {{"w", layout}, {"b", layout_of_b}});
///   Tensor buffer = shards.unshard({w, b});                      // views of what this rank keeps
///   … forward and backward with shards.whole(0, buffer) … into shards.gradient(0, gradients) …
///   Tensor reduced = shards.reduce_scatter(gradients);           // buffer of shards.shard_gradient(0, reduced)
///
/// A buffer is one piece of shared memory in which each tensor begins at a multiple of 64 bytes. Peers write
/// and read it where it lies: a rank's part is copied there once, and nothing else is copied. Releasing the
/// Tensor is resharding.
///
/// Collective over the axes; ranks begin transfers, of all lists over these axes, in the same order. Any
/// number may be in flight. The first transfer compares the lists of all ranks, and the options: mismatch on
/// all of them that names the first entry that differs.
///
/// On a device: transfers are ordered on the stream of options.compute, for which the host does not wait;
/// conversions are `unsupported` there.
class ShardedParameters {
 public:
  /// No communication. Throws bad_argument for an empty mesh, axes that replicate and shard at once, no
  /// alone_bytes, a dtype of gradients that is not floating, and a tensor without dimensions:
  /// `sharded_parameters: "w" is a scalar; it has no dimension to cut`; layout if an entry has no layout, or
  /// one that is not Replicate on the axes, naming it.
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
  /// The part of tensor i that `rank` of the axes keeps: ranges of the elements of the whole, in order; one,
  /// or one for each segment of dimension 0. A range may be empty.
  std::vector<Chunk> ranges(std::size_t i, int rank) const;
  /// How many elements that are.
  std::int64_t shard_count(std::size_t i, int rank) const;
  /// Bytes that this rank receives from others in an unshard: whole - shard. A reduce_scatter by any
  /// algorithm that sends each element once sends as many elements, of dtype options.reduce. Over the axes
  /// that shard, without those that replicate.
  std::int64_t unshard_bytes() const noexcept;
  std::int64_t reduce_bytes() const noexcept;

  // --- values ---

  /// Memory for all wholes: uninitialised, shared.
  Tensor make_whole() const;
  /// Bytes of it.
  std::int64_t whole_bytes() const noexcept;
  /// Tensor i in such memory, with whole_layout(i).
  Tensor whole(std::size_t i, const Tensor& buffer) const;
  /// Begins to gather all wholes; finish() gives the buffer: `into`, made by make_whole(), or a new one.
  /// `shards` are what this rank keeps, of the dtypes of the entries; they are copied before this returns.
  /// Throws bad_argument if a view does not fit, naming the entry.
  Transfer start_unshard(std::span<const ConstTensorView> shards, Tensor into = {});
  Tensor unshard(std::span<const ConstTensorView> shards, Tensor into = {}) {
    return start_unshard(shards, std::move(into)).finish();
  }
  /// The same into memory of the caller's, which lives until finish(): `wholes` are of the shapes of the
  /// wholes. finish() gives an empty Tensor.
  Transfer start_unshard(std::span<const ConstTensorView> shards, std::span<const TensorView> wholes);
  /// A digest of the origin of the parts that are gathered from now on: a seed, or the settings of an
  /// optimizer. The ranks compare it: in the first unshard if both of two ranks have one, later with the
  /// call, at no cost. mismatch on all ranks if it differs. 0, as at first: not known.
  void set_history(std::uint64_t digest) noexcept;
  /// Copies this rank's part of each whole. No communication.
  void reshard(std::span<const ConstTensorView> wholes, std::span<const TensorView> shards) const;

  // --- gradients ---

  /// Memory for gradients of all wholes, of options.reduce: uninitialised, shared.
  Tensor make_gradients() const;
  std::int64_t gradient_bytes() const noexcept;
  /// The view of tensor i in it, without a layout.
  Tensor gradient(std::size_t i, const Tensor& buffer) const;
  /// Begins to combine the gradients of all ranks; finish() gives a buffer with this rank's part of each, of
  /// options.gradient. `op`: sum, or avg where each rank has the mean over its own data. The memory of
  /// `gradients`, made by make_gradients(), is overwritten. With options.replicate the second step, an
  /// all_reduce of the shards, begins in finish().
  Transfer start_reduce_scatter(Tensor gradients, ReduceOp op = ReduceOp::sum);
  Tensor reduce_scatter(Tensor gradients, ReduceOp op = ReduceOp::sum) {
    return start_reduce_scatter(std::move(gradients), op).finish();
  }
  /// The same of gradients in memory of the caller's, of options.gradient: copied, and converted to
  /// options.reduce, before this returns.
  Transfer start_reduce_scatter(std::span<const ConstTensorView> gradients, ReduceOp op = ReduceOp::sum);
  /// The same with the results in memory of the caller's, which lives until finish(): `shards` are of the
  /// shapes of the shards, of options.gradient. finish() gives an empty Tensor.
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
