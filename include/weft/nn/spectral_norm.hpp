// Spectral norm: a layer computes with its weight divided by the weight's largest singular value.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "weft/nn/module.hpp"

namespace weft {

struct SpectralNormConfig {
  int power_iterations = 1;  ///< in each forward pass of a training; at least 1
  double eps = 1e-12;        ///< a vector's norm counts as at least this
};

/// weight / sigma, where sigma = uᵀ W v is the weight's largest singular value as power iteration has it: v =
/// Wᵀ u / |Wᵀ u|, u = W v / |W v|, once in each forward pass of a training. W is the weight seen as a matrix
/// (out, everything else). T. Miyato et al., "Spectral Normalization for Generative Adversarial Networks",
/// 2018, as torch.nn.utils.spectral_norm has it: in backward u and v count as constants, so dW = (dŴ - <dŴ,
/// Ŵ> u vᵀ) / sigma, with Ŵ = W / sigma. In other passes than those of a training u and v stay.
///
/// The weight may be cut over axes: the columns' or the rows' product of the power iteration is then summed
/// over them, and so are the norms of u and v, sigma and <dŴ, Ŵ>: forward and backward are collective among
/// them. u and v are cut as the weight is, so that nothing but vectors of one row or one column is
/// communicated, and all is as on one rank.
///
/// A part of a layer (WeightedLayer::add_spectral_norm), used by the rank that owns the model.
class SpectralNorm {
 public:
  /// Throws bad_argument for power_iterations below 1, for an eps that is not above 0, and for a weight that
  /// has a layout or memory already, or is shared by several modules. `layer` is the layer's path, for the
  /// text.
  SpectralNorm(std::string_view layer, ParameterRef weight, const SpectralNormConfig& config);

  /// (out) and (everything else): names `weight_u` and `weight_v` in a layer. Their initial values are
  /// normal, of a norm of about 1; the first pass of a training makes it 1.
  ModuleBufferRef u, v;
  const SpectralNormConfig& config() const noexcept { return config_; }

  /// The tensors that are cut with a layer's weight, column or row.
  std::vector<ShardRule::BufferPart> parts(Split split) const;

  /// The weight that the layer computes with; three tensors that backward needs are appended to `kept`.
  /// Throws bad_argument if sigma is 0 or not finite; layout if u and v are not cut as the weight is.
  Tensor forward(Frame& frame, Tensors& kept) const;
  /// The same weight again, from `kept`, whose last three tensors are those of forward().
  Tensor again(Frame& frame, const Tensors& kept) const;
  /// Adds the gradient of the stored weight. `write(into, false)` writes that of the weight that the layer
  /// computed with, of the layout that Parameter::accumulate would get.
  void accumulate(Frame& frame, const Tensors& kept, const LayoutRef& layout,
                  const std::function<void(const Tensor& into, bool add)>& write) const;

 private:
  ParameterRef weight_;
  SpectralNormConfig config_;
};

/// A layer that multiplies with one weight, whose first dimension is of the outputs and whose second is of
/// the inputs: the common part of its kinds, Linear and Conv2d.
class WeightedLayer : public Module {
 public:
  ParameterRef weight, bias;  ///< bias: null if there is none

  /// Computes with weight / sigma from now on. The weight is seen as a matrix (outputs, everything else). The
  /// stored one is called weight_orig then, and the buffers weight_u and weight_v stand beside it. Comes
  /// before parallelize and materialise. Throws bad_argument as SpectralNorm does, and where it has one
  /// already.
  void add_spectral_norm(const SpectralNormConfig& config = {});
  const SpectralNorm* spectral_norm() const noexcept { return spectral_norm_.get(); }  ///< null: none

 protected:
  WeightedLayer(const Shape& weight_shape, bool with_bias, const Init& init);

  /// Columns cut the outputs of weight, bias and u; rows cut the inputs of weight and v, and leave the bias
  /// whole. `segments` are of the outputs.
  ShardRule rule_of_product(Split split, const std::vector<std::int64_t>& segments = {}) const;
  /// The weight of a forward pass; tensors that backward needs are appended to `kept`.
  Tensor weight_to_use(Frame& frame, Tensors& kept) const;
  /// The same in backward, from the tensors that forward kept.
  Tensor weight_used(Frame& frame, const Tensors& kept) const;
  /// Adds the gradient of the stored weight. `write(into, add)` writes that of the weight_used(), of
  /// `layout`.
  void accumulate_weight(Frame& frame, const Tensors& kept, const LayoutRef& layout,
                         const std::function<void(const Tensor& into, bool add)>& write) const;

 private:
  std::unique_ptr<SpectralNorm> spectral_norm_;
};

/// Gives every Linear and Conv2d of the tree that has none a spectral norm; the number of them. Throws as
/// WeightedLayer::add_spectral_norm() does.
int add_spectral_norm(Module& root, const SpectralNormConfig& config = {});

}  // namespace weft
