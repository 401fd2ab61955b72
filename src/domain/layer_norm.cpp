// Layer norm over maps that are cut in space. Its gain and bias have an element for each pixel, and are cut as the maps are.
#include "domain/rules.hpp"
#include "nn/norms/space_norm.hpp"

namespace weft::domain {
namespace {

class SpaceNormPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    const auto& norm = dynamic_cast<const LayerNorm&>(module);
    if (inputs.size() != 1) return own_forward(module, inputs, frame);
    return {space_norm::forward(norm, inputs[0], frame, Memory::shared, true)};
  }
  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    const auto& norm = dynamic_cast<const LayerNorm&>(module);
    if (gradients.size() != 1) return own_backward(module, gradients, frame);
    return {space_norm::backward(norm, gradients[0], frame, Memory::shared)};
  }
};

}  // namespace

SpaceRule space_norm_rule(LayerNorm& norm, std::span<const int> dims) {
  SpaceRule rule{SpaceRule::Kind::by_passes, std::make_shared<SpaceNormPasses>(), {}, {}};
  const int first = kMapDims - norm.weight->global_shape().rank();
  std::vector<int> of_gain;
  for (const int dim : dims) of_gain.push_back(dim >= first ? dim - first : -1);
  for (Parameter* p : {norm.weight.get(), norm.bias.get()}) rule.pixelwise.push_back({p, of_gain});
  return rule;
}

}  // namespace weft::domain
