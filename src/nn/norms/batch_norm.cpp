#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "nn/norms/channels.hpp"
#include "nn/norms/numbers.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/norm.hpp"

namespace weft {

// BatchNorm. The sums over samples and pixels are computed in f64, in one pass over x, and added over ranks
// in one all-reduce: one sum and one sum of squares per channel. The product of two f32 is exact in f64. So
// the variance, a difference of two sums, has about 16 digits minus the digits of (mean / std)^2.
// Statistics stay on the device. The host knows the number of summands from the layout alone, and never
// waits.

BatchNorm::BatchNorm(std::int64_t channels, const BatchNormConfig& config) : config_(config) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "batch norm: " + text);
  };
  if (channels < 1) refuse(fmt::format("channels is {}; expected at least 1", channels));
  if (!(config.eps > 0 && std::isfinite(config.eps)))
    refuse(fmt::format("eps is {}; expected more than 0", config.eps));
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
  ShardRule rule = norms::by_channels(*this, split, *weight, *bias);
  if (rule.refused.empty()) rule.buffers = {{running_mean.get(), Shard{0}}, {running_var.get(), Shard{0}}};
  return rule;
}

namespace {

using Axes = std::optional<std::vector<std::string>>;

// Returns whether this axis splits x in another dimension than its channels, and is one of the listed axes
// (all axes, if there is no list); or, if `listed` is false, is not one of them.
bool splits_samples(const Layout& x, std::size_t axis, const Axes& axes, bool listed) {
  const int a = static_cast<int>(axis);
  const bool in_list = !axes || std::ranges::count(*axes, x.mesh_shape().name(a)) > 0;
  return x.mesh_shape().size(a) > 1 && is_shard(x.placements[axis]) && !is_shard(x.placements[axis], 1) &&
         in_list == listed;
}

// The sums over the axes that split the samples and pixels of x. They are over the listed axes (`listed`
// true), or over the others.
Tensor summed(const Tensor& mine, const LayoutRef& x, const Axes& axes, bool listed) {
  return norms::summed(mine, x, [&](std::size_t axis) { return splits_samples(*x, axis, axes, listed); });
}

// The number of values of a channel in the statistics of this rank; the smallest such number on any rank; and
// the number of ranks over whose statistics the running ones are averaged.
struct Summands {
  std::int64_t own, least, ranks = 1;
};

std::int64_t of_a_channel(const Shape& x) {
  std::int64_t n = x[0];
  for (int d = 2; d < x.rank(); ++d) n *= x[d];
  return n;
}

Summands summands_of(const Tensor& x, const Axes& axes) {
  const std::int64_t here = of_a_channel(x.shape());
  if (x.layout() == nullptr) return {here, here};
  const Layout& layout = *x.layout();
  // Ranks whose values are added: ranks that differ in the listed axes alone.
  const auto team = [&](int rank) {
    std::vector<int> at = layout.mesh_shape().coordinates(rank);
    for (std::size_t axis = 0; axis < at.size(); ++axis)
      if (splits_samples(layout, axis, axes, true)) at[axis] = 0;
    return at;
  };
  std::map<std::vector<int>, std::int64_t> counts;
  for (int rank = 0; rank < layout.mesh_shape().size(); ++rank)
    counts[team(rank)] += of_a_channel(layout.local_shape(rank));
  Summands s{counts.at(team(layout.mesh().root().rank())), here};
  s.least = s.own;
  for (const auto& [of, count] : counts) s.least = std::min(s.least, count);
  for (std::size_t axis = 0; axis < layout.placements.size(); ++axis)
    if (splits_samples(layout, axis, axes, false))
      s.ranks *= layout.mesh_shape().size(static_cast<int>(axis));
  return s;
}

void expect_enough(const TensorName& what, const Tensor& x, const Summands& s) {
  if (s.least >= 2) return;
  throw Error(
      ErrorCode::bad_argument,
      s.own < 2 ? fmt::format("{} has {} value for each channel; a batch norm needs at least 2 in a training",
                              what.text(), s.own)
                : fmt::format("{} has fewer than 2 values for each channel on other ranks of {}; a batch "
                              "norm needs at least 2 in a training",
                              what.text(), to_string(x.layout()->mesh_shape())));
}

// Two numbers for each channel: first the first numbers of all channels, then the second ones.
struct SumPairs {
  Tensor all;  // f64 (2 channels)
  double* first() const { return all.data_ptr<double>(); }
  double* second() const { return first() + all.count() / 2; }
};
SumPairs make_pairs(Frame& frame, std::int64_t channels) {
  return {frame.compute().make({2 * channels}, DType::f64, Memory::shared)};
}

// f32 numbers / divisor, one of each channel.
Tensor narrowed(Frame& frame, const double* numbers, double divisor, std::int64_t channels) {
  const Tensor y = frame.compute().make({channels});
  kernels::divide_f64(frame.kernels(), numbers, divisor, y.data_ptr<float>(), channels);
  return y;
}

}  // namespace

Tensors BatchNorm::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor given = layouts::beside(*this, "x", inputs[0], *weight);
  const TensorName what = layouts::named(*this, "x");
  expect_activation(what, given);
  const Tensor x = widened(frame, given);
  layouts::expect_whole_dim(what, x, "a norm", -1);
  const Tensor w = widened(frame, weight->weight()), b = widened(frame, bias->weight());
  norms::expect_channels_as(what, x, *weight);
  norms::expect_channels(what, x, w.count());
  if (config_.axes && x.layout())
    for (const std::string& axis : *config_.axes) x.layout()->mesh_shape().index(axis);  // throws
  Compute& compute = frame.compute();
  const kernels::MapShape s = norms::map_shape(x);
  Tensor mean = compute.make({s.channels}), inv_std = compute.make({s.channels});
  double count = 0;  // the number of summands; 0: the statistics are the running ones
  if (frame.pass().training) {
    const Summands summands = summands_of(x, config_.axes);
    expect_enough(what, x, summands);
    count = static_cast<double>(summands.own);
    const Tensors statistics = frame.once(path(), [&]() -> Tensors {
      SumPairs sums = make_pairs(frame, s.channels);
      kernels::channel_moments(frame.kernels(), x.data_ptr<float>(), sums.first(), sums.second(), s);
      sums.all = summed(sums.all, x.layout(), config_.axes, true);
      SumPairs tracked = make_pairs(frame, s.channels);
      kernels::batch_norm_statistics(frame.kernels(), sums.first(), sums.second(), count, config_.eps,
                                     mean.data_ptr<float>(), inv_std.data_ptr<float>(), tracked.first(),
                                     tracked.second(), s.channels);
      // If ranks outside of these axes have other statistics, the mean over those ranks enters the running
      // statistics.
      tracked.all = summed(tracked.all, x.layout(), config_.axes, false);
      kernels::batch_norm_track(
          frame.kernels(), tracked.first(), tracked.second(), static_cast<double>(summands.ranks),
          config_.momentum, running_mean->tensor().data_ptr<float>(), running_var->tensor().data_ptr<float>(),
          num_batches_tracked->tensor().data_ptr<std::int64_t>(), s.channels);
      return {mean, inv_std};
    });
    mean = statistics[0], inv_std = statistics[1];
  } else {
    copy(compute.context(), running_mean->tensor(), mean, compute.stream());
    kernels::inverse_std(frame.kernels(), running_var->tensor().data_ptr<float>(), config_.eps,
                         inv_std.data_ptr<float>(), s.channels);
  }
  const Tensor y = compute.make(x.shape(), DType::f32, out_memory()).with_layout(x.layout());
  kernels::batch_norm_forward(frame.kernels(), x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(),
                              mean.data_ptr<float>(), inv_std.data_ptr<float>(), y.data_ptr<float>(), s);
  const Tensor summands(compute.context(), {1}, DType::f64);
  summands.as<double>()[0] = count;
  frame.push(*this, {given, mean, inv_std, summands});
  return {cast(frame, y, given.dtype())};
}

// With x^ = (x - mean) inv_std: dweight = Σ dy x^, dbias = Σ dy. In training, mean and variance depend on x,
// too: dx = weight inv_std (dy - mean(dy) - x^ mean(dy x^)), with means over all values of the statistics.
Tensors BatchNorm::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  expect_gradient(*this, gradients[0], kept[0].shape(), kept[0].layout(), kept[0].dtype());
  const Tensor x = widened(frame, kept[0]), dy = widened(frame, gradients[0]);
  const Tensor &mean = kept[1], &inv_std = kept[2];
  const double count = kept[3].as<double>()[0];
  const Tensor w = widened(frame, weight->weight());
  const kernels::MapShape s = norms::map_shape(x);
  const SumPairs mine = make_pairs(frame, s.channels);
  kernels::batch_norm_backward_sums(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                                    mean.data_ptr<float>(), inv_std.data_ptr<float>(), mine.first(),
                                    mine.second(), s);
  const auto accumulate = [&](Parameter& p, const double* sums) {
    p.accumulate(narrowed(frame, sums, 1, s.channels)
                     .with_layout(layouts::gradient_of(p.weight().layout(), x.layout(), 1)));
  };
  accumulate(*bias, mine.first());
  accumulate(*weight, mine.second());
  // If the statistics are constants, their part of dx is 0.
  const SumPairs all = count > 0 ? SumPairs{summed(mine.all, x.layout(), config_.axes, true)} : mine;
  const double divisor = count > 0 ? count : std::numeric_limits<double>::infinity();
  const Tensor mean_dy = narrowed(frame, all.first(), divisor, s.channels),
               mean_dyx = narrowed(frame, all.second(), divisor, s.channels);
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, dx_memory()).with_layout(x.layout());
  kernels::batch_norm_backward(frame.kernels(), dy.data_ptr<float>(), x.data_ptr<float>(),
                               w.data_ptr<float>(), mean.data_ptr<float>(), inv_std.data_ptr<float>(),
                               mean_dy.data_ptr<float>(), mean_dyx.data_ptr<float>(), dx.data_ptr<float>(),
                               s);
  return {cast(frame, dx, gradients[0].dtype())};
}

}  // namespace weft
