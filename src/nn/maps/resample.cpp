#include "weft/nn/maps/resample.hpp"

#include <fmt/format.h>

#include "nn/maps/geometry.hpp"
#include "nn/maps/taps.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using kernels::Padding;
using kernels::Taps;

void check_pool(const char* layer, const Pool2dConfig& c, bool dilates) {
  const auto refuse = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", layer, text));
  };
  for (const auto& [what, e] :
       {std::pair{"kernel", c.kernel}, {"stride", c.stride}, {"dilation", c.dilation}})
    maps::expect_extent(layer, what, e, 1);
  maps::expect_extent(
      layer, "padding",
      {std::max<std::int64_t>(c.padding.height, 0), std::max<std::int64_t>(c.padding.width, 0)}, 0);
  if (c.padding.height < 0 || c.padding.width < 0 || 2 * c.padding.height > c.kernel.height ||
      2 * c.padding.width > c.kernel.width)
    refuse(fmt::format("padding is {}; expected 0 to half of kernel {}", maps::shown(c.padding),
                       maps::shown(c.kernel)));
  if (!dilates && !(c.dilation == Extent2d(1)))
    refuse(fmt::format("dilation is {}; expected 1", maps::shown(c.dilation)));
}

kernels::ResampleShape resampling(const Shape& x, Taps rows, Taps columns) {
  return {x[0] * x[1], x[2], x[3], std::make_shared<const Taps>(std::move(rows)),
          std::make_shared<const Taps>(std::move(columns))};
}

}  // namespace

Tensors Resampling2d::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  maps::expect_map(*this, x);
  for (const int dim : {2, 3}) layouts::expect_whole_dim(layouts::named(*this, "x"), x, "a resampling", dim);
  Taps of_rows = rows(x.size(2)), of_columns = columns(x.size(3));  // in this order: each may refuse x
  const kernels::ResampleShape s = resampling(x.shape(), std::move(of_rows), std::move(of_columns));
  const Tensor y = maps::make_map(frame, x, x.size(1), s.rows->outputs(), s.columns->outputs(), out_memory());
  kernels::resample(frame.kernels(), widened(frame, x).data_ptr<float>(), y.data_ptr<float>(), s);
  frame.push(*this, {maps::shape_alone(frame, x)});
  return {cast(frame, y, x.dtype())};
}

Tensors Resampling2d::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensor kept = frame.pop(*this)[0];
  const Shape x = maps::shape_kept(kept);
  const Taps rows_of_y = rows(x[2]), columns_of_y = columns(x[3]);
  Shape of_y = x;
  of_y[2] = rows_of_y.outputs(), of_y[3] = columns_of_y.outputs();
  maps::expect_gradient_of(*this, dy, of_y, kept.layout());
  const Tensor dx = frame.compute().make(x, DType::f32, dx_memory()).with_layout(kept.layout());
  kernels::resample(
      frame.kernels(), widened(frame, dy).data_ptr<float>(), dx.data_ptr<float>(),
      resampling(of_y, taps::transposed(rows_of_y, x[2]), taps::transposed(columns_of_y, x[3])));
  return {cast(frame, dx, dy.dtype())};
}

Pad2d::Pad2d(const Pad2dConfig& config) : config_(config) {
  for (const auto& [what, n] : {std::pair{"top", config.top},
                                {"bottom", config.bottom},
                                {"left", config.left},
                                {"right", config.right}})
    maps::expect_extent("pad2d", what, Extent2d(n), 0);
}

namespace {

Taps padded(const Module& module, const char* what, std::int64_t n, std::int64_t before, std::int64_t after,
            Padding padding) {
  maps::expect_padding(module, what, n, std::max(before, after), padding);
  return taps::padded(n, before, after, padding);
}

}  // namespace

Taps Pad2d::rows(std::int64_t height) const {
  return padded(*this, "height", height, config_.top, config_.bottom, config_.rows);
}
Taps Pad2d::columns(std::int64_t width) const {
  return padded(*this, "width", width, config_.left, config_.right, config_.columns);
}

AvgPool2d::AvgPool2d(const Pool2dConfig& config) : config_(config) { check_pool("avg pool", config, false); }

Taps AvgPool2d::rows(std::int64_t height) const {
  maps::outputs_of(*this, "height", height, config_.kernel.height, config_.stride.height,
                   config_.padding.height, 1);
  return taps::averaged(height, config_.kernel.height, config_.stride.height, config_.padding.height,
                        config_.count_padding);
}
Taps AvgPool2d::columns(std::int64_t width) const {
  maps::outputs_of(*this, "width", width, config_.kernel.width, config_.stride.width, config_.padding.width,
                   1);
  return taps::averaged(width, config_.kernel.width, config_.stride.width, config_.padding.width,
                        config_.count_padding);
}

AdaptiveAvgPool2d::AdaptiveAvgPool2d(const Extent2d& out) : out_(out) {
  maps::expect_extent("adaptive avg pool", "out", out, 1);
}

Taps AdaptiveAvgPool2d::rows(std::int64_t height) const {
  maps::expect_some(*this, "height", height);
  return taps::averaged_to(height, out_.height);
}
Taps AdaptiveAvgPool2d::columns(std::int64_t width) const {
  maps::expect_some(*this, "width", width);
  return taps::averaged_to(width, out_.width);
}

Resize2d::Resize2d(const Resize2dConfig& config) : config_(config) {
  const bool by_out = config.out.height > 0 && config.out.width > 0, no_out = config.out == Extent2d(0);
  if ((!by_out && !no_out) || config.scale.height < 1 || config.scale.width < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("resize2d: out is {}, scale is {}; expected an out of at least 1, or out 0 and a "
                            "scale of at least 1",
                            maps::shown(config.out), maps::shown(config.scale)));
  maps::expect_extent("resize2d", "out", config.out, 0);
  maps::expect_extent("resize2d", "scale", config.scale, 1);
}

Taps Resize2d::taps(const char* what, std::int64_t n, std::int64_t out, std::int64_t scale) const {
  maps::expect_some(*this, what, n);
  const std::int64_t to = out > 0 ? out : n * scale;
  if (to > maps::kMostPixels)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} has {} {}, which scale {} makes {}; expected at most {}",
                            layouts::named(*this, "x").text(), what, n, scale, to, maps::kMostPixels));
  return config_.mode == Resizing::nearest ? taps::nearest(n, to)
                                           : taps::linear(n, to, config_.align_corners);
}
Taps Resize2d::rows(std::int64_t height) const {
  return taps("height", height, config_.out.height, config_.scale.height);
}
Taps Resize2d::columns(std::int64_t width) const {
  return taps("width", width, config_.out.width, config_.scale.width);
}

MaxPool2d::MaxPool2d(const Pool2dConfig& config) : config_(config) { check_pool("max pool", config, true); }

namespace {

kernels::UnfoldShape pooled(const Module& module, const Pool2dConfig& c, const Shape& x) {
  const Extent2d of_y{maps::outputs_of(module, "height", x[2], c.kernel.height, c.stride.height,
                                       c.padding.height, c.dilation.height),
                      maps::outputs_of(module, "width", x[3], c.kernel.width, c.stride.width, c.padding.width,
                                       c.dilation.width)};
  return maps::unfold_shape(c, x[0] * x[1], {x[2], x[3]}, of_y, Padding::zeros);
}

}  // namespace

Tensors MaxPool2d::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  maps::expect_map(*this, x);
  for (const int dim : {2, 3}) layouts::expect_whole_dim(layouts::named(*this, "x"), x, "a pooling", dim);
  const kernels::UnfoldShape s = pooled(*this, config_, x.shape());
  const Tensor y = maps::make_map(frame, x, x.size(1), s.out_height, s.out_width, out_memory());
  const Tensor place = frame.compute().make(y.shape(), DType::i32);
  kernels::max_pool_forward(frame.kernels(), widened(frame, x).data_ptr<float>(), y.data_ptr<float>(),
                            place.data_ptr<std::int32_t>(), s);
  frame.push(*this, {maps::shape_alone(frame, x), place});
  return {cast(frame, y, x.dtype())};
}

Tensors MaxPool2d::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  const Shape x = maps::shape_kept(kept[0]);
  maps::expect_gradient_of(*this, gradients[0], kept[1].shape(), kept[0].layout());
  const Tensor dx = frame.compute().make(x, DType::f32, dx_memory()).with_layout(kept[0].layout());
  kernels::max_pool_backward(frame.kernels(), widened(frame, gradients[0]).data_ptr<float>(),
                             kept[1].data_ptr<std::int32_t>(), dx.data_ptr<float>(),
                             pooled(*this, config_, x));
  return {cast(frame, dx, gradients[0].dtype())};
}

}  // namespace weft
