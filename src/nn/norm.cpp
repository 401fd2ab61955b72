#include "weft/nn/norm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/norms/numbers.hpp"
#include "nn/norms/space_norm.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// Gradients of a norm's gain and bias, which its kernel adds to beside making dx: run(dgain, dbias). What is not trained, or
// not there (null), gets memory that is forgotten.
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

namespace {

// What norms over the last dimension, over channels and over groups have in common: a gain and a bias, and a mean and a 1 / standard
// deviation for each of the things that are normalised.
//
// `statistics(x, what, gains)` says how many there are, and throws for an x that does not fit; `run` is the kernel.
template <class Of, class Run>
Tensors norm_forward(const Module& module, const Tensor& input, Frame& frame, const Parameter& gain,
                     const Parameter& bias, Memory memory, Of&& statistics, Run&& run) {
  const Tensor x = layouts::beside(module, "x", input, gain);
  const TensorName what = layouts::named(module, "x");
  expect_dtype(what, x, DType::f32);
  const Tensor g = widened(frame, gain.weight()), b = widened(frame, bias.weight());
  const Shape of_statistics = statistics(what, x, g.count());
  const Tensor y = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  const Tensor mean = frame.compute().make(of_statistics), inv_std = frame.compute().make(of_statistics);
  run(x, g.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), mean.data_ptr<float>(),
      inv_std.data_ptr<float>());
  frame.push(module, {x, mean, inv_std});
  return {y};
}

template <class Run>
Tensors norm_backward(const Module& module, const Tensor& dy, Frame& frame, Parameter& gain, Parameter& bias,
                      Memory memory, int features, Run&& run) {
  const Tensors kept = frame.pop(module);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const Tensor g = widened(frame, gain.weight());
  expect_gradient(module, dy, x.shape(), x.layout());
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, memory).with_layout(x.layout());
  accumulate_both(frame, gain, bias, x.layout(), features, [&](const Tensor& dgain, const Tensor& dbias) {
    run(dy.data_ptr<float>(), x, g.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(),
        dx.data_ptr<float>(), dgain.data_ptr<float>(), dbias.data_ptr<float>());
  });
  return {dx};
}

// x: (batch, channels, …)
kernels::MapShape map_shape(const Tensor& x) {
  const std::int64_t batch = x.size(0), channels = x.size(1);
  return {batch, channels, batch * channels == 0 ? 0 : x.count() / (batch * channels)};
}

void expect_channels(const TensorName& what, const Tensor& x, std::int64_t channels) {
  if (x.shape().rank() < 2 || x.size(1) != channels)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, …)", what.text(),
                                                     to_string(x.shape()), channels));
}

// Throws layout unless the channels of x are cut as the gain is.
void expect_channels_as(const TensorName& what, const Tensor& x, const Parameter& gain) {
  const LayoutRef &of_x = x.layout(), &of_gain = gain.weight().layout();
  if (of_x == nullptr || of_gain == nullptr) return;
  for (std::size_t axis = 0; axis < of_x->placements.size(); ++axis)
    if (of_x->mesh_shape().size(static_cast<int>(axis)) > 1 &&
        is_shard(of_x->placements[axis], 1) != is_shard(of_gain->placements[axis], 0))
      throw Error(ErrorCode::layout, fmt::format("{} is {} on {}; expected channels cut as the weight is",
                                                 what.text(), to_string(of_x->placements[axis]),
                                                 layouts::axis_name(*of_x, static_cast<int>(axis))));
}

// A norm whose channels may be cut, gain and bias with them.
ShardRule by_channels(const Module& module, Split split, const Parameter& weight, const Parameter& bias) {
  ShardRule rule;
  if (split == Split::row) return module.Module::shard_rule(split);
  rule.features = 1;
  rule.parameters = {{const_cast<Parameter*>(&weight), Shard{0}}, {const_cast<Parameter*>(&bias), Shard{0}}};
  rule.whole_units = {{"channels", weight.global_shape()[0]}};
  return rule;
}

}  // namespace

LayerNorm::LayerNorm(std::int64_t dim, double eps) : LayerNorm(Shape{dim}, eps) {}

LayerNorm::LayerNorm(const Shape& dims, double eps) : eps_(eps) {
  if (dims.rank() == 0)
    throw Error(ErrorCode::bad_argument, "layer norm: dims is (); expected at least one dimension");
  weight = add("weight", std::make_shared<Parameter>(dims, Constant{1.0}));
  bias = add("bias", std::make_shared<Parameter>(dims));
}

Tensors LayerNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  if (weight->global_shape().rank() > 1)
    return {space_norm::forward(*this, inputs[0], frame, out_memory(), false)};
  const auto rows = [](const TensorName& what, const Tensor& x, std::int64_t dim) {
    layouts::expect_whole(what, x, "a norm");
    if (x.shape().rank() == 0 || x.shape().back() != dim)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {}; expected a last dimension of {} (the weight's)", what.text(),
                              to_string(x.shape()), dim));
    return Shape{dim == 0 ? 0 : x.count() / dim};
  };
  return norm_forward(
      *this, inputs[0], frame, *weight, *bias, out_memory(), rows,
      [&](const Tensor& x, const float* w, const float* b, float* y, float* mean, float* inv) {
        const std::int64_t dim = x.shape().back();
        kernels::layer_norm_forward(frame.kernels(), x.data_ptr<float>(), w, b, y, mean, inv,
                                    dim == 0 ? 0 : x.count() / dim, dim, static_cast<float>(eps_));
      });
}

Tensors LayerNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  if (weight->global_shape().rank() > 1)
    return {space_norm::backward(*this, gradients[0], frame, dx_memory())};
  return norm_backward(*this, gradients[0], frame, *weight, *bias, dx_memory(), -1,
                       [&](const float* dy, const Tensor& x, const float* w, const float* mean,
                           const float* inv, float* dx, float* dw, float* db) {
                         const std::int64_t dim = x.shape().back();
                         kernels::layer_norm_backward(frame.kernels(), dy, x.data_ptr<float>(), w, mean, inv,
                                                      dx, dw, db, dim == 0 ? 0 : x.count() / dim, dim);
                       });
}

ChannelNorm::ChannelNorm(std::int64_t channels, double eps) : eps_(eps) {
  g = add("g", std::make_shared<Parameter>(Shape{1, channels, 1, 1}, Constant{1.0}));
  b = add("b", std::make_shared<Parameter>(Shape{1, channels, 1, 1}));
  g->set_decays(false);
  b->set_decays(false);
}

Tensors ChannelNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const auto pixels = [](const TensorName& what, const Tensor& x, std::int64_t channels) {
    layouts::expect_whole_dim(what, x, "a norm", 1);
    expect_channels(what, x, channels);
    return Shape{x.size(0), map_shape(x).pixels};
  };
  return norm_forward(
      *this, inputs[0], frame, *g, *b, out_memory(), pixels,
      [&](const Tensor& x, const float* gain, const float* bias, float* y, float* mean, float* inv) {
        kernels::channel_norm_forward(frame.kernels(), x.data_ptr<float>(), gain, bias, y, mean, inv,
                                      map_shape(x), static_cast<float>(eps_));
      });
}

Tensors ChannelNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  return norm_backward(*this, gradients[0], frame, *g, *b, dx_memory(), -1,
                       [&](const float* dy, const Tensor& x, const float* gain, const float* mean,
                           const float* inv, float* dx, float* dgain, float* dbias) {
                         kernels::channel_norm_backward(frame.kernels(), dy, x.data_ptr<float>(), gain, mean,
                                                        inv, dx, dgain, dbias, map_shape(x));
                       });
}

GroupNorm::GroupNorm(std::int64_t groups, std::int64_t channels, double eps) : groups_(groups), eps_(eps) {
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
  const std::int64_t of_group = weight->global_shape()[0] / groups_;
  const auto groups = [&](const TensorName& what, const Tensor& x, std::int64_t channels) {
    for (int dim = 2; dim < x.shape().rank(); ++dim) layouts::expect_whole_dim(what, x, "a group norm", dim);
    layouts::expect_whole_dim(what, x, "a group norm", -1);
    expect_channels_as(what, x, *weight);
    expect_channels(what, x, channels);
    if (channels % of_group != 0)
      throw Error(ErrorCode::layout,
                  fmt::format("{} has {} channels on this rank; expected whole groups of {}", what.text(),
                              channels, of_group));
    return Shape{x.size(0), channels / of_group};
  };
  return norm_forward(
      *this, inputs[0], frame, *weight, *bias, out_memory(), groups,
      [&](const Tensor& x, const float* w, const float* b, float* y, float* mean, float* inv) {
        kernels::group_norm_forward(frame.kernels(), x.data_ptr<float>(), w, b, y, mean, inv, map_shape(x),
                                    x.size(1) / of_group, static_cast<float>(eps_));
      });
}

Tensors GroupNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const std::int64_t of_group = weight->global_shape()[0] / groups_;
  return norm_backward(*this, gradients[0], frame, *weight, *bias, dx_memory(), 1,
                       [&](const float* dy, const Tensor& x, const float* w, const float* mean,
                           const float* inv, float* dx, float* dw, float* db) {
                         kernels::group_norm_backward(frame.kernels(), dy, x.data_ptr<float>(), w, mean, inv,
                                                      dx, dw, db, map_shape(x), x.size(1) / of_group);
                       });
}

// BatchNorm: the sums of a pass over samples and pixels are made in f64, in one pass over x, and added over ranks in one all-reduce:
// channels sums, channels sums of squares, and the number of summands. The product of two f32 is exact in f64, so that the variance, a
// difference of two sums, has about 16 digits less those of (mean / std)^2.

BatchNorm::BatchNorm(std::int64_t channels, const BatchNormConfig& config) : config_(config) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "batch norm: " + text);
  };
  if (channels < 1) refuse(fmt::format("channels is {}; expected at least 1", channels));
  if (!(config.eps > 0)) refuse(fmt::format("eps is {}; expected more than 0", config.eps));
  if (!(config.momentum >= 0 && config.momentum <= 1))
    refuse(fmt::format("momentum is {}; expected 0 to 1", config.momentum));
  weight = add("weight", std::make_shared<Parameter>(Shape{channels}, Constant{1.0}));
  bias = add("bias", std::make_shared<Parameter>(Shape{channels}));
  running_mean = add("running_mean", std::make_shared<ModuleBuffer>(Shape{channels}));
  running_var =
      add("running_var", std::make_shared<ModuleBuffer>(Shape{channels}, DType::f32, Constant{1.0}));
  num_batches_tracked = add("num_batches_tracked", std::make_shared<ModuleBuffer>(Shape{}, DType::i64));
}

ShardRule BatchNorm::shard_rule(Split split) const {
  ShardRule rule = by_channels(*this, split, *weight, *bias);
  if (rule.refused.empty()) rule.buffers = {{running_mean.get(), Shard{0}}, {running_var.get(), Shard{0}}};
  return rule;
}

namespace {

using norms::Numbers;
using norms::on_host;
using norms::placed;

// Whether this axis splits x in another dimension than its channels.
bool splits_samples(const Layout& x, std::size_t axis) {
  return x.mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(x.placements[axis]) &&
         !is_shard(x.placements[axis], 1);
}

// The sums over the axes that split the samples and pixels of x, all of them or those that are listed (`listed` true) or are not.
Numbers summed(Context& context, const Numbers& mine, const LayoutRef& x,
               const std::optional<std::vector<std::string>>& axes, bool listed) {
  return norms::summed(context, mine, x, [&](std::size_t axis) {
    const bool in_list = !axes || std::ranges::count(*axes, x->mesh_shape().name(static_cast<int>(axis))) > 0;
    return splits_samples(*x, axis) && in_list == listed;
  });
}

// buffer = (1 - momentum) buffer + momentum · numbers
void move_towards(Frame& frame, const ModuleBuffer& buffer, const Numbers& numbers, double momentum) {
  Context& context = frame.compute().context();
  Numbers running = on_host(context, buffer.tensor());
  for (std::size_t i = 0; i < running.size(); ++i)
    running[i] = (1 - momentum) * running[i] + momentum * numbers[i];
  copy(context, placed(frame, running), buffer.tensor(), frame.compute().stream());
}

void count_up(Frame& frame, const ModuleBuffer& buffer) {
  Context& context = frame.compute().context();
  const Tensor count(context, buffer.tensor().shape(), DType::i64);
  copy(context, to_host(context, buffer.tensor()), count);
  ++count.as<std::int64_t>()[0];
  copy(context, to_device(context, count, frame.compute().stream()), buffer.tensor(),
       frame.compute().stream());
}

}  // namespace

Tensors BatchNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *weight);
  const TensorName what = layouts::named(*this, "x");
  expect_dtype(what, x, DType::f32);
  layouts::expect_whole_dim(what, x, "a norm", -1);
  const Tensor w = widened(frame, weight->weight()), b = widened(frame, bias->weight());
  expect_channels_as(what, x, *weight);
  expect_channels(what, x, w.count());
  if (config_.axes && x.layout())
    for (const std::string& axis : *config_.axes) x.layout()->mesh_shape().index(axis);  // throws
  Context& context = frame.compute().context();
  const kernels::MapShape s = map_shape(x);
  const auto channels = static_cast<std::size_t>(s.channels);
  Numbers mean, variance;
  double count = 0;  // of summands; 0: the statistics are the running ones
  if (frame.pass().training) {
    const Tensor sums = frame.compute().make({2 * s.channels}, DType::f64);
    kernels::channel_moments(frame.kernels(), x.data_ptr<float>(), sums.data_ptr<double>(),
                             sums.data_ptr<double>() + s.channels, s);
    Numbers all = on_host(context, sums);
    all.push_back(static_cast<double>(s.batch * s.pixels));
    all = summed(context, all, x.layout(), config_.axes, true);
    count = all.back();
    for (std::size_t c = 0; c < channels; ++c) {
      mean.push_back(all[c] / count);
      variance.push_back(std::max(0.0, all[channels + c] / count - mean[c] * mean[c]));
    }
    // What is not of the ranks of these axes alone enters the running statistics as the mean over the others, which also hear where some
    // have too few values.
    Numbers tracked = mean;
    for (const double v : variance) tracked.push_back(v * count / (count - 1));
    tracked.insert(tracked.end(), {count < 2 ? 1.0 : 0.0, 1.0});
    tracked = summed(context, tracked, x.layout(), config_.axes, false);
    const double ranks = tracked.back(), short_of_values = tracked[2 * channels];
    if (short_of_values > 0)
      throw Error(
          ErrorCode::bad_argument,
          count < 2
              ? fmt::format("{} has {} value for each channel; a batch norm needs at least 2 in a training",
                            what.text(), count)
              : fmt::format("{} has fewer than 2 values for each channel on other ranks of {}; a batch "
                            "norm needs at least 2 in a training",
                            what.text(), to_string(x.layout()->mesh_shape())));
    for (double& t : tracked) t /= ranks;
    move_towards(frame, *running_mean, {tracked.begin(), tracked.begin() + s.channels}, config_.momentum);
    move_towards(frame, *running_var, {tracked.begin() + s.channels, tracked.end() - 2}, config_.momentum);
    count_up(frame, *num_batches_tracked);
  } else {
    mean = on_host(context, running_mean->tensor());
    variance = on_host(context, running_var->tensor());
  }
  Numbers inv_std;
  for (const double v : variance) inv_std.push_back(1 / std::sqrt(v + config_.eps));
  const Tensor means = placed(frame, mean), inv = placed(frame, inv_std);
  const Tensor y = frame.compute().make(x.shape(), DType::f32, out_memory()).with_layout(x.layout());
  kernels::batch_norm_forward(frame.kernels(), x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(),
                              means.data_ptr<float>(), inv.data_ptr<float>(), y.data_ptr<float>(), s);
  const Tensor summands(context, {1}, DType::f64);
  summands.as<double>()[0] = count;
  frame.push(*this, {x, means, inv, summands});
  return {y};
}

// With x^ = (x - mean) inv_std: dweight = Σ dy x^, dbias = Σ dy, and in a training, where mean and variance depend on x, too,
// dx = weight inv_std (dy - mean(dy) - x^ mean(dy x^)), the means over all that the statistics are of.
Tensors BatchNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &mean = kept[1], &inv_std = kept[2];
  const double count = kept[3].as<double>()[0];
  const Tensor w = widened(frame, weight->weight());
  expect_gradient(*this, dy, x.shape(), x.layout());
  Context& context = frame.compute().context();
  const kernels::MapShape s = map_shape(x);
  const Tensor sums = frame.compute().make({2 * s.channels}, DType::f64);
  kernels::batch_norm_backward_sums(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                                    mean.data_ptr<float>(), inv_std.data_ptr<float>(),
                                    sums.data_ptr<double>(), sums.data_ptr<double>() + s.channels, s);
  const Numbers mine = on_host(context, sums);
  Numbers means(mine.size(), 0.0);
  if (count > 0) {
    means = summed(context, mine, x.layout(), config_.axes, true);
    for (double& m : means) m /= count;
  }
  const auto half = [&](const Numbers& all, bool second) {
    return placed(frame, second ? Numbers(all.begin() + s.channels, all.end())
                                : Numbers(all.begin(), all.begin() + s.channels));
  };
  const auto accumulate = [&](Parameter& p, const Tensor& gradient) {
    p.accumulate(gradient.with_layout(layouts::gradient_of(p.weight().layout(), x.layout(), 1)));
  };
  accumulate(*bias, half(mine, false));
  accumulate(*weight, half(mine, true));
  const Tensor mean_dy = half(means, false), mean_dyx = half(means, true);
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, dx_memory()).with_layout(x.layout());
  kernels::batch_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                               w.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(),
                               mean_dy.data_ptr<float>(), mean_dyx.data_ptr<float>(), dx.data_ptr<float>(),
                               s);
  return {dx};
}

}  // namespace weft
