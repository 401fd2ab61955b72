// One block of a sharded model: parameters that are gathered, dropped and reduced together. Private to train.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "weft/dp/sharded_parameters.hpp"
#include "weft/nn/float8_linear.hpp"
#include "weft/train/fully_shard.hpp"

namespace weft {

class ShardBlock {
 public:
  /// `owner`: the object that claims the gradients. `reshard_ranks`: 0 drops weights after forward, 1 keeps
  /// them, n keeps 1/n.
  ShardBlock(Module& module, std::vector<Parameter*> parameters, const ShardAxes& axes,
             const FullyShardOptions& options, int reshard_ranks, const void* owner);

  Module& module() const noexcept { return module_; }
  const std::vector<Parameter*>& parameters() const noexcept { return parameters_; }

  // --- weights ---

  /// Gives the parameters their shards' layout; parameters that have memory keep their part of it.
  void shard();
  /// The pass for which weights are gathered: only float8 weights differ, unless one set of codes is for
  /// both.
  using Use = Float8Linears::WeightUse;
  /// Begins to gather, if nothing is gathered or in flight.
  void start_gather(ProcessGroup* neighbours, Use use);
  /// From now on layers read whole weights.
  void gather(ProcessGroup* neighbours, Use use);
  /// The pass for which weights are gathered or on their way.
  Use gathered_for() const noexcept { return use_; }
  /// Layers read shards again. `after_forward`: keeps the part of the weights that backward will need.
  void drop(bool after_forward);
  bool gathered() const noexcept { return gathered_; }
  bool on_its_way() const noexcept { return static_cast<bool>(gathering_); }
  /// Takes steps of the transfers in flight.
  void poll();

  // --- gradients ---

  /// Call this before backward: makes memory for gradients, and sets aside reduced gradients of earlier
  /// passes.
  void begin_gradients();
  /// Call this after backward: begins to reduce. Parameters without a gradient count as zeros, and
  /// missing() reports them.
  void start_reduce();
  /// Finishes the reduction: every trained parameter then has its reduced gradient.
  void finish_reduce();
  bool reducing() const noexcept { return static_cast<bool>(reducing_); }
  /// Call this after passes whose gradients stay as they are.
  void keep_unreduced() noexcept { unreduced_ = true; }
  bool unreduced() const noexcept { return unreduced_; }
  /// Trained parameters that no pass has used since their last reduction.
  const std::vector<Parameter*>& missing() const noexcept { return missing_; }
  /// Zeros, for a block that no pass used.
  void give_zeros(Parameter& parameter) const;
  /// Waits for transfers in flight and forgets all gradients.
  void discard() noexcept;

  std::int64_t whole_bytes() const noexcept;
  ShardedParameters& values();
  ShardedParameters& reducer();

  int depth = 0;  // passes of the module that are under way
  struct Pass {
    int exceptions;  // that were on their way when it began
    bool completed;  // the module's own work is done
    Use use;
  };
  std::vector<Pass> under_way;  // these passes

 private:
  bool cuts() const noexcept { return !parameters_.empty() && axes_.shard.size() > 1; }
  bool reduces() const noexcept {
    return cuts() || (!parameters_.empty() && axes_.replicate && axes_.replicate.size() > 1);
  }
  void scale_average(const Tensor& gradient) const;
  bool is_shard_gradient(const Parameter& p) const;
  LayoutRef reduced_layout(const LayoutRef& whole) const;
  std::uint64_t version() const;
  void place_whole();
  void keep_part();
  Tensor from_neighbours(ProcessGroup& neighbours);
  ReduceOp expect_partial(const Parameter& p);

  Module& module_;
  const std::vector<Parameter*> parameters_;
  std::vector<LayoutRef> wholes_;  // by parameter
  const ShardAxes axes_;
  const MixedPrecision precision_;
  const std::shared_ptr<Float8Linears> float8_;       // null: no weight is gathered as codes
  std::vector<std::optional<std::size_t>> as_codes_;  // by parameter: its layer in float8_
  bool two_sets_ = false;                             // of codes, for the two passes
  Use use_ = Use::forward;                            // of whole_
  const Unused unused_;
  const int reshard_ranks_;
  const void* const owner_;

  std::optional<ShardedParameters> values_;
  bool compared_ = false;  // the history of the first values
  bool gathered_ = false;
  std::optional<Transfer> gathering_;
  Tensor whole_;
  std::uint64_t version_ = 0;  // of the masters that whole_ or part_ was made of
  Tensor part_;                // 1/n of whole_, between forward and backward
  Work part_gathering_;

  std::vector<Parameter*> trained_;  // those of reducer_
  std::optional<ShardedParameters> reducer_;
  Tensor gradients_;             // whole tensors
  std::vector<Tensor> aside_;    // by trained parameter: reduced in passes before
  std::vector<LayoutRef> used_;  // by trained parameter: the layout of the whole gradient
  std::optional<ReduceOp> op_;
  std::optional<Transfer> reducing_;
  std::int64_t reducing_bytes_ = 0;
  std::vector<Parameter*> missing_;
  bool unreduced_ = false;
};

}  // namespace weft
