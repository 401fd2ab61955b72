#include "weft/tp/conv.hpp"

#include "nn/maps/conv_maps.hpp"
#include "nn/maps/geometry.hpp"
#include "tp/split_product.hpp"
#include "tp/views.hpp"

namespace weft {
namespace {

using views::borrowed;
using views::given;
using views::Input;
using views::Output;

// x: (batch, in, height, width), w: (out, in, 1, 1), b: (out), y: (batch, out, height, width); uses the
// kernels of Conv2d.
class PixelProduct final : public split::Product {
 public:
  constexpr PixelProduct()
      : Product({"(batch, in, height, width)", "(batch, out, height, width)",
                 "(out, in, 1, 1): a 1x1 convolution", "channel", "0, 2 or 3", 4, 1, 4}) {}

  void forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w, const ConstTensorView& b,
               const TensorView& y) const override {
    Frame frame = Frame::inference(compute);
    const Output out(compute, y);
    if (x.count() == 0)  // perhaps a rank without channels
      kernels::fill(frame.kernels(), out.data(), 0.0f, y.count());
    else
      conv::correlate(frame, borrowed(compute, x), borrowed(compute, w), 1, sizes(x.shape), out.tensor());
    if (given(b)) conv::add_bias(frame, borrowed(compute, b), out.tensor());
    out.round();
  }
  void add_bias(Compute& compute, const ConstTensorView& b, const TensorView& y) const override {
    Frame frame = Frame::inference(compute);
    const Output out(compute, y);
    out.read();
    conv::add_bias(frame, borrowed(compute, b), out.tensor());
    out.round();
  }
  void input_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& w,
                      const TensorView& dx) const override {
    Frame frame = Frame::inference(compute);
    const Output out(compute, dx);
    conv::spread(frame, borrowed(compute, dy), borrowed(compute, w), 1, sizes(dx.shape), out.tensor());
    out.round();
  }
  void weight_gradient(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                       const TensorView& dw, bool add) const override {
    Frame frame = Frame::inference(compute);
    const Output out(compute, dw);
    if (add) out.read();
    conv::weight_gradient(frame, borrowed(compute, x), borrowed(compute, dy), 1, sizes(x.shape), x.dtype,
                          out.tensor(), add);
    out.round();
  }
  void bias_gradient(Compute& compute, const ConstTensorView& dy, const TensorView& db,
                     bool add) const override {
    Frame frame = Frame::inference(compute);
    const Output out(compute, db);
    if (add) out.read();
    conv::bias_gradient(frame, Input(compute, dy).tensor(), out.tensor(), add);
    out.round();
  }

 private:
  static kernels::UnfoldShape sizes(const Shape& x) {
    const Extent2d map(x[2], x[3]);
    return maps::unfold_shape(Conv2dConfig{}, x[1], map, map, kernels::Padding::zeros);
  }
};
constexpr PixelProduct kConv2d;

}  // namespace

void column_conv2d_forward(Compute& compute, const ConstTensorView& x, const ConstTensorView& w,
                           const ConstTensorView& b, const TensorView& y) {
  split::Layer{"column_conv2d_forward", kConv2d}.column_forward(compute, x, w, b, y);
}

void column_conv2d_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                           const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                           const ColumnOptions& options) {
  split::Layer{"column_conv2d_forward", kConv2d}.column_forward(compute, axes, x, w, b, y, options);
}

void column_conv2d_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                            const ConstTensorView& x, const ConstTensorView& w,
                            const LinearGradients& gradients, const ColumnOptions& options) {
  split::Layer{"column_conv2d_backward", kConv2d}.column_backward(compute, axes, dy, x, w, gradients,
                                                                  options);
}

void row_conv2d_forward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                        const ConstTensorView& w, const ConstTensorView& b, const TensorView& y,
                        const RowOptions& options) {
  split::Layer{"row_conv2d_forward", kConv2d}.row_forward(compute, axes, x, w, b, y, options);
}

void row_conv2d_backward(Compute& compute, const ConstTensorView& dy, const ConstTensorView& x,
                         const ConstTensorView& w, const LinearGradients& gradients) {
  split::Layer{"row_conv2d_backward", kConv2d}.row_backward(compute, dy, x, w, gradients);
}

void row_conv2d_backward(Compute& compute, const DeviceMesh& axes, const ConstTensorView& dy,
                         const ConstTensorView& x, const ConstTensorView& w, const LinearGradients& gradients,
                         const RowOptions& options) {
  split::Layer{"row_conv2d_backward", kConv2d}.row_backward(compute, axes, dy, x, w, gradients, options);
}

}  // namespace weft
