#include "weft/nn/maps/conv_transpose.hpp"

#include <fmt/format.h>

#include "nn/maps/conv_maps.hpp"
#include "nn/maps/geometry.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

void check(const ConvTranspose2dConfig& c) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "conv transpose2d: " + text);
  };
  for (const auto& [what, e, least] : {std::tuple{"in", Extent2d(c.in), 1},
                                       {"out", Extent2d(c.out), 1},
                                       {"kernel", c.kernel, 1},
                                       {"stride", c.stride, 1},
                                       {"padding", c.padding, 0},
                                       {"output_padding", c.output_padding, 0},
                                       {"dilation", c.dilation, 1},
                                       {"groups", Extent2d(c.groups), 1}})
    maps::expect_extent("conv transpose2d", what, e, least);
  for (const auto& [what, channels] : {std::pair{"in", c.in}, std::pair{"out", c.out}})
    if (channels % c.groups != 0)
      refuse(fmt::format("{} {} does not divide into groups {}", what, channels, c.groups));
  if (c.output_padding.height >= std::max(c.stride.height, c.dilation.height) ||
      c.output_padding.width >= std::max(c.stride.width, c.dilation.width))
    refuse(fmt::format("output_padding is {}; expected less than stride {} or dilation {}",
                       maps::shown(c.output_padding), maps::shown(c.stride), maps::shown(c.dilation)));
}

// The geometry of the kernel on y, the larger map, as a convolution of it.
kernels::UnfoldShape seen(const Module& module, const ConvTranspose2dConfig& c, const Shape& x) {
  const Extent2d of_y{
      maps::transposed_outputs_of(module, "height", x[2], c.kernel.height, c.stride.height, c.padding.height,
                                  c.dilation.height, c.output_padding.height),
      maps::transposed_outputs_of(module, "width", x[3], c.kernel.width, c.stride.width, c.padding.width,
                                  c.dilation.width, c.output_padding.width)};
  return maps::unfold_shape(c, c.out, of_y, {x[2], x[3]}, kernels::Padding::zeros);
}

}  // namespace

ConvTranspose2d::ConvTranspose2d(const ConvTranspose2dConfig& config) : config_(config) {
  check(config);
  weight = add("weight", std::make_shared<Parameter>(Shape{config.in, config.out / config.groups,
                                                           config.kernel.height, config.kernel.width},
                                                     config.init));
  if (config.bias) bias = add("bias", std::make_shared<Parameter>(Shape{config.out}));
}

Tensors ConvTranspose2d::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  const TensorName what = layouts::named(*this, "x");
  maps::expect_map(*this, x);
  if (x.size(1) != config_.in)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, height, width)",
                                                     what.text(), to_string(x.shape()), config_.in));
  for (const int dim : {1, 2, 3}) layouts::expect_whole_dim(what, x, "a transposed convolution", dim);
  const kernels::UnfoldShape s = seen(*this, config_, x.shape());
  const Tensor y = maps::make_map(frame, x, config_.out, s.height, s.width, out_memory());
  conv::spread(frame, x, weight->weight(), config_.groups, s, y);
  if (bias) conv::add_bias(frame, bias->weight(), y);
  frame.push(*this, {x});
  return {cast(frame, y, x.dtype())};
}

Tensors ConvTranspose2d::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor x = frame.pop(*this)[0];
  const Tensor& dy = gradients[0];
  const kernels::UnfoldShape s = seen(*this, config_, x.shape());
  expect_gradient(*this, dy, {x.size(0), config_.out, s.height, s.width},
                  maps::map_layout(x.layout(), config_.out, s.height, s.width), x.dtype());
  const Tensor& w = weight->weight();
  if (bias)
    bias->accumulate(layouts::gradient_of(bias->weight().layout(), dy.layout(), 1),
                     [&](const Tensor& into, bool add) { conv::bias_gradient(frame, dy, into, add); });
  const LayoutRef of_dw = layouts::gradient_of(w.layout(), x.layout(), 1);
  frame.later([this, dy, x, s, of_dw, dtype = w.dtype()](Frame& f) {
    weight->accumulate(of_dw, [&](const Tensor& into, bool add) {
      conv::weight_gradient(f, dy, x, config_.groups, s, dtype, into, add);
    });
  });
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, dx_memory()).with_layout(x.layout());
  conv::correlate(frame, dy, w, config_.groups, s, dx);
  return {cast(frame, dx, x.dtype())};
}

PixelShuffle::PixelShuffle(std::int64_t factor) : factor_(factor) {
  maps::expect_extent("pixel shuffle", "factor", Extent2d(factor), 1);
}

Tensors PixelShuffle::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  const std::int64_t f = factor_;
  maps::expect_map(*this, x);
  for (const int dim : {1, 2, 3})
    layouts::expect_whole_dim(layouts::named(*this, "x"), x, "a pixel shuffle", dim);
  if (x.size(1) % (f * f) != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected channels in groups of {} = factor {} squared",
                            layouts::named(*this, "x").text(), to_string(x.shape()), f * f, f));
  const std::int64_t b = x.size(0), c = x.size(1) / (f * f), h = x.size(2), w = x.size(3);
  frame.push(*this, {maps::shape_alone(frame, x)});
  return {permuted(frame, x, {b, c, f, f, h, w}, {0, 1, 4, 2, 5, 3}, {b, c, h * f, w * f},
                   maps::map_layout(x.layout(), c, h * f, w * f), out_memory())};
}

Tensors PixelShuffle::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor kept = frame.pop(*this)[0];
  const Shape x = maps::shape_kept(kept);
  const std::int64_t f = factor_, b = x[0], c = x[1] / (f * f), h = x[2], w = x[3];
  expect_gradient(*this, gradients[0], {b, c, h * f, w * f}, maps::map_layout(kept.layout(), c, h * f, w * f),
                  as_activation(gradients[0]));
  return {
      permuted(frame, gradients[0], {b, c, h, f, w, f}, {0, 1, 3, 5, 2, 4}, x, kept.layout(), dx_memory())};
}

}  // namespace weft
