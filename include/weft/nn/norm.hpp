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

}  // namespace weft
