#include "weft/nn/norm.hpp"

#include <fmt/format.h>

#include <cmath>

#include <algorithm>

#include "nn/exact/sums.hpp"
#include "nn/norms/channels.hpp"
#include "nn/norms/group_norm.hpp"
#include "nn/norms/space_norm.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using norms::by_channels;
using norms::expect_channels;
using norms::map_shape;

// Gradients of a norm's gain and bias, to which its kernel adds while it computes dx: run(dgain, dbias). A
// gradient that is not trained, or does not exist (null), gets memory that is discarded.
template <class Run>
void accumulate_both(Frame& frame, Parameter& gain, Parameter& bias, const LayoutRef& x, int features,
                     Run&& run) {
  const auto each = [&](Parameter& p, const auto& use) {
    const LayoutRef layout = layouts::gradient_of(p.weight().layout(), x, features);
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

void expect_eps(const char* layer, double eps) {
  if (!(eps >= 0 && std::isfinite(eps)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: eps is {}; expected a finite number of 0 or more", layer, eps));
}

}  // namespace

RMSNorm::RMSNorm(std::int64_t dim, double eps) : eps_(eps) {
  expect_eps("rms norm", eps);
  weight = add("weight", std::make_shared<Parameter>(Shape{dim}, Constant{1.0}));
}

Tensors RMSNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  expect_activation(layouts::named(*this, "x"), x);
  layouts::expect_whole(layouts::named(*this, "x"), x, "a norm");
  const Tensor w = widened(frame, weight->weight());
  const std::int64_t dim = w.count();
  if (x.shape().rank() == 0 || x.shape().back() != dim)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected a last dimension of {} (the weight's)",
                            layouts::named(*this, "x").text(), to_string(x.shape()), dim));
  const std::int64_t rows = dim == 0 ? 0 : x.count() / dim;
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), out_memory()).with_layout(x.layout());
  const Tensor inv_rms = frame.compute().make({rows});
  by_element(x, [&]<class T>() {
    kernels::rms_norm_forward(frame.kernels(), x.data_ptr<T>(), w.data_ptr<float>(), y.data_ptr<T>(),
                              inv_rms.data_ptr<float>(), rows, dim, static_cast<float>(eps_));
  });
  frame.push(*this, {x, inv_rms});
  return {y};
}

Tensors RMSNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &inv_rms = kept[1];
  const Tensor w = widened(frame, weight->weight());
  expect_gradient(*this, dy, x.shape(), x.layout(), x.dtype());
  const Tensor dx = frame.compute().make(x.shape(), x.dtype(), dx_memory()).with_layout(x.layout());
  const auto run = [&](const Tensor& dw, bool add) {
    if (!add) kernels::fill(frame.kernels(), dw.data_ptr<float>(), 0.0f, dw.count());
    by_element(x, [&]<class T>() {
      kernels::rms_norm_backward(frame.kernels(), dy.data_ptr<T>(), x.data_ptr<T>(), w.data_ptr<float>(),
                                 inv_rms.data_ptr<float>(), dx.data_ptr<T>(), dw.data_ptr<float>(),
                                 inv_rms.count(), w.count());
    });
  };
  if (frame.exact()) {
    Parameter* const parameters[] = {weight.get()};
    exact::over_positions(frame, *this, x, parameters, [&](Chunk rows, std::span<float* const> sums) {
      const std::int64_t at = rows.offset * w.count();
      kernels::rms_norm_backward(frame.kernels(), dy.data_ptr<float>() + at, x.data_ptr<float>() + at,
                                 w.data_ptr<float>(), inv_rms.data_ptr<float>() + rows.offset,
                                 dx.data_ptr<float>() + at, sums[0], rows.size, w.count());
    });
  } else if (weight->trainable())
    weight->accumulate(layouts::gradient_of(w.layout(), x.layout(), -1), run);
  else
    run(frame.compute().make(w.shape()), false);  // dx is made in the same kernel
  return {dx};
}

namespace {

// The common part of norms over the last dimension, over channels and over groups: a gain and a bias, and a
// mean and a reciprocal standard deviation for each normalised row.
//
// `statistics(x, what, gains)` returns how many rows there are, and throws if x does not fit, also by its
// dtype. `run` is the kernel.
template <class Of, class Run>
Tensors norm_forward(const Module& module, const Tensor& input, Frame& frame, const Parameter& gain,
                     const Parameter& bias, Memory memory, Of&& statistics, Run&& run) {
  const Tensor x = layouts::beside(module, "x", input, gain);
  const TensorName what = layouts::named(module, "x");
  const Tensor g = widened(frame, gain.weight()), b = widened(frame, bias.weight());
  const Shape of_statistics = statistics(what, x, g.count());
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), memory).with_layout(x.layout());
  const Tensor mean = frame.compute().make(of_statistics), inv_std = frame.compute().make(of_statistics);
  run(x, g.data_ptr<float>(), b.data_ptr<float>(), y, mean.data_ptr<float>(), inv_std.data_ptr<float>());
  frame.push(module, {x, mean, inv_std});
  return {y};
}

template <class Run>
Tensors norm_backward(const Module& module, const Tensor& dy, Frame& frame, Parameter& gain, Parameter& bias,
                      Memory memory, int features, Run&& run) {
  const Tensors kept = frame.pop(module);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const Tensor g = widened(frame, gain.weight());
  expect_gradient(module, dy, x.shape(), x.layout(), x.dtype());
  const Tensor dx = frame.compute().make(x.shape(), x.dtype(), memory).with_layout(x.layout());
  accumulate_both(frame, gain, bias, x.layout(), features, [&](const Tensor& dgain, const Tensor& dbias) {
    run(dy, x, g.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(), dx,
        dgain.data_ptr<float>(), dbias.data_ptr<float>());
  });
  return {dx};
}

// Layer norm over the last dimension in exact mode.
Tensors exact_norm_backward(const Module& module, const Tensor& dy, Frame& frame, Parameter& gain,
                            Parameter& bias, Memory memory) {
  const Tensors kept = frame.pop(module);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const Tensor g = widened(frame, gain.weight());
  expect_gradient(module, dy, x.shape(), x.layout());
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  Parameter* const parameters[] = {&gain, &bias};
  exact::over_positions(frame, module, x, parameters, [&](Chunk rows, std::span<float* const> sums) {
    const std::int64_t at = rows.offset * g.count();
    kernels::layer_norm_backward(frame.kernels(), dy.data_ptr<float>() + at, x.data_ptr<float>() + at,
                                 g.data_ptr<float>(), mean.data_ptr<float>() + rows.offset,
                                 inv_std.data_ptr<float>() + rows.offset, dx.data_ptr<float>() + at, sums[0],
                                 sums[1], rows.size, g.count());
  });
  return {dx};
}

// Channel norm in exact mode. dx of a pixel is a sum over its channels alone.
Tensors exact_channel_norm_backward(const Module& module, const Tensor& dy, Frame& frame, Parameter& gain,
                                    Parameter& bias, Memory memory) {
  const Tensors kept = frame.pop(module);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const Tensor g = widened(frame, gain.weight());
  expect_gradient(module, dy, x.shape(), x.layout());
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  const Tensor unused = frame.compute().zeros({2, g.count()});
  kernels::channel_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                                 g.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(),
                                 dx.data_ptr<float>(), unused.data_ptr<float>(),
                                 unused.data_ptr<float>() + g.count(), map_shape(x));
  Parameter* const parameters[] = {&gain, &bias};
  const std::int64_t channels = x.size(1), pixels = map_shape(x).pixels,
                     row = x.shape().rank() > 2 && x.size(2) > 0 ? pixels / x.size(2) : pixels;
  exact::over_rows(
      frame, module, x, parameters, [&](std::int64_t sample, Chunk rows, std::span<float* const> sums) {
        for (std::int64_t c = 0; c < channels; ++c)
          for (std::int64_t p = rows.offset * row; p < (rows.offset + rows.size) * row; ++p) {
            const std::int64_t at = (sample * channels + c) * pixels + p, of = sample * pixels + p;
            const float d = dy.data_ptr<float>()[at];
            sums[0][c] +=
                d * ((x.data_ptr<float>()[at] - mean.data_ptr<float>()[of]) * inv_std.data_ptr<float>()[of]);
            sums[1][c] += d;
          }
      });
  return {dx};
}

}  // namespace

LayerNorm::LayerNorm(std::int64_t dim, double eps) : LayerNorm(Shape{dim}, eps) {}

LayerNorm::LayerNorm(const Shape& dims, double eps) : eps_(eps) {
  expect_eps("layer norm", eps);
  if (dims.rank() == 0)
    throw Error(ErrorCode::bad_argument, "layer norm: dims is (); expected at least one dimension");
  weight = add("weight", std::make_shared<Parameter>(dims, Constant{1.0}));
  bias = add("bias", std::make_shared<Parameter>(dims));
  weight->set_decays(false);  // whatever the number of dimensions
  bias->set_decays(false);
}

SpaceRule LayerNorm::space_rule(const DeviceMesh&, std::span<const int> dims) const {
  if (typeid(*this) != typeid(LayerNorm)) return {};
  SpaceRule rule{SpaceRule::Kind::any_part};
  const int first = 4 - weight->global_shape().rank();  // of maps, the first dimension that is normalised
  if (first == 3) return rule;
  std::vector<int> of_gain;
  for (const int dim : dims) of_gain.push_back(dim >= first ? dim - first : -1);
  for (Parameter* p : {weight.get(), bias.get()}) rule.pixelwise.push_back({p, of_gain});
  return rule;
}

Tensors LayerNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  if (weight->global_shape().rank() > 1) return {space_norm::forward(*this, inputs[0], frame, out_memory())};
  const auto rows = [](const TensorName& what, const Tensor& x, std::int64_t dim) {
    expect_activation(what, x);
    layouts::expect_whole(what, x, "a norm");
    if (x.shape().rank() == 0 || x.shape().back() != dim)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {}; expected a last dimension of {} (the weight's)", what.text(),
                              to_string(x.shape()), dim));
    return Shape{dim == 0 ? 0 : x.count() / dim};
  };
  return norm_forward(
      *this, inputs[0], frame, *weight, *bias, out_memory(), rows,
      [&](const Tensor& x, const float* w, const float* b, const Tensor& y, float* mean, float* inv) {
        const std::int64_t dim = x.shape().back();
        by_element(x, [&]<class T>() {
          kernels::layer_norm_forward(frame.kernels(), x.data_ptr<T>(), w, b, y.data_ptr<T>(), mean, inv,
                                      dim == 0 ? 0 : x.count() / dim, dim, static_cast<float>(eps_));
        });
      });
}

Tensors LayerNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  if (weight->global_shape().rank() > 1)
    return {space_norm::backward(*this, gradients[0], frame, dx_memory())};
  if (frame.exact()) return exact_norm_backward(*this, gradients[0], frame, *weight, *bias, dx_memory());
  return norm_backward(*this, gradients[0], frame, *weight, *bias, dx_memory(), -1,
                       [&](const Tensor& dy, const Tensor& x, const float* w, const float* mean,
                           const float* inv, const Tensor& dx, float* dw, float* db) {
                         const std::int64_t dim = x.shape().back();
                         by_element(x, [&]<class T>() {
                           kernels::layer_norm_backward(frame.kernels(), dy.data_ptr<T>(), x.data_ptr<T>(), w,
                                                        mean, inv, dx.data_ptr<T>(), dw, db,
                                                        dim == 0 ? 0 : x.count() / dim, dim);
                         });
                       });
}

ChannelNorm::ChannelNorm(std::int64_t channels, double eps) : eps_(eps) {
  expect_eps("channel norm", eps);
  g = add("g", std::make_shared<Parameter>(Shape{1, channels, 1, 1}, Constant{1.0}));
  b = add("b", std::make_shared<Parameter>(Shape{1, channels, 1, 1}));
  g->set_decays(false);
  b->set_decays(false);
}

Tensors ChannelNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const auto pixels = [](const TensorName& what, const Tensor& x, std::int64_t channels) {
    expect_activation(what, x);
    layouts::expect_whole_dim(what, x, "a norm", 1);
    expect_channels(what, x, channels);
    return Shape{x.size(0), map_shape(x).pixels};
  };
  return norm_forward(
      *this, inputs[0], frame, *g, *b, out_memory(), pixels,
      [&](const Tensor& x, const float* gain, const float* bias, const Tensor& y, float* mean, float* inv) {
        const Tensor wide = widened(frame, x);
        into_f32(frame, y, [&](float* to) {
          kernels::channel_norm_forward(frame.kernels(), wide.data_ptr<float>(), gain, bias, to, mean, inv,
                                        map_shape(x), static_cast<float>(eps_));
        });
      });
}

Tensors ChannelNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  if (frame.exact()) return exact_channel_norm_backward(*this, gradients[0], frame, *g, *b, dx_memory());
  return norm_backward(*this, gradients[0], frame, *g, *b, dx_memory(), -1,
                       [&](const Tensor& dy, const Tensor& x, const float* gain, const float* mean,
                           const float* inv, const Tensor& dx, float* dgain, float* dbias) {
                         const Tensor wide = widened(frame, x), of_y = widened(frame, dy);
                         into_f32(frame, dx, [&](float* to) {
                           kernels::channel_norm_backward(frame.kernels(), of_y.data_ptr<float>(),
                                                          wide.data_ptr<float>(), gain, mean, inv, to, dgain,
                                                          dbias, map_shape(x));
                         });
                       });
}

GroupNorm::GroupNorm(std::int64_t groups, std::int64_t channels, double eps) : groups_(groups), eps_(eps) {
  expect_eps("group norm", eps);
  if (groups < 1 || channels < 1 || channels % groups != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("group norm: {} channels in {} groups; expected at least 1 of both, and groups "
                            "that divide the channels",
                            channels, groups));
  weight = add("weight", std::make_shared<Parameter>(Shape{channels}, Constant{1.0}));
  bias = add("bias", std::make_shared<Parameter>(Shape{channels}));
}

ShardRule GroupNorm::shard_rule(Split split) const {
  ShardRule rule = by_channels(*this, split, *weight, *bias);
  if (rule.refused.empty()) rule.whole_units.insert(rule.whole_units.begin(), {"groups", groups_});
  return rule;
}

Tensors GroupNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  if (group_norm::cut(inputs[0])) return {group_norm::forward(*this, inputs[0], frame)};
  const auto groups = [&](const TensorName& what, const Tensor& x, std::int64_t) {
    expect_activation(what, x);
    return Shape{x.size(0), group_norm::checked_groups_of(*this, what, x)};
  };
  return norm_forward(
      *this, inputs[0], frame, *weight, *bias, out_memory(), groups,
      [&](const Tensor& x, const float* w, const float* b, const Tensor& y, float* mean, float* inv) {
        const Tensor wide = widened(frame, x);
        into_f32(frame, y, [&](float* to) {
          kernels::group_norm_forward(frame.kernels(), wide.data_ptr<float>(), w, b, to, mean, inv,
                                      map_shape(x), group_norm::groups_of(*this, x),
                                      static_cast<float>(eps_));
        });
      });
}

Tensors GroupNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  // dy is sharded like x, or is refused either way.
  if (group_norm::cut(gradients[0])) return {group_norm::backward(*this, gradients[0], frame)};
  return norm_backward(*this, gradients[0], frame, *weight, *bias, dx_memory(), 1,
                       [&](const Tensor& dy, const Tensor& x, const float* w, const float* mean,
                           const float* inv, const Tensor& dx, float* dw, float* db) {
                         const Tensor wide = widened(frame, x), of_y = widened(frame, dy);
                         into_f32(frame, dx, [&](float* to) {
                           kernels::group_norm_backward(frame.kernels(), of_y.data_ptr<float>(),
                                                        wide.data_ptr<float>(), w, mean, inv, to, dw, db,
                                                        map_shape(x), group_norm::groups_of(*this, x));
                         });
                       });
}

}  // namespace weft
