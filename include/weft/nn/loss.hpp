// Losses. Each loss is a sum over this rank's valid tokens or elements, divided by their global number, which
// is an input. So every gradient is Partial(sum) over every axis that splits data.
#pragma once

#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// Cross-entropy of a softmax over the last dimension. All tensors are on the device of the Compute. Inputs:
/// logits (…, classes) f32; labels (…) i64, where `kIgnore` marks a token that does not count; valid: one i64
/// element, the number of valid tokens of all ranks. If the logits are cut over ranks, `valid` has a
/// replicated layout (see global_valid). Output: the loss, f64 (1) on the device, Partial(sum) on axes that
/// split the tokens. If labels are wrong, to_host() of the loss throws the error. backward takes d(loss): f64
/// (1), or an empty list that means 1, and gives dlogits.
///
/// Axes may also split the classes. Logits are then Shard in the last dimension, as the output of a head that
/// is split over the vocabulary, and labels are Replicate on these axes. Then ranks send four numbers for
/// each token and never a logit. Forward needs one all-gather along these axes, and backward sends nothing.
/// The loss is the same on all ranks of these axes. Parts may differ in size or be empty. (Shoeybi et al.,
/// Megatron-LM, arXiv:1909.08053, section 3, send three numbers in three all-reduces.)
class CrossEntropy : public Module {
 public:
  static constexpr std::int64_t kIgnore = -100;

  /// A part `label_smoothing` of each token's weight is spread evenly over all classes, and the remaining
  /// part goes to its label (C. Szegedy et al., Rethinking the Inception Architecture, arXiv:1512.00567,
  /// section 7). z_loss (log Z)² is added to each token's term, with Z the sum of e^logit over all classes:
  /// it keeps Z near 1, so that logits do not drift (A. Chowdhery et al., PaLM, arXiv:2204.02311, section 5,
  /// with 1e-4). Split classes give the same result, since ranks exchange the terms of Z in any case. Throws
  /// bad_argument unless 0 <= label_smoothing <= 1 and z_loss is finite and not negative.
  explicit CrossEntropy(double label_smoothing = 0, double z_loss = 0);
  double label_smoothing() const noexcept { return label_smoothing_; }
  double z_loss() const noexcept { return z_loss_; }
  bool has_exact_rule() const override { return typeid(*this) == typeid(CrossEntropy); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  double label_smoothing_, z_loss_;
};

/// The common base of losses with one term for each pair of an element of y and its target. It is for any
/// shape: maps, fields, tokens.
///
/// Inputs: y f32; target, with the shape and layout of y; and count: one i64 element, the number of elements
/// of all ranks. If y is cut over ranks, `count` has a replicated layout (see global_count). Output: the
/// loss, f64 (1), the sum of this rank's terms divided by count. It is Partial(sum) on axes that split y, in
/// any dimension: samples, rows of a map, features. Gradients are then Partial(sum) on axes that split data,
/// like those of CrossEntropy. backward takes d(loss): f64 (1), or an empty list that means 1, and gives dy.
/// A target gets no gradient.
class ElementLoss : public Module {
 protected:
  explicit ElementLoss(kernels::LossTerm term);

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  kernels::LossTerm term_;
};

/// The mean of (y - target)². MapSquaredError (weft/domain/loss.hpp) also has weights for rows of latitude.
class MeanSquaredError : public ElementLoss {
 public:
  MeanSquaredError() : ElementLoss(kernels::LossTerm::squared_error) {}
  bool has_exact_rule() const override { return typeid(*this) == typeid(MeanSquaredError); }
};

/// The mean of -target log p - (1 - target) log(1 - p) with p = 1 / (1 + e^-y): y are logits. Throws
/// bad_argument for a target that is not from 0 to 1.
class BinaryCrossEntropy : public ElementLoss {
 public:
  BinaryCrossEntropy() : ElementLoss(kernels::LossTerm::binary_cross_entropy) {}
  bool has_exact_rule() const override { return typeid(*this) == typeid(BinaryCrossEntropy); }
};

/// The number of elements of the global tensor y, from its layout: i64 (1) on the device of `compute`,
/// replicated over y's mesh. No communication. If y has no layout, the result is the number of its elements.
Tensor global_count(Compute& compute, const Tensor& y);

/// The number of labels that are not kIgnore, on this rank only. For labels on the host.
std::int64_t count_valid(const Tensor& labels);
/// The number of valid labels over all ranks: i64 (1), replicated over the labels' mesh. Costs one small
/// all-reduce over the axes that split the labels. Plain labels give a plain number.
Tensor global_valid(Context& context, const Tensor& labels);
/// Like the function above, on the device of `compute`, which must hold the labels. The host does not wait
/// for the count.
Tensor global_valid(Compute& compute, const Tensor& labels);
/// Makes an i64 tensor of one element, on the host. With a mesh, it is replicated on all ranks of the mesh.
/// to_device() copies it to a device.
Tensor scalar(Context& context, std::int64_t value);
Tensor scalar(const DeviceMesh& mesh, std::int64_t value);

}  // namespace weft
