// Linear layers whose products take operands of eight bits. apply_float8 (weft/train/float8.hpp) chooses the
// layers of a model. The one rank (thread) that owns the model uses it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/nn/float8.hpp"
#include "weft/nn/linear.hpp"

namespace weft {

/// The formats and scales of a float8 layer's three products, as torchao 0.18 has them
/// (torchao/float8/config.py). Scales are dynamic: each pass computes them from the tensors that it casts.
enum class Float8Recipe : unsigned char {
  /// One scale for a tensor. x and weight are f8e4m3, dy is f8e5m2.
  tensorwise,
  /// One scale for each row of the left operand and each column of the right operand of a product; f8e4m3;
  /// scales are powers of two. x, dy and the weight are cast twice, since their products run along different
  /// dimensions.
  rowwise,
  /// As rowwise, but dw = dyᵀ x is a product of bf16, and in dx = dy w the weight has one scale.
  rowwise_gw_hp
};
/// "tensorwise", "rowwise", "rowwise_gw_hp".
std::string_view name(Float8Recipe recipe) noexcept;
/// The recipe of that name. Throws bad_argument for other names. For "delayed" the text says why weft does
/// not have delayed scaling.
Float8Recipe float8_recipe_from_name(std::string_view name);

/// The elements over which the largest magnitude of an activation or a gradient is taken. A weight's scale is
/// always that of the whole weight.
enum class Float8Scales : unsigned char {
  /// The rank's own part, as in torchao. No communication. Codes depend on how a batch is cut.
  own,
  /// The whole tensor over all ranks that have a part of it: codes do not depend on the mesh. Costs one
  /// all-reduce of the amax for each cast of a tensor that is cut. One number, or one per row or column.
  whole
};

/// The reaction if a weight, an activation or a gradient has an element that is not finite.
enum class Float8NotFinite : unsigned char {
  /// All ranks throw at the end of the pass of the converted model, naming the first such weight, or else the
  /// first such tensor in the order of the pass. The ranks of the whole root mesh check together. All must
  /// run each pass, evaluation too. If some do not, as the stages of a pipeline, choose `propagate`.
  error,
  /// The layer's results are NaNs, so that the gradients are NaNs, too. LossScaler, or clip_grad_norm with
  /// NonFinite::skip, then skips the step on all ranks. Costs no communication.
  propagate
};

struct Float8LinearOptions {
  Float8Recipe recipe = Float8Recipe::rowwise;
  Float8Scales scales = Float8Scales::own;
  Float8NotFinite not_finite = Float8NotFinite::error;
};

/// The float8 layers of one model. They share the scales of their weights, which are computed for all of them
/// at once. A layer keeps the object alive.
///
/// A converted Linear keeps its type, paths, parameters, layouts and boundaries. It computes y = x wᵀ + b
/// with x and w cast to float8. The product is summed in f32 (in bf16's products, which hold each value
/// exactly) and multiplied by the reciprocals of the scales. The bias is added in f32. x may be f32 or bf16:
/// y and dx have its dtype, rounded once. dx and dw are computed in the same way. db is the sum of dy, which
/// is not cast. Boundaries before and after the layer, which communicate, are not float8. On its Frame the
/// layer keeps exactly what dw needs. tensorwise: the codes of x. rowwise: codes of x along the other
/// dimension, made in forward. rowwise_gw_hp: x in bf16.
///
/// Masters stay f32. Checkpoints contain nothing of float8.
class Float8Linears {
 public:
  explicit Float8Linears(const Float8LinearOptions& options);
  Float8Linears(const Float8Linears&) = delete;
  Float8Linears& operator=(const Float8Linears&) = delete;

  const Float8LinearOptions& options() const noexcept { return options_; }

  /// Returns why `layer` cannot be converted. The text is empty if the layer can be converted. A derived
  /// class, a layer with a spectral norm or with other passes, and a weight that several modules share are
  /// refused. Sizes are not refused. apply_float8 leaves out the sizes that the products of GPUs do not take.
  static std::string refusal(const Linear& layer);
  /// From now on the layer computes in float8, until restore(). Throws bad_argument with refusal().
  static void convert(const std::shared_ptr<Float8Linears>& self, Linear& layer);
  /// The layers compute without float8 again.
  void restore() noexcept;
  const std::vector<Linear*>& layers() const noexcept { return layers_; }

  /// Computes the scales of all weights from the masters, if any master changed since the last time. If
  /// weights are cut over ranks, there is one all-reduce of the largest magnitudes of all weights, collective
  /// over the axes that cut any of them. All scales are those of the whole weights. A pass calls it. If the
  /// program calls it after the optimizer's step, the communication is there. A weight that is not finite
  /// gets scales that are not finite, and expect_finite() names it. Throws unsupported on a device.
  void update_scales();

  /// The scales of the weight of layers()[layer], for the whole weight: of its rows (out) for y, of its
  /// columns (in) for dx, and of the whole. A recipe leaves those that it does not use empty. Valid after
  /// update_scales().
  struct WeightScales {
    std::vector<float> rows, columns;
    float tensor = 0;
  };
  const WeightScales& scales(std::size_t layer) const { return scales_.at(layer); }

  /// The number of the layer in layers() that has this weight. Nothing if the layer is not converted.
  std::optional<std::size_t> layer_of(const Parameter& weight) const noexcept;
  /// The two passes of a layer cast its weight along different dimensions, except with the recipe tensorwise.
  enum class WeightUse : unsigned char { forward, backward };
  bool one_set_of_codes() const noexcept { return options_.recipe == Float8Recipe::tensorwise; }
  /// The codes of this rank's part of the weight of layers()[layer] for one of the passes, f8e4m3, with the
  /// layout of that part. A layer computes the same with these codes placed as its weight (gathered, for
  /// example) as with the weight itself. Calls update_scales(). Throws bad_argument after restore().
  Tensor weight_codes(std::size_t layer, WeightUse use);
  /// States for which pass the codes are that are placed as the weight of layers()[layer]. A layer that needs
  /// the codes of the other pass throws unsupported.
  void state_codes(std::size_t layer, WeightUse use) { codes_.at(layer) = use; }

  /// Forgets which elements of earlier passes were not finite. Call it when a pass begins.
  void begin_pass() noexcept { first_not_finite_ = 0; }
  /// With Float8NotFinite::error, throws bad_argument on all ranks of the model's mesh if a weight was not
  /// finite on any rank. It does the same for an activation or a gradient since begin_pass() or the last
  /// call. Collective over that mesh (one number).
  void expect_finite();
  /// Changes the reaction from now on. Returns the previous reaction. All ranks must set the same reaction.
  Float8NotFinite set_not_finite(Float8NotFinite reaction) noexcept {
    return std::exchange(options_.not_finite, reaction);
  }

 private:
  friend class Float8LinearPasses;
  float8::Granularity granularity_of(WeightUse use) const noexcept;
  std::vector<float> scales_of_part(std::size_t layer, WeightUse use, const LayoutRef& layout) const;
  void note_not_finite(const Linear& layer, bool gradient) noexcept;
  Float8LinearOptions options_;
  std::vector<Linear*> layers_;
  std::vector<WeightScales> scales_;  // by layer
  std::vector<WeightUse> codes_;      // by layer: the pass of the placed codes
  std::uint64_t versions_ = 0;        // of the masters whose scales are known
  bool known_ = false;
  std::size_t bad_weight_ = 0;        // 0: all are finite; otherwise the number of a weight
  std::size_t first_not_finite_ = 0;  // 0: none; otherwise the number of an activation or a gradient
};

}  // namespace weft
