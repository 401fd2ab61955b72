#include "weft/nn/conv.hpp"

#include <fmt/format.h>

#include "nn/maps/conv_maps.hpp"
#include "nn/maps/geometry.hpp"
#include "nn/maps/taps.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using kernels::Padding;

constexpr int kChannels = 1;  // the dimension of x and y

using maps::shown;

std::string_view name_of(Padding padding) {
  switch (padding) {
    case Padding::zeros: return "zeros";
    case Padding::reflect: return "reflect";
    case Padding::replicate: return "replicate";
    case Padding::circular: return "circular";
  }
  return "unknown";
}

// Returns why the convolution is no product over channels. Empty: it is one.
std::string not_plain(const Conv2dConfig& c) {
  if (!(c.kernel == Extent2d(1))) return "kernel " + shown(c.kernel);
  if (!(c.stride == Extent2d(1))) return "stride " + shown(c.stride);
  if (!(c.padding == Extent2d(0))) return "padding " + shown(c.padding);
  if (!(c.dilation == Extent2d(1))) return "dilation " + shown(c.dilation);
  if (c.groups != 1) return fmt::format("groups {}", c.groups);
  if (c.padding_mode != Padding::zeros) return fmt::format("padding mode {}", name_of(c.padding_mode));
  return "";
}

void check(const Conv2dConfig& c) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "conv2d: " + text);
  };
  const auto at_least = [](const char* what, const Extent2d& e, std::int64_t least) {
    maps::expect_extent("conv2d", what, e, least);
  };
  at_least("in", c.in, 1);
  at_least("out", c.out, 1);
  at_least("kernel", c.kernel, 1);
  at_least("stride", c.stride, 1);
  at_least("padding", c.padding, 0);
  at_least("dilation", c.dilation, 1);
  at_least("groups", c.groups, 1);
  for (const auto& [what, channels] : {std::pair{"in", c.in}, std::pair{"out", c.out}})
    if (channels % c.groups != 0)
      refuse(fmt::format("{} {} does not divide into groups {}", what, channels, c.groups));
}

Shape weight_shape(const Conv2dConfig& c) {
  check(c);
  return {c.out, c.in / c.groups, c.kernel.height, c.kernel.width};
}

// The geometry of the kernel on one map of this size. Throws bad_argument if the output would be empty, or if
// the padding needs more pixels than there are.
kernels::UnfoldShape unfolding(const Module& module, const Conv2dConfig& c, const Tensor& x) {
  const auto out = [&](const char* what, std::int64_t size, std::int64_t kernel, std::int64_t stride,
                       std::int64_t padding, std::int64_t dilation) {
    maps::expect_padding(module, what, size, padding, c.padding_mode);
    return maps::outputs_of(module, what, size, kernel, stride, padding, dilation);
  };
  const Extent2d in{x.size(2), x.size(3)};
  if (not_plain(c).empty()) {  // each pixel alone: if the map is sharded, this rank's part may be empty
    const Shape& whole = layouts::global_shape(x);
    for (const auto& [what, dim] : {std::pair{"height", 2}, {"width", 3}}) out(what, whole[dim], 1, 1, 0, 1);
    return maps::unfold_shape(c, x.size(kChannels), in, in, c.padding_mode);
  }
  return maps::unfold_shape(
      c, x.size(kChannels), in,
      {out("height", in.height, c.kernel.height, c.stride.height, c.padding.height, c.dilation.height),
       out("width", in.width, c.kernel.width, c.stride.width, c.padding.width, c.dilation.width)},
      c.padding_mode);
}

// dbias: (out) = or += the sum of dy over samples and pixels
void accumulate_map_bias(Frame& frame, Parameter& bias, const Tensor& dy) {
  bias.accumulate(layouts::gradient_of(bias.weight().layout(), dy.layout(), kChannels),
                  [&](const Tensor& into, bool add) { conv::bias_gradient(frame, dy, into, add); });
}

// A padding that is not zeros is written around x first; the kernel then treats it as pixels.
bool pads(const Conv2dConfig& c) { return c.padding_mode != Padding::zeros && !(c.padding == Extent2d(0)); }
kernels::ResampleShape padding_of(const Conv2dConfig& c, const Tensor& x) {
  const auto taps = [&](std::int64_t size, std::int64_t padding) {
    return std::make_shared<const kernels::Taps>(taps::padded(size, padding, padding, c.padding_mode));
  };
  return {x.size(0) * x.size(1), x.size(2), x.size(3), taps(x.size(2), c.padding.height),
          taps(x.size(3), c.padding.width)};
}
Tensor padded(Frame& frame, const Conv2dConfig& c, const Tensor& given) {
  if (!pads(c)) return given;
  const Tensor x = widened(frame, given);
  const Tensor wide = frame.compute().make(
      {x.size(0), x.size(1), x.size(2) + 2 * c.padding.height, x.size(3) + 2 * c.padding.width});
  kernels::resample(frame.kernels(), x.data_ptr<float>(), wide.data_ptr<float>(), padding_of(c, x));
  return wide;
}
// The adjoint: each pixel gets the sum of the gradients of all places to which it was copied, row by row, in
// order.
void add_padding(Frame& frame, const Conv2dConfig& c, const Tensor& dwide, const Tensor& dx) {
  const kernels::ResampleShape s = padding_of(c, dx);
  const auto back = [](const kernels::Taps& t, std::int64_t n) {
    return std::make_shared<const kernels::Taps>(taps::transposed(t, n));
  };
  kernels::resample(
      frame.kernels(), dwide.data_ptr<float>(), dx.data_ptr<float>(),
      {s.maps, dwide.size(2), dwide.size(3), back(*s.rows, s.height), back(*s.columns, s.width)});
}
// The geometry of the kernel on padded().
kernels::UnfoldShape of_padded(const Conv2dConfig& c, kernels::UnfoldShape s) {
  if (!pads(c)) return s;
  s.height += 2 * s.padding_height, s.width += 2 * s.padding_width;
  s.padding_height = s.padding_width = 0;
  s.padding = Padding::zeros;
  return s;
}

}  // namespace

Conv2d::Conv2d(const Conv2dConfig& config)
    : WeightedLayer(weight_shape(config), config.bias, config.init), config_(config) {}

ShardRule Conv2d::shard_rule(Split split) const {
  if (const std::string what = not_plain(config_); !what.empty()) {
    ShardRule rule;
    rule.refused = fmt::format(
        "has {}, and only a 1x1 convolution of stride 1, without padding, of dilation 1, in one group, with "
        "padding mode "
        "zeros, is split over channels",
        what);
    return rule;
  }
  ShardRule rule = rule_of_product(split);
  rule.features = kChannels;
  rule.whole_units.push_back(split == Split::column ? Unit{"output channels", config_.out}
                                                    : Unit{"input channels", config_.in});
  return rule;
}

SpaceRule Conv2d::space_rule(const DeviceMesh&, std::span<const int>) const {
  const bool any = typeid(*this) == typeid(Conv2d) && not_plain(config_).empty();
  return {any ? SpaceRule::Kind::any_part : SpaceRule::Kind::unknown};
}

Tensors Conv2d::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  const TensorName what = layouts::named(*this, "x");
  expect_activation(what, x);
  const Tensor& stored = weight->weight();
  const bool plain = not_plain(config_).empty();
  if (x.shape().rank() != 4)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, height, width)",
                                                     what.text(), to_string(x.shape()), config_.in));
  if (!plain) {
    for (const int dim : {1, 2, 3}) layouts::expect_whole_dim(what, x, "a convolution that is not 1x1", dim);
    if (stored.layout())
      layouts::expect_same(TensorName::of("", weight->path()), stored.layout(),
                           replicated_layout(stored.layout()->mesh(), stored.layout()->global),
                           "a convolution that is not 1x1");
  }
  const LayoutRef layout = layouts::linear_output(what, x.layout(), stored.layout(), kChannels);
  const std::int64_t in = stored.size(1) * config_.groups, out = stored.size(0);
  if (x.size(kChannels) != in)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected {} channels (of weight {})", what.text(),
                            to_string(x.shape()), in, to_string(stored.shape())));
  const kernels::UnfoldShape seen = unfolding(*this, config_, x);
  Shape global = layouts::global_shape(x);
  global[kChannels] = config_.out, global[2] = plain ? global[2] : seen.out_height,
  global[3] = plain ? global[3] : seen.out_width;
  const Tensor y = frame.compute()
                       .make({x.size(0), out, seen.out_height, seen.out_width}, DType::f32, out_memory())
                       .with_layout(plain ? layout : layouts::with_global(layout, global));
  const bool add_bias_here = bias && !row_parallel(*weight);
  if (add_bias_here) expect_bias_fits(*this, y, *bias, kChannels);
  Tensors kept{x};
  const Tensor w = weight_to_use(frame, kept);
  if (plain) kept[0] = as_operand(frame, x, w).with_layout(x.layout());
  conv::correlate(frame, padded(frame, config_, kept[0]), w, config_.groups, of_padded(config_, seen), y,
                  weight.get());
  if (add_bias_here) conv::add_bias(frame, bias->weight(), y);
  frame.push(*this, std::move(kept));
  return {cast(frame, y, x.dtype())};
}

void Conv2d::finish_forward(Tensors& y, Frame& frame) {
  if (!bias || !row_parallel(*weight)) return;
  expect_bias_fits(*this, y[0], *bias, kChannels);
  const Tensor wide = cast(frame, y[0], DType::f32);
  conv::add_bias(frame, bias->weight(), wide);
  y[0] = cast(frame, wide, as_activation(y[0]));
}

void Conv2d::begin_backward(Inputs dy, Frame& frame) {
  expect_count(dy, 1, "gradients");
  if (!bias || !row_parallel(*weight)) return;
  const TensorName what = layouts::named(*this, "dy");
  expect_activation(what, dy[0]);
  if (dy[0].shape().rank() != 4 || dy[0].size(kChannels) != bias->weight().count())
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (batch, {}, height, width)", what.text(),
                            to_string(dy[0].shape()), bias->weight().count()));
  accumulate_map_bias(frame, *bias, layouts::beside(*this, "dy", dy[0], *weight));
}

Tensors Conv2d::do_backward(Inputs gradients, Frame& frame) {
  const Tensors kept = frame.pop(*this);
  const Tensor& x = kept[0];
  const Tensor w = weight_used(frame, kept);
  const bool plain = not_plain(config_).empty();
  const kernels::UnfoldShape seen = unfolding(*this, config_, x);
  const std::int64_t in = w.size(1) * config_.groups, out = w.size(0), batch = x.size(0);
  LayoutRef y_layout = layouts::linear_output(layouts::named(*this, "x"), x.layout(), w.layout(), kChannels);
  if (!plain && y_layout) {
    Shape global = y_layout->global;
    global[2] = seen.out_height, global[3] = seen.out_width;
    y_layout = y_layout->with_global(global);
  }
  const Tensor& dy = gradients[0];
  expect_gradient(*this, dy, {batch, out, seen.out_height, seen.out_width},
                  layouts::gradient_of_output(y_layout), as_activation(dy));
  if (bias && !row_parallel(*weight)) accumulate_map_bias(frame, *bias, dy);

  const Tensor dx = frame.compute()
                        .make(x.shape(), DType::f32, dx_memory())
                        .with_layout(layouts::linear_input_gradient(x.layout(), w.layout()));
  if (dy.count() == 0 || x.count() == 0)
    kernels::fill(frame.kernels(), dx.data_ptr<float>(), 0.0f, dx.count());
  const kernels::UnfoldShape of_wide = of_padded(config_, seen);
  const Tensor operand = as_operand(frame, dy, w);
  const LayoutRef of_dw = layouts::gradient_of(w.layout(), x.layout(), kChannels);
  frame.later([this, kept, operand, of_dw, of_wide, dtype = w.dtype()](Frame& f) {
    accumulate_weight(f, kept, of_dw, [&](const Tensor& dw, bool add) {
      conv::weight_gradient(f, padded(f, config_, kept[0]), operand, config_.groups, of_wide, dtype, dw, add);
    });
  });
  if (dy.count() == 0 || x.count() == 0) return {cast(frame, dx, dy.dtype())};
  const Tensor dwide = pads(config_) ? frame.compute().make({batch, in, of_wide.height, of_wide.width}) : dx;
  conv::spread(frame, operand, w, config_.groups, of_wide, dwide, weight.get());
  if (pads(config_)) add_padding(frame, config_, dwide, dx);
  return {cast(frame, dx, dy.dtype())};
}

}  // namespace weft
