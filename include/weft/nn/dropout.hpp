// Dropout: elements are set to zero at random while a model is trained.
#pragma once

#include "weft/nn/module.hpp"

namespace weft {

/// In training an element of y is 0 with probability p, and x / (1 - p) otherwise. Outside training y = x. N.
/// Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014. x, y:
/// f32, any shape and layout, the first dimension being samples.
///
/// Seed and step (of Frame::pass()), path, global sample and index within the sample alone decide whether an
/// element is dropped. So the same elements are dropped on every mesh, however a batch is cut into
/// micro-batches. In training, a Frame without a step gives bad_argument, because every step would drop the
/// same elements. If the pass does not state its first sample, all micro-batches of a step must have the same
/// number of samples. Otherwise two micro-batches would drop the same elements, so it throws bad_argument:
/// `"drop": micro-batch 1 of step 3 has 2 samples, micro-batch 0 had 4; expected as many, or
/// Pass::first_sample`.
class Dropout : public AnyPart<Dropout> {
 public:
  /// Throws bad_argument unless 0 <= p < 1, and p rounded to f32 is below 1.
  explicit Dropout(double p);
  double p() const noexcept { return p_; }

  bool has_exact_rule() const override { return typeid(*this) == typeid(Dropout); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Tensor apply(const Tensor& x, Frame& frame, Memory memory) const;
  void expect_equal_micro_batches(const Tensor& x, const Pass& pass);
  double p_;
  Pass last_{};  // the number of the last micro-batch that trained
  // the samples of that micro-batch over all ranks; below 0: no micro-batch has trained, or it stated its
  // first sample
  std::int64_t last_samples_ = -1;
};

}  // namespace weft
