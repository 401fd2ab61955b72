// The linear layer: a product with a weight, plus a bias.
#pragma once

#include "weft/nn/module.hpp"
#include "weft/nn/spectral_norm.hpp"

namespace weft {

/// y = x wᵀ + b; x: (…, in), y: (…, out), weight: (out, in), bias: (out).
///
/// On each mesh axis the placement of the weight decides whether the layer is column parallel or row
/// parallel:
///   weight Replicate: x Replicate or Shard(not the last) → y the same; if x is Replicate, dy may be
///                     Partial(sum), and then dx and the gradients of weight and bias are
///   weight Shard(0):  x Replicate → y Shard(last), dx Partial(sum); segments of the rows are those of y
///   weight Shard(1):  x Shard(last) → y Partial(sum), which the boundary after the layer reduces
/// y has the dtype of x, f32 or bf16, or that of set_output_dtype(). dx has the dtype of x. bf16 needs a
/// weight in bf16. Sums are in f32, and are rounded once.
///
/// Every rank adds the bias once, after that boundary. The bias gradient is computed from dy on the same side
/// of the boundary.
class Linear : public WeightedLayer {
 public:
  Linear(std::int64_t in, std::int64_t out, bool with_bias = false, Init init = Normal{0.02});

  ShardRule shard_rule(Split split) const override;
  SpaceRule space_rule(const DeviceMesh& axes, std::span<const int> dims) const override;
  /// From now on this layer uses another module's (out, in) weight. See Parameter about tied weights.
  void tie_weight(ParameterRef other);
  /// States that the outputs are those of several layers, one after the other, such as [q|k|v] or [gate|up].
  /// A split by columns then gives each rank a part of every segment, and the number of ranks must divide
  /// each size. split_features() separates the segments. Throws bad_argument if the sizes do not add up to
  /// the outputs.
  void set_segments(std::vector<std::int64_t> sizes);
  bool has_exact_rule() const override {
    return typeid(*this) == typeid(Linear) && spectral_norm() == nullptr;
  }
  bool set_output_dtype(DType dtype) override;
  std::optional<DType> output_dtype() const noexcept { return output_; }  ///< nullopt: as x

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  void finish_forward(Tensors& y, Frame& frame) override;
  void begin_backward(Inputs dy, Frame& frame) override;
  std::optional<DType> output_;         // nullopt: as x
  std::vector<std::int64_t> segments_;  // sizes of the segments of the outputs; empty: one segment
};

}  // namespace weft
