// Normalisation layers.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// y = x / sqrt(mean(x²) + eps) · weight over the last dimension; x, y: (…, dim), weight: (dim).
/// B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
/// x may be split along any dimension but the last; the weight's gradient is then Partial(sum) on that axis.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5);

  ParameterRef weight;
  double eps() const noexcept { return eps_; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double eps_;
};

/// y = (x - mean) / sqrt(variance + eps) · weight + bias over the last dimension, with the biased variance; x, y: (…, dim),
/// weight, bias: (dim). J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", 2016.
/// x may be split along any dimension but the last; the gradients of weight and bias are then Partial(sum) on that axis.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(std::int64_t dim, double eps = 1e-5);

  ParameterRef weight, bias;
  double eps() const noexcept { return eps_; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double eps_;
};

/// Layer norm of each pixel over its channels; x, y: (batch, channels, height, width), or any shape (batch, channels, …).
/// Gain g and bias b are (1, channels, 1, 1): names and shapes are those of the weather models that have it (miles-credit).
/// x may be split along any dimension but the channels; the gradients of g and b are then Partial(sum) on that axis.
class ChannelNorm : public Module {
 public:
  explicit ChannelNorm(std::int64_t channels, double eps = 1e-5);

  ParameterRef g, b;
  double eps() const noexcept { return eps_; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double eps_;
};

}  // namespace weft
