#include "weft/nn/norm.hpp"

#include <fmt/format.h>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// Gradients of a norm's gain and bias, which its kernel adds to beside making dx: run(dgain, dbias). What is not trained, or
// not there (null), gets memory that is forgotten.
template <class Run>
void accumulate_both(Frame& frame, Parameter& gain, Parameter& bias, const LayoutRef& x, Run&& run) {
  const auto each = [&](Parameter& p, const auto& use) {
    const LayoutRef layout = layouts::gradient_of(p.weight().layout(), x, -1);
    const auto cleared = [&](const Tensor& into, bool add) {
      if (!add) kernels::fill(frame.kernels(), into.data_ptr<float>(), 0.0f, into.count());
      use(into);
    };
    if (p.trainable())
      p.accumulate(layout, cleared);
    else
      cleared(frame.compute().make(p.weight().shape()), false);
  };
  each(gain, [&](const Tensor& dgain) { each(bias, [&](const Tensor& dbias) { run(dgain, dbias); }); });
}

}  // namespace

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

LayerNorm::LayerNorm(std::int64_t dim, double eps) : eps_(eps) {
  weight = add("weight", std::make_shared<Parameter>(Shape{dim}, Constant{1.0}));
  bias = add("bias", std::make_shared<Parameter>(Shape{dim}));
}

Tensors LayerNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  expect_dtype(layouts::named(*this, "x"), x, DType::f32);
  layouts::expect_whole(layouts::named(*this, "x"), x, "a norm");
  const Tensor w = widened(frame, weight->weight()), b = widened(frame, bias->weight());
  const std::int64_t dim = w.count();
  if (x.shape().rank() == 0 || x.shape().back() != dim)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected a last dimension of {} (the weight's)",
                            layouts::named(*this, "x").text(), to_string(x.shape()), dim));
  const std::int64_t rows = dim == 0 ? 0 : x.count() / dim;
  const Tensor y = frame.compute().make(x.shape(), DType::f32, out_memory()).with_layout(x.layout());
  const Tensor mean = frame.compute().make({rows}), inv_std = frame.compute().make({rows});
  kernels::layer_norm_forward(frame.kernels(), x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(),
                              y.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(), rows,
                              dim, static_cast<float>(eps_));
  frame.push(*this, {x, mean, inv_std});
  return {y};
}

Tensors LayerNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const Tensor w = widened(frame, weight->weight());
  expect_gradient(*this, dy, x.shape(), x.layout());
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, dx_memory()).with_layout(x.layout());
  accumulate_both(frame, *weight, *bias, x.layout(), [&](const Tensor& dw, const Tensor& db) {
    kernels::layer_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                                 w.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(),
                                 dx.data_ptr<float>(), dw.data_ptr<float>(), db.data_ptr<float>(),
                                 mean.count(), w.count());
  });
  return {dx};
}

ChannelNorm::ChannelNorm(std::int64_t channels, double eps) : eps_(eps) {
  g = add("g", std::make_shared<Parameter>(Shape{1, channels, 1, 1}, Constant{1.0}));
  b = add("b", std::make_shared<Parameter>(Shape{1, channels, 1, 1}));
  g->set_decays(false);
  b->set_decays(false);
}

namespace {

// x: (batch, channels, …)
kernels::MapShape map_shape(const Tensor& x) {
  const std::int64_t batch = x.size(0), channels = x.size(1);
  return {batch, channels, batch * channels == 0 ? 0 : x.count() / (batch * channels)};
}

}  // namespace

Tensors ChannelNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *g);
  const TensorName what = layouts::named(*this, "x");
  expect_dtype(what, x, DType::f32);
  layouts::expect_whole_dim(what, x, "a norm", 1);
  const Tensor gain = widened(frame, g->weight()), bias = widened(frame, b->weight());
  if (x.shape().rank() < 2 || x.size(1) != gain.count())
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, …)", what.text(),
                                                     to_string(x.shape()), gain.count()));
  const kernels::MapShape s = map_shape(x);
  const Tensor y = frame.compute().make(x.shape(), DType::f32, out_memory()).with_layout(x.layout());
  const Tensor mean = frame.compute().make({s.batch, s.pixels}),
               inv_std = frame.compute().make({s.batch, s.pixels});
  kernels::channel_norm_forward(frame.kernels(), x.data_ptr<float>(), gain.data_ptr<float>(),
                                bias.data_ptr<float>(), y.data_ptr<float>(), mean.data_ptr<float>(),
                                inv_std.data_ptr<float>(), s, static_cast<float>(eps_));
  frame.push(*this, {x, mean, inv_std});
  return {y};
}

Tensors ChannelNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const Tensor gain = widened(frame, g->weight());
  expect_gradient(*this, dy, x.shape(), x.layout());
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, dx_memory()).with_layout(x.layout());
  accumulate_both(frame, *g, *b, x.layout(), [&](const Tensor& dgain, const Tensor& dbias) {
    kernels::channel_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                                   gain.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(),
                                   dx.data_ptr<float>(), dgain.data_ptr<float>(), dbias.data_ptr<float>(),
                                   map_shape(x));
  });
  return {dx};
}

}  // namespace weft
