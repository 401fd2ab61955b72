// The passes of layers that need more than their own part of a map, and tables of taps cut into parts. Inside domain.
#pragma once

#include <memory>

#include "domain/space.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain {

std::shared_ptr<const Passes> conv_passes(const DeviceMesh& axes);
std::shared_ptr<const Passes> conv_transpose_passes(const DeviceMesh& axes);
std::shared_ptr<const Passes> resampling_passes(const DeviceMesh& axes);
std::shared_ptr<const Passes> max_pool_passes(const DeviceMesh& axes);
std::shared_ptr<const Passes> pixel_shuffle_passes(const DeviceMesh& axes);
std::shared_ptr<const Passes> group_norm_passes(const DeviceMesh& axes);
/// Of a LayerNorm over several dimensions, the last ones of maps.
SpaceRule space_norm_rule(LayerNorm& norm, std::span<const int> dims);
std::shared_ptr<const Passes> window_attention_passes(const DeviceMesh& axes);
std::shared_ptr<const Passes> causal_attention_passes();
std::shared_ptr<const Passes> cross_attention_passes();

/// Taps for the outputs of one dimension that each part has.
class TapsOfParts {
 public:
  /// `outputs`: which part has which outputs of `all`.
  TapsOfParts(kernels::Taps all, const Parts& outputs);
  /// The inputs that each part needs.
  const WindowDim& window() const noexcept { return window_; }
  /// Those of this rank's outputs, with the places of inputs in its window as indices.
  const std::shared_ptr<const kernels::Taps>& own() const noexcept { return own_; }

 private:
  WindowDim window_;
  std::shared_ptr<const kernels::Taps> own_;
};

}  // namespace weft::domain
