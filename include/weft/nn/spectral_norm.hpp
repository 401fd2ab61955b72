// Spectral norm: a layer computes with its weight divided by the weight's largest singular value.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "weft/nn/module.hpp"

namespace weft {

struct SpectralNormConfig {
  int power_iterations = 1;  ///< the number of iterations in each forward pass in training; at least 1
  double eps = 1e-12;        ///< norms of vectors below this value count as this value
};

/// Computes weight / sigma, where sigma = uᵀ W v is the weight's largest singular value. It is estimated by
/// power iteration in each forward pass in training: v = Wᵀ u / |Wᵀ u|, u = W v / |W v|. W is the weight as a
/// matrix (out, all other dimensions). T. Miyato et al., "Spectral Normalization for Generative Adversarial
/// Networks", 2018, as in torch.nn.utils.spectral_norm: in backward u and v count as constants, so dW = (dŴ -
/// <dŴ, Ŵ> u vᵀ) / sigma, with Ŵ = W / sigma. Outside training u and v do not change.
///
/// The weight may be cut over axes. Then one of the two products of the power iteration is summed over these
/// axes. The norms of u and v, sigma and <dŴ, Ŵ> are summed, too. Forward and backward are collective among
/// the ranks of these axes. u and v are sharded like the weight, so ranks send only vectors of the size of a
/// row or a column. The results are the same as on one rank.
///
/// WeightedLayer::add_spectral_norm makes a SpectralNorm as a part of a layer. The rank that owns the model
/// uses it.
class SpectralNorm {
 public:
  /// Throws bad_argument for power_iterations below 1, if eps is not above 0, and if the weight already has a
  /// layout or memory, or is shared by several modules. `layer` is the layer's path, for the text.
  SpectralNorm(std::string_view layer, ParameterRef weight, const SpectralNormConfig& config);

  /// Vectors of sizes (out) and (all other dimensions), called `weight_u` and `weight_v` in a layer. Their
  /// initial values are normal, with a norm of about 1. The first training pass makes the norm 1.
  ModuleBufferRef u, v;
  const SpectralNormConfig& config() const noexcept { return config_; }

  /// The tensors that are cut together with a layer's weight, by columns or by rows.
  std::vector<ShardRule::BufferPart> parts(Split split) const;

  /// Returns the weight with which the layer computes. Appends three tensors that backward needs to `kept`.
  /// Throws bad_argument if sigma is 0 or not finite, and layout if u and v are not sharded like the weight.
  Tensor forward(Frame& frame, Tensors& kept) const;
  /// Returns the weight of forward() again. The last three tensors of `kept` must be those that forward()
  /// appended.
  Tensor again(Frame& frame, const Tensors& kept) const;
  /// Adds to the gradient of the stored weight. `write(into, false)` must write the gradient of the weight
  /// with which the layer computed, in layout `layout`.
  void accumulate(Frame& frame, const Tensors& kept, const LayoutRef& layout,
                  const std::function<void(const Tensor& into, bool add)>& write) const;

 private:
  ParameterRef weight_;
  SpectralNormConfig config_;
};

/// The common base of Linear and Conv2d: a layer that multiplies with one weight. The first dimension of the
/// weight belongs to the outputs, the second to the inputs.
class WeightedLayer : public Module {
 public:
  ParameterRef weight, bias;  ///< bias: null if there is none

  /// Computes with weight / sigma from now on. The weight is then a matrix (outputs, all other dimensions).
  /// The stored weight is then called weight_orig, and the layer gets the buffers weight_u and weight_v. Call
  /// it before parallelize and materialise. Throws the errors of SpectralNorm, and bad_argument if the layer
  /// already has a spectral norm.
  void add_spectral_norm(const SpectralNormConfig& config = {});
  const SpectralNorm* spectral_norm() const noexcept { return spectral_norm_.get(); }  ///< null: none

 protected:
  WeightedLayer(const Shape& weight_shape, bool with_bias, const Init& init);

  /// The rule of such a layer. A split by columns cuts the outputs of weight, bias and u. A split by rows
  /// cuts the inputs of weight and v, and leaves the bias whole. `segments` are segments of the outputs.
  ShardRule rule_of_product(Split split, const std::vector<std::int64_t>& segments = {}) const;
  /// The weight of a forward pass. Appends tensors that backward needs to `kept`.
  Tensor weight_to_use(Frame& frame, Tensors& kept) const;
  /// The weight in backward, from the tensors that forward kept.
  Tensor weight_used(Frame& frame, const Tensors& kept) const;
  /// Adds to the gradient of the stored weight. `write(into, add)` must write the gradient of weight_used(),
  /// which has layout `layout`, or add it to `into` if `add` is true.
  void accumulate_weight(Frame& frame, const Tensors& kept, const LayoutRef& layout,
                         const std::function<void(const Tensor& into, bool add)>& write) const;

 private:
  std::unique_ptr<SpectralNorm> spectral_norm_;
};

/// Adds a spectral norm to every Linear and Conv2d of the tree that has none. Returns their number. Throws
/// the errors of WeightedLayer::add_spectral_norm().
int add_spectral_norm(Module& root, const SpectralNormConfig& config = {});

}  // namespace weft
