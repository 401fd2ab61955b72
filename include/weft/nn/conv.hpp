// Convolution of maps.
#pragma once

#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/spectral_norm.hpp"

namespace weft {

/// A number of rows and a number of columns. A single number gives both.
struct Extent2d {
  std::int64_t height, width;
  constexpr Extent2d(std::int64_t both) : height(both), width(both) {}
  constexpr Extent2d(std::int64_t rows, std::int64_t columns) : height(rows), width(columns) {}
  friend bool operator==(const Extent2d&, const Extent2d&) = default;
};

struct Conv2dConfig {
  std::int64_t in = 0, out = 0;  ///< channels
  Extent2d kernel = 1, stride = 1, padding = 0, dilation = 1;
  std::int64_t groups = 1;
  kernels::Padding padding_mode = kernels::Padding::zeros;
  bool bias = true;
  Init init = Normal{0.02};
};

/// y[o, r, s] = Σ w[o, i, j, k] x[i, r·stride + j·dilation − padding, s·… + k·…] + b[o], as torch.nn.Conv2d;
/// x: (batch, in, height, width), y: (batch, out, …), weight: (out, in / groups, kernel height, kernel
/// width), bias: (out). padding_mode gives the values of pixels beyond the border.
///
/// A plain 1×1 convolution (stride 1, no padding, dilation 1, one group) is a Linear over the channels. A
/// plain 1×1 convolution is split over axes like a Linear, by columns or rows, with the channels (dimension
/// 1) as features. x may also be split in height and width. For any other convolution x may be split only in
/// the batch, and the weight is not split.
class Conv2d : public WeightedLayer {
 public:
  /// Throws bad_argument, naming the option, if a size is below 1, or if groups do not divide in or out.
  explicit Conv2d(const Conv2dConfig& config);

  const Conv2dConfig& config() const noexcept { return config_; }
  ShardRule shard_rule(Split split) const override;
  SpaceRule space_rule(const DeviceMesh& axes, std::span<const int> dims) const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  void finish_forward(Tensors& y, Frame& frame) override;
  void begin_backward(Inputs dy, Frame& frame) override;
  Conv2dConfig config_;
};

}  // namespace weft
