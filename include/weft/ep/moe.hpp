// A mixture of experts: a layer in which each token uses some of many feed-forward networks (N. Shazeer et
// al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017). On the host;
// used by the one rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weft/ep/expert_modules.hpp"
#include "weft/ep/experts.hpp"
#include "weft/ep/router.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/module.hpp"

namespace weft {

class TokenRoutes;

struct MoEConfig {
  std::int64_t dim = 0, hidden = 0, experts = 0;
  ExpertKind kind = ExpertKind::swiglu;
  RouterOptions router = {};
  /// Hidden features of a SwiGLU that every token uses, besides the chosen experts; 0: none.
  std::int64_t shared_hidden = 0;
  /// In training, the output of expert i is multiplied by (mean assignments of an expert) / (assignments of
  /// expert i), of the global batch before capacity. This changes the values of the layer, not only
  /// gradients; other programs call it a gradient scale.
  bool scale_outputs_by_load = false;
  /// Whether tokens travel to their experts as codes of eight bits with a scale for each row, a quarter of
  /// the bytes of f32. Experts on every rank compute with the same rounded rows, so results still do not
  /// depend on the mesh; results and gradients travel in the dtype of x.
  bool float8_dispatch = false;
  Init init = Normal{0.02}, down_init = Normal{0.02};

  /// Throws bad_argument if sizes do not fit: `moe: experts is 0; expected at least 1`.
  void check() const;
};

/// y = shared_expert(x) + the sum over the chosen experts of weight · expert(x). x, y: (…, dim), split in the
/// first dimension only; tokens are all dimensions but the last. The sum is in f32, in the order of the
/// choices. The module does not add the residual.
///
/// Exact mode (docs/exact.md): gradients of experts are sums over blocks of samples, and sums over the hidden
/// features of experts are made of 8 blocks of these. The expert axis must be the last of the axes that split
/// samples, otherwise a pass throws bad_argument.
///
/// Children: router, experts, and shared_expert if there is one.
///
/// Expert parallel (apply_expert_parallel): the axis that splits the experts also splits samples. Tokens
/// travel to the ranks of their experts and back, each token once to each of these ranks; the shared expert
/// computes meanwhile. Collectives of a pass: one all-gather over the axes that split samples (Router), one
/// of the choices and two exchanges over the expert axis forward, two exchanges backward, whatever is routed.
/// Every gradient is the contribution of this rank's tokens, so that losses must be divided by global numbers
/// of tokens, as everywhere in weft; nothing is scaled by the number of expert ranks.
class MoE : public Module {
 public:
  /// Throws the errors of MoEConfig::check() and Router.
  explicit MoE(const MoEConfig& config);
  /// A mixture whose experts are modules of the program; see ExpertModules. config.hidden must be 0; kind,
  /// init of experts and down_init are those of the modules. Throws the errors of ExpertModules, too.
  MoE(const MoEConfig& config, MakeExpert make_expert);
  ~MoE() override;

  Router router;
  Experts experts;  ///< not a child, and without memory, if the experts are modules
  std::unique_ptr<ExpertModules> expert_modules;  ///< null: the experts are packed
  std::unique_ptr<SwiGLU> shared_expert;          ///< null: none

  const MoEConfig& config() const noexcept { return config_; }
  /// The axis that splits the experts; an empty mesh: none.
  const DeviceMesh& expert_axis() const noexcept { return expert_axis_; }
  /// For apply_expert_parallel().
  void set_expert_axis(DeviceMesh axis);
  /// Names the module whose output is x, and the module whose dx is the gradient of y; null: unknown. With an
  /// expert axis these modules then write to Memory::shared, where the ranks of the experts read rows in
  /// place. From other memory a dispatch packs the rows that travel. Call it before apply_expert_parallel().
  /// Both modules must live as long as this one. Blocks and models of the library call it.
  void set_neighbours(Module* makes_x, Module* makes_dy) {
    makes_x_ = makes_x;
    makes_dy_ = makes_dy;
  }
  bool has_exact_rule() const override { return typeid(*this) == typeid(MoE); }
  /// The parameters of the experts, the first dimension of which the expert axis cuts.
  std::vector<Parameter*> expert_parameters() const;

 protected:
  OwnPlan class_plan() const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  MoE(const MoEConfig& config, std::unique_ptr<ExpertModules> modules);
  Module& expert_layer(const Tensor& x);
  TokenRoutes routes(const Tensor& experts, const Tensor& weights, const Tensor& tokens) const;
  Tensors choices_of_ranks(const Tensor& x, const Tensor& experts, const Tensor& weights, Frame& frame) const;
  Tensor sample_blocks(const Tensor& x, const TokenRoutes& routes, Frame& frame) const;
  Tensor load_scales(const Tensor& experts, Frame& frame) const;
  MoEConfig config_;
  DeviceMesh expert_axis_;
  Module *makes_x_ = nullptr, *makes_dy_ = nullptr;
};

struct ExpertParallelOptions {
  /// Whether the numbers of experts of the ranks may differ by one.
  bool uneven = false;
};

/// Divides the experts of every MoE in `model` over `axis`, a mesh of one axis that also splits samples: ep
/// is a data axis for sampler, losses, reducers and norms. Call it after parallelize() and before data
/// parallel and materialise(). Names of parameters, and so checkpoints, do not change. No communication.
/// Throws bad_argument before anything changes if there is no MoE, and, naming the layer, if the experts do
/// not divide over the ranks (without `uneven`), or there are fewer experts than ranks.
void apply_expert_parallel(Module& model, const DeviceMesh& axis, const ExpertParallelOptions& options = {});

/// The reports of all routers of a model, with the paths of their layers.
struct LayerBalance {
  std::string path;
  RouterReport report;
};
std::vector<LayerBalance> expert_balance(Module& model);

/// Calls Router::set_loss_scale() for each router of a model.
void set_router_loss_scale(Module& model, double scale);

/// A hash of the options of all mixtures in the model, which ranks compare; 0: there is none.
std::uint64_t digest_of_mixtures(Module& model);

}  // namespace weft
