// A model whose parameters, gradients and optimizer states are divided over the data-parallel ranks: each
// rank keeps a part of every parameter, and holds all weights of a block of layers only while it computes
// with the block. Used by the one rank (thread) that owns the model; collective over the axes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "weft/dp/bucket_reducer.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/precision.hpp"

namespace weft {

class Float8Linears;
class ShardPasses;

/// bf16 weights, inputs that are rounded to bf16 and stay f32, f32 reduction.
MixedPrecision default_mp_policy() noexcept;

/// The axes over which parameters are cut, and the axes over which the shards are replicated (HSDP):
/// mesh["dp"], or {mesh["dp_shard"], mesh["dp_replicate"]}. Each of the two meshes may have several axes.
struct ShardAxes {
  ShardAxes(DeviceMesh shard_axes) : shard(std::move(shard_axes)) {}
  ShardAxes(DeviceMesh shard_axes, DeviceMesh replicate_axes)
      : shard(std::move(shard_axes)), replicate(std::move(replicate_axes)) {}
  DeviceMesh shard, replicate;
};

/// The treatment of a block's weights between its forward and its backward. true: they are dropped, and
/// gathered again. false: they are kept. A number n: each rank keeps 1/n of the weights, and backward gathers
/// them from n neighbouring ranks of the shard axes (the ranks of one host, for example); n must divide the
/// number of ranks.
using ReshardAfterForward = std::variant<bool, int>;

struct FullyShardOptions {
  /// The modules that are blocks, whose weights are gathered and dropped separately: patterns of paths below
  /// the root, as in a Plan ("layers.*"). Parameters outside of all blocks, and a weight that several blocks
  /// share, are gathered with the root for a whole pass.
  std::vector<std::string> blocks = {};
  MixedPrecision precision = {};
  ReshardAfterForward reshard_after_forward = true;  ///< for blocks; the root keeps its weights for backward
  /// Whether the next block's weights are gathered while a block computes, in the order of the last forward
  /// pass.
  bool prefetch = true;
  /// The treatment of a parameter that a backward pass did not use on some rank; see BucketReducer.
  Unused unused = Unused::error;
  /// An axis of the shard axes along which some parameters are cut already, as experts are along ep. A module
  /// with such parameters is a block of its own, whose parameters are divided over the other shard axes only.
  /// Empty: none.
  DeviceMesh cut_already = {};
  /// The float8 layers of the model (Float8Model::linears()): their weights are sent as codes, one byte for
  /// each element, and layers compute the same bits as without. With recipes other than tensorwise, which
  /// cast a weight along both dimensions, forward and backward gather different codes, so that no weights
  /// are kept between them, whatever reshard_after_forward says; a block in which a module runs again
  /// (apply_ac) then sends its weights in precision.param. Null: weights are sent in precision.param.
  std::shared_ptr<Float8Linears> float8 = {};
  /// Paths of modules below the root: they alone, with what lies in them, are divided, such as the stages of
  /// this rank in a pipeline. Each must match a pattern of `blocks`, or lie in such a module: the root is not
  /// run. Empty: the whole model.
  std::vector<std::string> only = {};
};

/// Numbers of bytes on this rank.
struct ShardMemory {
  std::int64_t masters = 0;      ///< this rank's part of the parameters, f32
  std::int64_t rounded = 0;      ///< this part in MixedPrecision::param, if that is not f32
  std::int64_t gradients = 0;    ///< the gradients that parameters have now
  std::int64_t whole_now = 0;    ///< gathered weights, and gradients of whole blocks
  std::int64_t whole_peak = 0;   ///< the largest value of `whole_now` since the model was sharded
  std::int64_t whole_model = 0;  ///< for comparison: all parameters in f32, as one data rank would hold them
};

/// The sharding of a model. It must not outlive the model, and the axes must outlive it. Passes of the model
/// gather and reduce automatically:
///
///     Transformer model(config);                                   // shapes, no memory
///     parallelize(model, mesh["tp"], plan);  replicate(model, mesh);
///     const auto sharded = fully_shard(model, mesh["dp"], {.blocks = {"layers.*"}});
///     materialise(model, compute);  initialise(model, seed);       // this rank's part alone is ever allocated
///     AdamW adamw(compute, model.parameters(), {});
///     … forward, loss, backward … clip_grad_norm(model.parameters(), 1); adamw.step(lr); adamw.zero_gradients();
///
/// Every parameter's master is Shard(0) over the axes, inside other cuts, so optimizers, grad_norm,
/// checkpoints and redistribute work on it directly. After the outermost backward pass every trained
/// parameter has the gradient over all ranks, with the layout of its master. A second pass before
/// zero_gradient() reduces its own gradients and adds them.
///
/// All ranks must run the same sharded modules in the same order. If a pass, forward or backward, throws on
/// all ranks, the program can continue with the model: nothing is in flight, all weights are dropped, and no
/// parameter has a gradient. This also holds if a hook throws, except for a hook at end_of_backward, and for
/// the `leave` of an Around that was set on the root before fully_shard(), because these run after the pass.
/// If only one rank throws, the others wait for it until their deadline; their error names this rank.
///
/// An error must end the outermost pass. If a module catches an exception of a block inside it and continues,
/// the outermost pass throws unsupported at its end, naming the block, and drops weights and gradients as
/// above.
class FullySharded {
 public:
  ~FullySharded();
  FullySharded(const FullySharded&) = delete;
  FullySharded& operator=(const FullySharded&) = delete;

  const ShardAxes& axes() const noexcept;
  /// The root mesh of the axes.
  DeviceMesh mesh() const;

  /// While the result exists, backward passes reduce nothing: each parameter keeps the full gradient of this
  /// rank, Partial over the axes, so a rank needs memory for all gradients of the model. The next pass
  /// afterwards adds to these gradients and reduces the sum. Throws bad_argument, naming the parameter, if a
  /// parameter already has a reduced gradient. Without no_sync() every pass reduces: ranks send more, but
  /// keep no full gradients.
  NoSync no_sync();
  /// While this exists, weights that a pass has gathered are kept: each block is gathered once, however often
  /// it runs, and a rank has memory for all weights of the blocks. It must not outlive the FullySharded.
  class [[nodiscard]] KeptWeights {
   public:
    KeptWeights(KeptWeights&&) noexcept = default;
    KeptWeights& operator=(KeptWeights&&) = delete;
    ~KeptWeights() {
      if (passes_ != nullptr) end(*passes_);
    }

   private:
    friend class FullySharded;
    explicit KeptWeights(ShardPasses& passes);
    static void end(ShardPasses& passes) noexcept;
    struct Release {
      void operator()(ShardPasses*) const noexcept {}
    };
    std::unique_ptr<ShardPasses, Release> passes_;
  };
  KeptWeights keep_weights();
  /// Reduces gradients that only passes inside no_sync() have made; does nothing if there are none.
  /// Collective. A parameter that none of these passes used is treated as after a pass outside no_sync(): see
  /// FullyShardOptions::unused. Throws bad_argument while a NoSync exists. After any other error no parameter
  /// has a gradient.
  void finish();
  /// After an error between passes: drops gathered weights and all gradients, and waits for calls in flight.
  /// All ranks must call it.
  void discard() noexcept;

  /// Freezes a trained parameter, or unfreezes a frozen one, between steps. A frozen parameter is gathered,
  /// but has no gradient, and nothing is reduced for it. Throws bad_argument while the parameter has a
  /// gradient.
  void set_trainable(Parameter& parameter, bool trainable);

  ShardMemory memory() const;
  /// The number of gathers that began before the module that needs them: a measure of overlap.
  std::int64_t prefetched() const noexcept;
  /// in_flight(): the number of reductions and gathers in flight now. gathered_blocks(): the number of blocks
  /// whose weights are gathered now.
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

/// Cuts the parameters of `root`, and makes passes of `root` gather and reduce. Call it after parallelize()
/// and before materialise(); then it does not communicate. A parameter without a layout counts as equal on
/// all ranks.
///
/// The first pass compares the values that the replicate axes replicate, and the blocks (like
/// ShardedParameters); if they differ, all ranks throw mismatch.
///
/// It may also be called after materialise(); then each rank keeps its part of the present values. All ranks
/// of the axes must have the same values: it calls check_replicas(), which throws mismatch that names the
/// first different parameter.
///
/// Throws before anything changes: bad_argument for a pattern that matches no module, a scalar parameter, a
/// dtype that is neither f32 nor bf16, a parameter that has a gradient, belongs to a GradientReducer or
/// another FullySharded, or has memory in another dtype than precision.param; a number reshard_after_forward
/// that does not divide the ranks; or float8 layers of another model; layout for a parameter that is not
/// Replicate on the axes.
std::unique_ptr<FullySharded> fully_shard(Module& root, const ShardAxes& axes,
                                          const FullyShardOptions& options = {});
/// Like the function above, over all ranks of a group: makes a mesh with one axis, "dp", which mesh()
/// returns.
std::unique_ptr<FullySharded> fully_shard(Module& root, ProcessGroup& group,
                                          const FullyShardOptions& options = {});

}  // namespace weft
