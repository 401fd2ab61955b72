#include "weft/tp/linear.hpp"

#include "nn/operands.hpp"
#include "tp/split_product.hpp"
#include "tp/views.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

using kernels::LinearShape;
using kernels::Stored;
using views::as;
using views::given;
using views::Input;
using views::Output;

// x: (…, in), w: (out, in), b: (out), y: (…, out)
class LinearProduct final : public split::Product {
 public:
  constexpr LinearProduct() : Product({"(…, in)", "(…, out)", "(out, in)", "feature", nullptr, 0, -1, 2}) {}

  void forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w, const ConstTensorView& b,
               const TensorView& y) const override {
    kernels::KernelContext& ctx = kernels_of(compute);
    const Output out(compute, y);
    const Input bias(compute, b);
    const float* const of_b = given(b) ? bias.data() : nullptr;
    const LinearShape s = sizes(x, w);
    if (x.dtype == DType::f32)
      kernels::linear_forward(ctx, as<float>(x), as<float>(w), of_b, out.data(), s);
    else
      kernels::linear_forward(ctx, as<bf16>(x), as<bf16>(w), of_b, out.data(), s);
    out.round();
  }
  void add_bias(Compute& compute, const ConstTensorView& b, const TensorView& y) const override {
    const Output out(compute, y);
    const Input bias(compute, b);
    out.read();
    kernels::add_bias(kernels_of(compute), bias.data(), out.data(), rows(y.shape), y.shape.back());
    out.round();
  }
  void input_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& w,
                      const TensorView& dx) const override {
    const Output out(compute, dx);
    const LinearShape s = sizes(dx, w);
    multiply(kernels_of(compute), dy, Stored::plain, w, Stored::plain, out.data(), s.tokens, s.in, s.out,
             false);
    out.round();
  }
  void weight_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                       const TensorView& dw, bool add) const override {
    const Output out(compute, dw);
    const LinearShape s = sizes(x, dw);
    if (add) out.read();
    multiply(kernels_of(compute), dy, Stored::transposed, x, Stored::plain, out.data(), s.out, s.in, s.tokens,
             add);
    out.round();
  }
  void bias_gradient(Compute& compute, const ConstTensorView& dy, const TensorView& db,
                     bool add) const override {
    kernels::KernelContext& ctx = kernels_of(compute);
    const Output out(compute, db);
    const Input from(compute, dy);
    if (add)
      out.read();
    else
      kernels::fill(ctx, out.data(), 0.0f, db.count());
    kernels::bias_backward(ctx, from.data(), out.data(), rows(dy.shape), db.count());
    out.round();
  }

 private:
  static std::int64_t rows(const Shape& s) {
    std::int64_t n = 1;
    for (int d = 0; d + 1 < s.rank(); ++d) n *= s[d];
    return n;
  }
  static LinearShape sizes(const ConstTensorView& x, const ConstTensorView& w) {
    return {rows(x.shape), w.shape[1], w.shape[0]};
  }
};
constexpr LinearProduct kLinear;

}  // namespace

void column_linear_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y) {
  split::Layer{"column_linear_forward", kLinear}.column_forward(compute, x, w, b, y);
}

void column_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& options) {
  split::Layer{"column_linear_forward", kLinear}.column_forward(compute, axes, x, w, b, y, options);
}

void column_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w,
                            const LinearGradients& gradients, const ColumnOptions& options) {
  split::Layer{"column_linear_backward", kLinear}.column_backward(compute, axes, dy, x, w, gradients,
                                                                  options);
}

void row_linear_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& options) {
  split::Layer{"row_linear_forward", kLinear}.row_forward(compute, axes, x, w, b, y, options);
}

void row_linear_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& gradients) {
  split::Layer{"row_linear_backward", kLinear}.row_backward(compute, dy, x, w, gradients);
}

void row_linear_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                         const RowOptions& options) {
  split::Layer{"row_linear_backward", kLinear}.row_backward(compute, axes, dy, x, w, gradients, options);
}

}  // namespace weft
