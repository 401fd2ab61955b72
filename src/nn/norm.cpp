#include "weft/nn/norm.hpp"

#include <fmt/format.h>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

RMSNorm::RMSNorm(std::int64_t dim, double eps) : eps_(eps) {
  weight = add("weight", std::make_shared<Parameter>(Shape{dim}, Constant{1.0}));
}

Tensors RMSNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  expect_dtype(layouts::named(*this, "x"), x, DType::f32);
  layouts::expect_whole(layouts::named(*this, "x"), x, "a norm");
  const Tensor w = widened(frame, weight->weight());
  const std::int64_t dim = w.count();
  if (x.shape().rank() == 0 || x.shape().back() != dim)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected a last dimension of {} (the weight's)",
                            layouts::named(*this, "x").text(), to_string(x.shape()), dim));
  const std::int64_t rows = dim == 0 ? 0 : x.count() / dim;
  const Tensor y = frame.compute().make(x.shape(), DType::f32, out_memory()).with_layout(x.layout());
  const Tensor inv_rms = frame.compute().make({rows});
  kernels::rms_norm_forward(frame.kernels(), x.data_ptr<float>(), w.data_ptr<float>(), y.data_ptr<float>(),
                            inv_rms.data_ptr<float>(), rows, dim, static_cast<float>(eps_));
  frame.push(*this, {x, inv_rms});
  return {y};
}

Tensors RMSNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &inv_rms = kept[1];
  const Tensor w = widened(frame, weight->weight());
  expect_gradient(*this, dy, x.shape(), x.layout());
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, dx_memory()).with_layout(x.layout());
  const auto run = [&](const Tensor& dw, bool add) {
    if (!add) kernels::fill(frame.kernels(), dw.data_ptr<float>(), 0.0f, dw.count());
    kernels::rms_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                               w.data_ptr<float>(), inv_rms.data_ptr<float>(), dx.data_ptr<float>(),
                               dw.data_ptr<float>(), inv_rms.count(), w.count());
  };
  if (weight->trainable())
    weight->accumulate(layouts::gradient_of(w.layout(), x.layout(), -1), run);
  else
    run(frame.compute().make(w.shape()), false);  // dx is made in the same kernel
  return {dx};
}

}  // namespace weft
