// Normalisation layers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/nn/module.hpp"

namespace weft {

/// y = x / sqrt(mean(x²) + eps) · weight over the last dimension; x, y: (…, dim), weight: (dim).
/// B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
/// x may be split along any dimension but the last; the weight's gradient is then Partial(sum) on that axis.
class RMSNorm : public AnyPart<RMSNorm> {
 public:
  explicit RMSNorm(std::int64_t dim, double eps = 1e-5);

  ParameterRef weight;
  double eps() const noexcept { return eps_; }
  bool has_exact_rule() const override { return typeid(*this) == typeid(RMSNorm); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double eps_;
};

/// y = (x - mean) / sqrt(variance + eps) · weight + bias over the last dimension, or the last dimensions,
/// with the biased variance; x, y: (…, normalised dimensions). weight and bias have the normalised
/// dimensions, so each element has its own gain. J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization",
/// 2016. x may be split along any other dimension. The gradients of weight and bias are then Partial(sum) on
/// that axis. After apply_domain_parallel() (weft/domain/domain.hpp) the layer normalises maps that are cut
/// in space. weight and bias are then sharded like the maps.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(std::int64_t dim, double eps = 1e-5);
  /// Normalises over the last dimensions, which have these sizes: {channels, height, width}, or {height,
  /// width}. If there are several dimensions, mean and variance are computed from sums in f64. Throws
  /// bad_argument if there are no sizes.
  explicit LayerNorm(const Shape& dims, double eps = 1e-5);

  ParameterRef weight, bias;
  double eps() const noexcept { return eps_; }
  SpaceRule space_rule(const DeviceMesh& axes, std::span<const int> dims) const override;
  bool has_exact_rule() const override {
    return typeid(*this) == typeid(LayerNorm) && weight->global_shape().rank() == 1;
  }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double eps_;
};

/// Layer norm of each pixel over its channels. x, y: (batch, channels, height, width), or any shape (batch,
/// channels, …). Gain g and bias b have shape (1, channels, 1, 1); names and shapes are those of the weather
/// models that use this layer (miles-credit). x may be split along any dimension except the channels; the
/// gradients of g and b are then Partial(sum) on that axis.
class ChannelNorm : public AnyPart<ChannelNorm> {
 public:
  explicit ChannelNorm(std::int64_t channels, double eps = 1e-5);

  ParameterRef g, b;
  double eps() const noexcept { return eps_; }
  bool has_exact_rule() const override { return typeid(*this) == typeid(ChannelNorm); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double eps_;
};

/// y = (x - mean) / sqrt(variance + eps) · weight + bias, over each group of channels / groups neighbouring
/// channels of a sample and all their pixels, as torch.nn.GroupNorm; x, y: (batch, channels, …), weight,
/// bias: (channels). Y. Wu, K. He, "Group Normalization", 2018. x may be split in any dimension. If the
/// channels are split (a split by columns), each rank must have whole groups. If pixels are split, forward
/// and backward are collective among the ranks that share a map. They need one all-reduce of two numbers of
/// f64 for each sample and group.
class GroupNorm : public AnyPart<GroupNorm> {
 public:
  /// Throws bad_argument unless groups is at least 1 and divides channels.
  GroupNorm(std::int64_t groups, std::int64_t channels, double eps = 1e-5);

  ParameterRef weight, bias;
  double eps() const noexcept { return eps_; }
  std::int64_t groups() const noexcept { return groups_; }
  ShardRule shard_rule(Split split) const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  std::int64_t groups_;
  double eps_;
};

struct BatchNormConfig {
  double eps = 1e-5;
  double momentum = 0.1;  ///< running = (1 - momentum) running + momentum · the statistic of this pass
  /// The names of the axes over which all ranks share statistics. If it is not set, these are all axes that
  /// split x, so every mesh computes the same as one rank. On other axes that split x each rank has
  /// statistics of its own part, as under torch's data parallel without SyncBatchNorm, and the running
  /// statistics are the mean over these ranks.
  std::optional<std::vector<std::string>> axes{};
};

/// y = (x - mean) / sqrt(variance + eps) · weight + bias for each channel, as torch.nn.BatchNorm2d and
/// SyncBatchNorm; x, y: (batch, channels, …), weight, bias and the buffers running_mean, running_var:
/// (channels). S. Ioffe, C. Szegedy, "Batch Normalization", 2015. In training, mean and (biased) variance are
/// those of the samples and pixels of the pass, on all ranks of the axes. The running statistics are updated
/// with this mean and the unbiased variance. Outside training, mean and variance are the running statistics.
///
/// x may be split along any dimension. A split of the channels is a split by columns, and needs no
/// communication. Otherwise forward (in training) and backward are collective among the ranks of the axes.
/// Each makes one all-reduce of 2 · channels + 1 numbers of f64.
class BatchNorm : public AnyPart<BatchNorm> {
 public:
  /// Throws bad_argument for channels below 1, for an eps that is not above 0, and for a momentum outside of
  /// [0, 1].
  explicit BatchNorm(std::int64_t channels, const BatchNormConfig& config = {});

  ParameterRef weight, bias;
  ModuleBufferRef running_mean, running_var, num_batches_tracked;
  const BatchNormConfig& config() const noexcept { return config_; }
  ShardRule shard_rule(Split split) const override;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  BatchNormConfig config_;
};

}  // namespace weft
