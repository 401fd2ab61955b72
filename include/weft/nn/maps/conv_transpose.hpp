// Layers that make maps larger by learned products: transposed convolution, pixel shuffle.
#pragma once

#include "weft/nn/conv.hpp"

namespace weft {

struct ConvTranspose2dConfig {
  std::int64_t in = 0, out = 0;  ///< channels
  Extent2d kernel = 1, stride = 1, padding = 0, output_padding = 0, dilation = 1;
  std::int64_t groups = 1;
  bool bias = true;
  Init init = Normal{0.02};
};

/// y[o, r·stride + j·dilation − padding, s·… + k·…] += Σ w[i, o, j, k] x[i, r, s], + b[o], as
/// torch.nn.ConvTranspose2d, the adjoint of Conv2d; x: (batch, in, height, width), y: (batch, out, …),
/// weight: (in, out / groups, kernel height, kernel width), bias: (out). y has (height − 1) stride − 2
/// padding + dilation (kernel − 1) + output_padding + 1 rows. x may be split in the batch, and in space by
/// apply_domain_parallel(). The weight is not split.
class ConvTranspose2d : public Module {
 public:
  /// Throws bad_argument, naming the option, if a size is below 1, groups do not divide in or out, or an
  /// output padding is not less than stride or dilation.
  explicit ConvTranspose2d(const ConvTranspose2dConfig& config);

  ParameterRef weight, bias;  ///< bias: null if there is none
  const ConvTranspose2dConfig& config() const noexcept { return config_; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  ConvTranspose2dConfig config_;
};

/// y[c, r·factor + i, s·factor + j] = x[c·factor² + i·factor + j, r, s], as torch.nn.PixelShuffle; x: (batch,
/// channels · factor², height, width). x may be split in the batch. It may be split in height and width if y
/// is then split at the corresponding rows and columns. See apply_domain_parallel().
class PixelShuffle : public Module {
 public:
  /// Throws bad_argument for a factor below 1.
  explicit PixelShuffle(std::int64_t factor);
  std::int64_t factor() const noexcept { return factor_; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  std::int64_t factor_;
};

}  // namespace weft
