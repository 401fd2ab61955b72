// The feed-forward block of weather models: a network over the channels of each pixel.
#pragma once

#include "weft/nn/activation.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/norm.hpp"

namespace weft {

/// y = down(dropout(gelu(up(norm(x))))) for the channels of each pixel; x, y: (batch, dim, height, width).
/// The module does not add the residual. Its parts are children of `layers`, numbered as in miles-credit's
/// WXFormer: 0 norm, 1 up, 2 GELU, 3 dropout, 4 down. Over an axis that splits the hidden features, layers.1
/// is a column layer and layers.4 is a row layer, by the module's own plan. x may be split in the batch, in
/// height and in width.
class ChannelFeedForward : public AnyPart<ChannelFeedForward> {
 public:
  /// The module whose children are these parts.
  class Layers : public AnyPart<Layers> {
   public:
    Layers(std::int64_t dim, std::int64_t hidden, double dropout, Init init, Init down_init);
    ChannelNorm norm;
    Linear up;
    GELU gelu;
    Dropout dropout;
    Linear down;
    bool has_exact_rule() const override { return typeid(*this) == typeid(Layers); }

   private:
    Tensors do_forward(Inputs x, Frame& frame) override;
    Tensors do_backward(Inputs dy, Frame& frame) override;
  };

  ChannelFeedForward(std::int64_t dim, std::int64_t hidden, double dropout = 0, Init init = Normal{0.02},
                     Init down_init = Normal{0.02});

  Layers layers;
  bool has_exact_rule() const override { return typeid(*this) == typeid(ChannelFeedForward); }

 protected:
  OwnPlan class_plan() const override { return {.columns = {"layers.1"}, .rows = {"layers.4"}}; }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override { return layers.forward(x, frame); }
  Tensors do_backward(Inputs dy, Frame& frame) override { return layers.backward(dy, frame); }
};

}  // namespace weft
