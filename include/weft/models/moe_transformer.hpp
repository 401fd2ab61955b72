// A decoder-only transformer whose feed-forward layers are mixtures of experts, in all blocks or in some.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/ep/moe.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/transformer.hpp"

namespace weft {

struct ParallelModel;

struct MoETransformerConfig {
  /// ffn_hidden is for blocks without experts.
  TransformerConfig transformer = {};
  std::int64_t experts = 8;
  std::int64_t expert_hidden = 0;  ///< hidden features of each expert; 0: ffn_hidden
  std::int64_t shared_hidden = 0;  ///< hidden features of the shared expert; 0: none
  ExpertKind kind = ExpertKind::swiglu;
  /// Block i has experts if i + 1 is a multiple of this number.
  std::int64_t every = 1;
  RouterOptions router = {};
  bool scale_outputs_by_load = false, float8_dispatch = false;  ///< see MoEConfig

  bool has_experts(std::int64_t block) const noexcept { return (block + 1) % every == 0; }
  MoEConfig layer() const;  ///< of each mixture of experts
  /// Throws the errors of TransformerConfig::check() and MoEConfig::check(), and bad_argument for `every`
  /// below 1 or above the number of layers.
  void check() const;
};

/// As TransformerBlock, with experts.
class MoEBlock : public PreNormBlock {
 public:
  MoEBlock(const MoETransformerConfig& config, std::shared_ptr<const RopeTables> rope);
  MoE mlp;
  bool has_exact_rule() const override { return typeid(*this) == typeid(MoEBlock); }
};

/// As Transformer. Paths of a block with experts: layers.N.mlp.{router.gate.weight, experts.gate_proj,
/// experts.up_proj, experts.down_proj, shared_expert.*.weight}.
class MoETransformer : public Transformer {
 public:
  explicit MoETransformer(const MoETransformerConfig& config);
  const MoETransformerConfig& moe_config() const noexcept { return config_; }
  bool has_exact_rule() const override { return typeid(*this) == typeid(MoETransformer); }

 private:
  MoETransformerConfig config_;
};

/// The recipe of a MoETransformer: split by transformer_plan(), the hidden features of each expert over the
/// tensor axis, too; blocks "layers.*". BuildOptions::expert_axis divides the experts. `config` is checked.
/// Building throws bad_argument for sequence_parallel: tokens are routed whole.
Recipe moe_recipe(const MoETransformerConfig& config);

/// expert_balance() of all routers of the model, on all ranks; in a pipeline, collective over the stages.
/// The auxiliary losses of the model are the sums of those of its routers.
std::vector<LayerBalance> expert_balance(ParallelModel& model);

}  // namespace weft
