#include "nn/norms/group_norm.hpp"

#include "nn/norms/channels.hpp"
#include "nn/norms/numbers.hpp"
#include "nn/operands.hpp"

namespace weft::group_norm {
namespace {

// Sizes of this rank's part.
struct Sizes {
  std::int64_t batch, channels, pixels, groups;
  kernels::MapShape sample() const { return {1, channels, pixels}; }
  std::int64_t map() const { return channels * pixels; }  // elements of a sample
  std::int64_t rows() const { return batch * channels; }
};
Sizes sizes_of(const GroupNorm& norm, const Tensor& x) {
  const kernels::MapShape s = norms::map_shape(x);
  return {s.batch, s.channels, s.pixels, groups_of(norm, x)};
}

// The number of values of a sample and group on all ranks.
double count_of(const GroupNorm& norm, const Tensor& x) {
  std::int64_t n = norm.weight->global_shape()[0] / norm.groups();
  const Shape& global = layouts::global_shape(x);
  for (int d = 2; d < global.rank(); ++d) n *= global[d];
  return static_cast<double>(n);
}

// Copies two numbers of each sample and group to all channels of the group.
Tensor of_channels(Frame& frame, const Tensor& of_groups, const Sizes& s) {
  const Tensor y = frame.compute().make({2, s.batch, s.channels});
  if (s.rows() > 0)
    kernels::spread_groups(frame.kernels(), of_groups.data_ptr<float>(), y.data_ptr<float>(), 2 * s.batch,
                           s.channels, s.groups);
  return y;
}

// Two numbers for each sample and channel, stored one after the other for all samples. First are all first
// numbers, then all second numbers. Adds sums of channels to sums of groups, over all ranks that have pixels
// of them. Each sum is multiplied by its channel's weight unless `weight` is null.
Tensor of_groups(Frame& frame, const Tensor& sums, const float* weight, const Sizes& s, const LayoutRef& x) {
  const Tensor y = frame.compute().make({2, s.batch, s.groups}, DType::f64, Memory::shared);
  if (s.rows() > 0)
    kernels::group_sums(frame.kernels(), sums.data_ptr<double>(), weight, y.data_ptr<double>(), 2 * s.batch,
                        s.channels, s.groups);
  return norms::summed(y, x, [&](std::size_t axis) { return norms::cuts(*x, axis, 2); });
}

}  // namespace

std::int64_t checked_groups_of(const GroupNorm& norm, const TensorName& what, const Tensor& x) {
  const std::int64_t of_group = norm.weight->global_shape()[0] / norm.groups();
  layouts::expect_whole_dim(what, x, "a group norm", -1);
  norms::expect_channels_as(what, x, *norm.weight);
  norms::expect_channels(what, x, norm.weight->weight().count());
  if (x.size(1) % of_group != 0)
    throw Error(ErrorCode::layout, fmt::format("{} has {} channels on this rank; expected whole groups of {}",
                                               what.text(), x.size(1), of_group));
  return groups_of(norm, x);
}

Tensor forward(const GroupNorm& norm, const Tensor& input, Frame& frame) {
  const Tensor given = layouts::beside(norm, "x", input, *norm.weight);
  expect_activation(layouts::named(norm, "x"), given);
  const Tensor x = widened(frame, given);
  const Tensor w = widened(frame, norm.weight->weight()), b = widened(frame, norm.bias->weight());
  checked_groups_of(norm, layouts::named(norm, "x"), x);
  const Sizes s = sizes_of(norm, x);
  const Tensor sums = frame.compute().make({2, s.batch, s.channels}, DType::f64);
  for (std::int64_t i = 0; i < s.batch; ++i)
    kernels::channel_moments(frame.kernels(), x.data_ptr<float>() + i * s.map(),
                             sums.data_ptr<double>() + i * s.channels,
                             sums.data_ptr<double>() + s.rows() + i * s.channels, s.sample());
  const Tensor all = of_groups(frame, sums, nullptr, s, x.layout());
  const std::int64_t all_groups = s.batch * s.groups;
  const Tensor statistics = frame.compute().make({2, s.batch, s.groups});
  const auto eps = static_cast<double>(static_cast<float>(norm.eps()));  // as the kernel on one rank has it
  kernels::batch_norm_statistics(frame.kernels(), all.data_ptr<double>(), all.data_ptr<double>() + all_groups,
                                 count_of(norm, x), eps, statistics.data_ptr<float>(),
                                 statistics.data_ptr<float>() + all_groups, nullptr, nullptr, all_groups);
  const Tensor of_each = of_channels(frame, statistics, s);
  const Tensor means = of_each.slice_flat(0, {s.rows()}), inv = of_each.slice_flat(s.rows(), {s.rows()});
  const Tensor y = frame.compute().make(x.shape(), DType::f32, Memory::shared).with_layout(x.layout());
  for (std::int64_t i = 0; i < s.batch; ++i)
    kernels::batch_norm_forward(frame.kernels(), x.data_ptr<float>() + i * s.map(), w.data_ptr<float>(),
                                b.data_ptr<float>(), means.data_ptr<float>() + i * s.channels,
                                inv.data_ptr<float>() + i * s.channels, y.data_ptr<float>() + i * s.map(),
                                s.sample());
  frame.push(norm, {given, means, inv});
  return cast(frame, y, given.dtype());
}

// With x^ = (x - mean) inv_std and g = dy weight: dweight = Σ dy x^, dbias = Σ dy, dx = inv_std (g - mean(g)
// - x^ mean(g x^)), the means over a group on all ranks.
Tensor backward(const GroupNorm& norm, const Tensor& of_y, Frame& frame) {
  const Tensors kept = frame.pop(norm);
  const Tensor &means = kept[1], &inv = kept[2];
  expect_gradient(norm, of_y, kept[0].shape(), kept[0].layout(), kept[0].dtype());
  const Tensor x = widened(frame, kept[0]), dy = widened(frame, of_y);
  const Sizes s = sizes_of(norm, x);
  const Tensor w = widened(frame, norm.weight->weight());
  const Tensor sums = frame.compute().make({2, s.batch, s.channels}, DType::f64);
  for (std::int64_t i = 0; i < s.batch; ++i)
    kernels::batch_norm_backward_sums(
        frame.kernels(), dy.data_ptr<float>() + i * s.map(), x.data_ptr<float>() + i * s.map(),
        means.data_ptr<float>() + i * s.channels, inv.data_ptr<float>() + i * s.channels,
        sums.data_ptr<double>() + i * s.channels, sums.data_ptr<double>() + s.rows() + i * s.channels,
        s.sample());
  for (const auto& [p, from] : {std::pair{norm.bias.get(), sums.data_ptr<double>()},
                                {norm.weight.get(), sums.data_ptr<double>() + s.rows()}}) {
    if (!p->trainable()) continue;
    const Tensor gradient = frame.compute().make({s.channels});
    kernels::sum_rows_f64(frame.kernels(), from, gradient.data_ptr<float>(), s.batch, s.channels);
    p->accumulate(gradient.with_layout(layouts::gradient_of(p->weight().layout(), x.layout(), 1)));
  }
  const Tensor all = of_groups(frame, sums, w.data_ptr<float>(), s, x.layout()),
               narrow = frame.compute().make(all.shape());
  kernels::divide_f64(frame.kernels(), all.data_ptr<double>(), count_of(norm, x), narrow.data_ptr<float>(),
                      all.count());
  const Tensor of_each = of_channels(frame, narrow, s);
  const Tensor of_g = of_each.slice_flat(0, {s.rows()}), of_gx = of_each.slice_flat(s.rows(), {s.rows()});
  const Tensor ones = frame.compute().make({s.channels}), zeros = frame.compute().zeros({s.channels});
  kernels::fill(frame.kernels(), ones.data_ptr<float>(), 1.0f, s.channels);
  const Tensor g = frame.compute().make(x.shape());
  kernels::batch_norm_forward(frame.kernels(), dy.data_ptr<float>(), w.data_ptr<float>(),
                              zeros.data_ptr<float>(), zeros.data_ptr<float>(), ones.data_ptr<float>(),
                              g.data_ptr<float>(), {s.batch, s.channels, s.pixels});
  const Tensor dx = frame.compute().make(x.shape(), DType::f32, Memory::shared).with_layout(x.layout());
  for (std::int64_t i = 0; i < s.batch; ++i)
    kernels::batch_norm_backward(
        frame.kernels(), g.data_ptr<float>() + i * s.map(), x.data_ptr<float>() + i * s.map(),
        ones.data_ptr<float>(), means.data_ptr<float>() + i * s.channels,
        inv.data_ptr<float>() + i * s.channels, of_g.data_ptr<float>() + i * s.channels,
        of_gx.data_ptr<float>() + i * s.channels, dx.data_ptr<float>() + i * s.map(), s.sample());
  return cast(frame, dx, of_y.dtype());
}

}  // namespace weft::group_norm
