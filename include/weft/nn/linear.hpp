// A matrix product with a weight, and a bias.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// y = x wᵀ + b; x: (…, in), y: (…, out), weight: (out, in), bias: (out).
///
/// Column and row parallel are layouts of the weight, per mesh axis:
///   weight Replicate: x Replicate or Shard(not the last) → y the same
///   weight Shard(0):  x Replicate → y Shard(last), dx Partial(sum); segments of the rows are those of y
///   weight Shard(1):  x Shard(last) → y Partial(sum), which the boundary after the layer reduces
/// The bias is added after that boundary, once on every rank, and its gradient is taken from dy on the same
/// side of it.
class Linear : public Module {
 public:
  Linear(std::int64_t in, std::int64_t out, bool with_bias = false, Init init = Normal{0.02});

  ParameterRef weight, bias;  ///< bias: null where there is none

  ShardRule shard_rule(Split split) const override;
  /// Uses another module's (out, in) weight from now on; see Parameter about tied weights.
  void tie_weight(ParameterRef other);

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  void finish_forward(Tensors& y, Frame& frame) override;
  void begin_backward(Inputs dy, Frame& frame) override;
};

}  // namespace weft
