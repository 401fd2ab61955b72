// Trains a model with products of eight bits: chooses the layers, converts them, and reports what it did.
// Used by the one rank (thread) that owns the model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/nn/float8_linear.hpp"

namespace weft {

/// The Linear layers of a model that are converted. Patterns are for paths below the root, as in a Plan
/// ("layers.*.mlp"); a pattern that matches a module means all layers inside it, too.
struct Float8Filter {
  /// Empty: every Linear outside of the names of `left_out`.
  std::vector<std::string> only = {};
  std::vector<std::string> except = {};
  /// Layers with fewer elements in their weight stay as they are: for small products the casts cost more than
  /// they save.
  std::int64_t least_elements = 0;
  /// A layer stays as it is if one of these is a name in its path, unless a pattern of `only` matches the
  /// path of the layer itself ("output_head.proj"). Norms and embeddings are never converted.
  std::vector<std::string> left_out = {"output_head", "lm_head",       "head",          "router",
                                       "experts",     "shared_expert", "shared_experts"};
};

struct Float8Options {
  Float8Filter filter = {};
  Float8Scales scales = Float8Scales::own;
  Float8NotFinite not_finite = Float8NotFinite::error;
};

/// A list of the Linear layers of a model, in its order: apply_float8 says of each what it did.
struct Float8Report {
  struct Layer {
    std::string path;
    Shape weight;              ///< (out, in), of the whole layer
    std::string why_not = {};  ///< empty: converted
  };
  Float8Recipe recipe;
  std::vector<Layer> layers;
  std::int64_t converted() const noexcept;
  /// "float8 rowwise: 12 of 15 linear layers" and a line for each layer that was not converted, with the
  /// reason.
  std::string text() const;
};

/// A converted model. Its layers stay converted until it is destroyed. Destroy it before the model, after the
/// FullySharded that was given its linears(), and while no Frame has entries of the model: a backward pass
/// refuses what another recipe has kept, and gathers of codes throw once it is gone.
class Float8Model {
 public:
  ~Float8Model();
  Float8Model(const Float8Model&) = delete;
  Float8Model& operator=(const Float8Model&) = delete;

  const Float8Report& report() const noexcept { return report_; }
  const std::shared_ptr<Float8Linears>& linears() const noexcept { return linears_; }
  /// See Float8Linears::update_scales(). A forward pass of the model calls it first; call it after the
  /// optimizer's step to have its all-reduce there.
  void update_scales() { linears_->update_scales(); }

 private:
  friend std::unique_ptr<Float8Model> convert_linears(Module&, Float8Recipe, const Float8Options&,
                                                      const std::function<bool(const std::string&)>&);
  Float8Model() = default;
  Float8Report report_;
  std::shared_ptr<Float8Linears> linears_;
  std::vector<HookHandle> hooks_;
};

/// Converts Linear layers of `model`; see Float8Linears for what they compute. Call it after parallelize()
/// and before fully_shard(), on all ranks with the same arguments; before or after materialise(). Types,
/// paths, masters, layouts and optimizer states do not change, so checkpoints that were saved with float8
/// load without it, and the reverse holds, too. A weight that is tied to a layer's after the call is gathered
/// as it is, not as codes.
///
/// Sizes of weights that are no multiples of 16 stay unconverted, as the products of GPUs need them.
///
/// If parameters have a layout, it is collective over their root mesh: one all-gather compares what the ranks
/// were given. Throws mismatch, before anything changes, if a recipe or an option differs: `apply_float8: the
/// recipe is rowwise on dp rank 0, but tensorwise on dp rank 1`.
///
/// Throws bad_argument, before anything changes, for a pattern that matches no module, after fully_shard(),
/// and if no layer is left to convert; the text then has the report.
std::unique_ptr<Float8Model> apply_float8(Module& model, Float8Recipe recipe,
                                          const Float8Options& options = {});

}  // namespace weft
