// A model whose parameters, gradients and optimizer states are divided over the data-parallel ranks: each
// rank keeps a part of every parameter and has the whole of a block of layers only while it computes with it.
// Used by the one rank (thread) that owns the model; collective over the axes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "weft/dp/bucket_reducer.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// The dtypes in which a sharded model computes and reduces. Masters, gradients and optimizer states are f32
/// in any case.
struct MixedPrecision {
  /// The dtype of gathered weights, f32 or bf16: ranks send it, and products are computed in it.
  DType param = DType::f32;
  DType reduce = DType::f32;  ///< of gradients while ranks combine them, f32 or bf16
  /// If `param` is bf16, the inputs of a sharded module are rounded to it: to the values that PyTorch's cast
  /// gives, in tensors of f32, which layers take. Integers stay.
  bool cast_inputs = true;
};
/// bf16 weights and inputs, f32 reduction.
MixedPrecision default_mp_policy() noexcept;

/// Over which axes parameters are cut, and over which the shards are replicated (HSDP): mesh["dp"], or
/// {mesh["dp_shard"], mesh["dp_replicate"]}. Each may be a list of axes.
struct ShardAxes {
  ShardAxes(DeviceMesh shard_axes) : shard(std::move(shard_axes)) {}
  ShardAxes(DeviceMesh shard_axes, DeviceMesh replicate_axes)
      : shard(std::move(shard_axes)), replicate(std::move(replicate_axes)) {}
  DeviceMesh shard, replicate;
};

/// The treatment of a block's weights between its forward and its backward. true: dropped, and gathered
/// again. false: kept. A number n: each rank keeps 1/n, and backward gathers among n neighbouring ranks of
/// the shard axes (those of one host, for example), whose number n divides.
using ReshardAfterForward = std::variant<bool, int>;

struct FullyShardOptions {
  /// Which modules are blocks, gathered and dropped one by one: patterns of paths below the root, as in a
  /// Plan ("layers.*"). Parameters outside of all blocks, and a weight that several blocks share, are
  /// gathered with the root for the whole of a pass.
  std::vector<std::string> blocks = {};
  MixedPrecision precision = {};
  ReshardAfterForward reshard_after_forward = true;  ///< of blocks; the root keeps its weights for backward
  /// The next block's weights are gathered while a block computes, in the order of the last forward pass.
  bool prefetch = true;
  /// A parameter that a backward pass did not use on some rank; see BucketReducer.
  Unused unused = Unused::error;
};

/// Bytes on this rank.
struct ShardMemory {
  std::int64_t masters = 0;      ///< this rank's part of the parameters, f32
  std::int64_t rounded = 0;      ///< the same as MixedPrecision::param, if that is not f32
  std::int64_t gradients = 0;    ///< that parameters have now
  std::int64_t whole_now = 0;    ///< gathered weights, and gradients of whole blocks
  std::int64_t whole_peak = 0;   ///< the most of it since the model was sharded
  std::int64_t whole_model = 0;  ///< all parameters in f32 as one data rank would hold them, for comparison
};

/// The sharding of a model. It must not outlive the model, and the axes outlive it. Passes of the model
/// gather and reduce by themselves:
///
///     Transformer model(config);                                   // shapes, no memory
///     parallelize(model, mesh["tp"], plan);  replicate(model, mesh);
///     const auto sharded = fully_shard(model, mesh["dp"], {.blocks = {"layers.*"}});
///     materialise(model, compute);  initialise(model, seed);       // this rank's part alone is ever allocated
///     AdamW adamw(compute, model.parameters(), {});
///     … forward, loss, backward … clip_grad_norm(model.parameters(), 1); adamw.step(lr); adamw.zero_gradients();
///
/// Every parameter's master is Shard(0) over the axes, inside other cuts, so that optimizers, grad_norm,
/// checkpoints and redistribute work on it as it is. After the outermost backward pass every trained
/// parameter has its gradient of all ranks, laid out as its master. A second pass before zero_gradient() adds
/// to it: each pass reduces its own.
///
/// All ranks run the same sharded modules in the same order. If a pass, forward or backward, throws on all
/// ranks, the model can go on: nothing is in flight, all weights are dropped, and no parameter has a
/// gradient. The same holds if a hook throws, except for a hook at end_of_backward, and for the `leave` of
/// one that was set around the root before fully_shard(): then the pass is over. If one rank alone throws,
/// the others wait for it until their deadline, whose error names it.
///
/// An error ends the outermost pass. If a module catches an exception of a block below it, and goes on, the
/// outermost pass throws unsupported when it is over, naming the block; gradients are discarded as above.
class FullySharded {
 public:
  ~FullySharded();
  FullySharded(const FullySharded&) = delete;
  FullySharded& operator=(const FullySharded&) = delete;

  const ShardAxes& axes() const noexcept;
  /// The root of the axes.
  DeviceMesh mesh() const;

  /// While the result lives, backward passes reduce nothing: each parameter keeps the whole gradient of this
  /// rank, Partial over the axes, so a rank needs memory for all gradients of the model. The next pass after
  /// it adds to these and reduces the sum. Throws bad_argument if a parameter has a reduced gradient
  /// already, naming it. Without it every pass reduces: more is sent, and no whole gradients are kept.
  NoSync no_sync();
  /// Reduces what only passes inside no_sync() have made; otherwise nothing. Collective where they have.
  /// Parameters that none of these passes used are treated as after a pass outside of no_sync(): see
  /// FullyShardOptions::unused. Throws bad_argument while a NoSync lives. After any other error no parameter
  /// has a gradient.
  void finish();
  /// After an error between passes: drops gathered weights and all gradients, waits for calls in flight.
  /// Ranks call it alike.
  void discard() noexcept;

  /// Freezes a parameter that is trained, or the reverse, between steps: a frozen one is gathered, but has no
  /// gradient, and nothing of it is reduced. Throws bad_argument while it has a gradient.
  void set_trainable(Parameter& parameter, bool trainable);

  ShardMemory memory() const;
  /// Gathers that were begun before the module that needs them: a measure of overlap.
  std::int64_t prefetched() const noexcept;
  /// Reductions in flight and gathers in flight, now. Blocks whose weights are gathered, now.
  int in_flight() const noexcept;
  int gathered_blocks() const noexcept;
  /// Bytes that this rank receives in one gather of all blocks, and sends in one reduction of all gradients:
  /// the theoretical counts of ShardedParameters, without the replicate axes.
  std::int64_t gather_bytes() const;
  std::int64_t reduce_bytes() const;

 private:
  friend std::unique_ptr<FullySharded> fully_shard(Module&, const ShardAxes&, const FullyShardOptions&);
  friend std::unique_ptr<FullySharded> fully_shard(Module&, ProcessGroup&, const FullyShardOptions&);
  struct Impl;
  explicit FullySharded(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Cuts the parameters of `root`, after parallelize() and before materialise(); and makes passes of `root`
/// gather and reduce. Communicates nothing then. A parameter that has no layout is taken to be the same on
/// all ranks.
///
/// The values that replicate axes hold alike are compared in the first pass, and the blocks as
/// ShardedParameters does: mismatch on all ranks.
///
/// Also after materialise(): each rank then keeps its part of the values that are there. All ranks of the
/// axes must have the same values; check_replicas() is called, and throws mismatch naming the first parameter
/// that differs.
///
/// Throws before anything changes: bad_argument for a pattern that matches no module, a scalar parameter, a
/// dtype that is neither f32 nor bf16, a parameter that has a gradient, belongs to a GradientReducer or
/// another FullySharded, or is some other dtype than precision.param and has memory; for
/// reshard_after_forward of a number that does not divide the ranks; layout for a parameter that is not
/// Replicate on the axes.
std::unique_ptr<FullySharded> fully_shard(Module& root, const ShardAxes& axes,
                                          const FullyShardOptions& options = {});
/// The same over all ranks of a group: a default mesh of one axis, "dp", which mesh() gives.
std::unique_ptr<FullySharded> fully_shard(Module& root, ProcessGroup& group,
                                          const FullyShardOptions& options = {});

}  // namespace weft
