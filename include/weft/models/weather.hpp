// The transformer stage of weather models (miles-credit's WXFormer): attention in windows of neighbours and
// in strided windows alternates.
#pragma once

#include <cstdint>
#include <memory>

#include "weft/nn/feed_forward.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft {

struct WeatherStageConfig {
  std::int64_t dim = 0, depth = 0;
  std::int64_t head_dim = 32;  ///< dim / head_dim heads, rounded down
  std::int64_t local_window = 0, global_window = 0;
  std::int64_t mult = 4;  ///< hidden features of the feed-forward blocks: mult · dim
  double dropout = 0;     ///< in the feed-forward blocks
  double init_std = 0.02;
  double attention_dropout = 0;  ///< dropout of the weights of attention

  std::int64_t heads() const noexcept { return head_dim > 0 ? dim / head_dim : 0; }
  /// Throws bad_argument, naming the option, if an option is wrong.
  void check() const;
};

/// Repeats `depth` times: x += attention among neighbours, x += feed-forward, x += attention over strided
/// windows, x += feed-forward; x, y: (batch, dim, height, width). Paths: `layers.<i>.<0 to 3>`, then the
/// paths of WindowAttention and ChannelFeedForward. The own plans of these modules split the stage:
/// parallelize(stage, mesh["tp"]).
class WeatherStage : public Module {
 public:
  /// One of the `depth` blocks.
  class Block : public Module {
   public:
    explicit Block(const WeatherStageConfig& config);
    WindowAttention near;
    ChannelFeedForward near_feed_forward;
    WindowAttention far;
    ChannelFeedForward far_feed_forward;
    bool has_exact_rule() const override { return typeid(*this) == typeid(Block); }
    SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
      return {SpaceRule::Kind::any_part};  // residual sums
    }

   private:
    Tensors do_forward(Inputs x, Frame& frame) override;
    Tensors do_backward(Inputs dy, Frame& frame) override;
  };

  explicit WeatherStage(const WeatherStageConfig& config);

  Sequential layers;  ///< of Blocks
  bool has_exact_rule() const override { return typeid(*this) == typeid(WeatherStage); }
  const WeatherStageConfig& config() const noexcept { return config_; }
  SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
    return {SpaceRule::Kind::any_part};
  }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override { return layers.forward(x, frame); }
  Tensors do_backward(Inputs dy, Frame& frame) override { return layers.backward(dy, frame); }
  WeatherStageConfig config_;
};

}  // namespace weft
