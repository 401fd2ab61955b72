// Feed-forward blocks and their nonlinearities.
#pragma once

#include "weft/nn/kernels.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// y = down_proj(silu(gate_proj(x)) · up_proj(x)), without biases; x, y: (…, dim). N. Shazeer, "GLU Variants
/// Improve Transformer", 2020. Over an axis that splits the hidden features, gate_proj and up_proj are column
/// layers (boundary before this module), and down_proj is a row layer (boundary after it).
class SwiGLU : public AnyPart<SwiGLU> {
 public:
  SwiGLU(std::int64_t dim, std::int64_t hidden, Init init = Normal{0.02}, Init down_init = Normal{0.02});

  Linear gate_proj, up_proj, down_proj;

 protected:
  OwnPlan class_plan() const override {
    return {.styles = {{"", "enter"}, {"gate_proj", "column"}, {"up_proj", "column"}, {"down_proj", "row"}}};
  }

  bool has_exact_rule() const override { return typeid(*this) == typeid(SwiGLU); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

/// y = x Phi(x), where Phi is the distribution function of the standard normal, or an approximation of it
/// with tanh. x, y: any shape, split in any dimension. D. Hendrycks, K. Gimpel, "Gaussian Error Linear
/// Units", 2016.
class GELU : public AnyPart<GELU> {
 public:
  using Form = kernels::GeluForm;
  explicit GELU(Form form = Form::erf) : form_(form) {}
  Form form() const noexcept { return form_; }

  bool has_exact_rule() const override { return typeid(*this) == typeid(GELU); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Form form_;
};

/// y = max(x, 0). x, y: any shape, split in any dimension.
class ReLU : public AnyPart<ReLU> {
 public:
  bool has_exact_rule() const override { return typeid(*this) == typeid(ReLU); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

/// Returns a + b, elementwise. It is for residuals, and for gradients of a tensor that was used twice. The
/// layouts must be equal, because the sum of a Partial and a Replicate would count the Replicate once per
/// rank. If they differ, it throws layout, naming `what`, the axis and both placements. Partial + Partial
/// stays Partial.
Tensor add_tensors(const Tensor& a, const Tensor& b, Compute& compute, const TensorName& what,
                   Memory memory = Memory::local);

}  // namespace weft
