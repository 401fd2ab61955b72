// The rules of layers that need more than their own part of a map, and tables of taps divided into parts.
// Inside domain.
#pragma once

#include <memory>
#include <typeinfo>
#include <utility>

#include "domain/space.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft::domain {

/// Each of these functions knows the layers of its file. For these it gives the rule, and the passes of a
/// layer that needs more than its own part. It gives `unknown` for any other layer. A class that derives from
/// one of these layers may do something else, and counts as another layer.
using RuleOfFile = SpaceRule(const Module& module, const DeviceMesh& axes);
RuleOfFile conv_rule, conv_transpose_rule, resampling_rule, window_attention_rule, sequence_rule;

/// The passes of a layer that declares what its outputs see.
std::shared_ptr<const Passes> window_passes(const DeviceMesh& axes, const SpaceRule::Reach& height,
                                            const SpaceRule::Reach& width);

/// Returns by_passes if the module is of this kind, otherwise unknown.
template <class Layer, class OfKind, class... Args>
SpaceRule rule_by(const Module& module, const Args&... args) {
  if (typeid(module) != typeid(Layer)) return {};
  return {SpaceRule::Kind::by_passes, std::make_shared<const OfKind>(args...), {}, {}};
}
/// The first rule that is not unknown.
inline SpaceRule either(SpaceRule one, SpaceRule other) {
  return one.kind != SpaceRule::Kind::unknown ? std::move(one) : std::move(other);
}

/// Taps for each part's outputs of one dimension.
class TapsOfParts {
 public:
  /// `outputs`: which part has which outputs of `all`.
  TapsOfParts(kernels::Taps all, const Parts& outputs);
  /// The inputs that each part needs.
  const WindowDim& window() const noexcept { return window_; }
  /// The taps of this rank's outputs, with the places of inputs in its window as indices.
  const std::shared_ptr<const kernels::Taps>& own() const noexcept { return own_; }

 private:
  WindowDim window_;
  std::shared_ptr<const kernels::Taps> own_;
};

}  // namespace weft::domain
