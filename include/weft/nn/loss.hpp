// Losses. Each is a sum over this rank's valid tokens divided by the global number of them, which is an
// input: so every gradient is a Partial(sum) over every axis that splits data, one rule.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// Cross-entropy of a softmax over the last dimension.
/// Inputs: logits (…, classes) f32; labels (…) i64, `kIgnore` marks a token that does not count; valid: i64,
/// one element, the number of valid tokens of all ranks (see count_valid). Gives loss: f64 (1), laid out
/// Partial(sum) on axes that split the tokens. backward takes d(loss): f64 (1), or an empty list for 1, and
/// gives dlogits.
class CrossEntropy : public Module {
 public:
  static constexpr std::int64_t kIgnore = -100;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

/// The number of labels that are not kIgnore, on this rank alone.
std::int64_t count_valid(const Tensor& labels);
/// An i64 tensor of one element.
Tensor scalar(Context& context, std::int64_t value);

}  // namespace weft
