// Group norm of maps that are cut in space. Each rank sums its own pixels in f64, channel by channel; the sums of a group are added over ranks in one
// all-reduce of two numbers for each sample and group. They stay on the device, and the host waits for none of them.
#include "domain/rules.hpp"
#include "nn/norms/numbers.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain {
namespace {

// The sums over the axes that cut x in height or width.
Tensor summed_in_space(const Tensor& mine, const LayoutRef& x) {
  return norms::summed(mine, x, [&](std::size_t axis) {
    return is_shard(x->placements[axis], kHeight) || is_shard(x->placements[axis], kWidth);
  });
}

// Sizes of this rank's part.
struct Sizes {
  std::int64_t batch, channels, pixels, groups;
  kernels::MapShape sample() const { return {1, channels, pixels}; }
  std::int64_t map() const { return channels * pixels; }  // elements of a sample
  std::int64_t rows() const { return batch * channels; }
};

Sizes sizes_of(const GroupNorm& norm, const Tensor& x) {
  const std::int64_t of_group = norm.weight->global_shape()[0] / norm.groups();
  if (x.size(1) % of_group != 0)
    throw Error(ErrorCode::layout, fmt::format("{} has {} channels on this rank; expected whole groups of {}",
                                               layouts::named(norm, "x").text(), x.size(1), of_group));
  return {x.size(0), x.size(1), x.size(2) * x.size(3), x.size(1) / of_group};
}

// How many values of a sample and group there are on all ranks.
double count_of(const GroupNorm& norm, const Tensor& x) {
  const Shape& global = layouts::global_shape(x);
  return static_cast<double>(global[2] * global[3] * (norm.weight->global_shape()[0] / norm.groups()));
}

// Two numbers of each sample and group as those of each sample and channel.
Tensor of_channels(Frame& frame, const Tensor& of_groups, const Sizes& s) {
  const Tensor y = frame.compute().make({2, s.batch, s.channels});
  if (s.rows() > 0)
    kernels::spread_groups(frame.kernels(), of_groups.data_ptr<float>(), y.data_ptr<float>(), 2 * s.batch,
                           s.channels, s.groups);
  return y;
}

// Two numbers of each sample and channel, those of all samples one after the other: first of all, then second of all. As sums of groups,
// over all ranks of the space; each multiplied by its channel's weight unless that is null.
Tensor of_groups(Frame& frame, const Tensor& sums, const float* weight, const Sizes& s, const LayoutRef& x) {
  const Tensor y = frame.compute().make({2, s.batch, s.groups}, DType::f64, Memory::shared);
  if (s.rows() > 0)
    kernels::group_sums(frame.kernels(), sums.data_ptr<double>(), weight, y.data_ptr<double>(), 2 * s.batch,
                        s.channels, s.groups);
  return summed_in_space(y, x);
}

class GroupNormPasses final : public MapPasses {
 public:
  using MapPasses::MapPasses;

 private:
  Tensors forward_cut(Module& module, const Tensor& x, Frame& frame) const override {
    auto& norm = dynamic_cast<GroupNorm&>(module);
    maps::expect_map(module, x);
    layouts::expect_whole_dim(layouts::named(module, "x"), x, "a norm", -1);
    const Tensor w = widened(frame, norm.weight->weight()), b = widened(frame, norm.bias->weight());
    if (x.size(1) != w.count())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {}; expected (batch, {}, …)", layouts::named(module, "x").text(),
                              to_string(x.shape()), w.count()));
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
    kernels::batch_norm_statistics(frame.kernels(), all.data_ptr<double>(),
                                   all.data_ptr<double>() + all_groups, count_of(norm, x), eps,
                                   statistics.data_ptr<float>(), statistics.data_ptr<float>() + all_groups,
                                   nullptr, nullptr, all_groups);
    const Tensor of_each = of_channels(frame, statistics, s);
    const Tensor means = of_each.slice_flat(0, {s.rows()}), inv = of_each.slice_flat(s.rows(), {s.rows()});
    const Tensor y = frame.compute().make(x.shape(), DType::f32, Memory::shared).with_layout(x.layout());
    for (std::int64_t i = 0; i < s.batch; ++i)
      kernels::batch_norm_forward(frame.kernels(), x.data_ptr<float>() + i * s.map(), w.data_ptr<float>(),
                                  b.data_ptr<float>(), means.data_ptr<float>() + i * s.channels,
                                  inv.data_ptr<float>() + i * s.channels, y.data_ptr<float>() + i * s.map(),
                                  s.sample());
    frame.push(module, {x, means, inv});
    return {y};
  }

  // With x^ = (x - mean) inv_std and g = dy weight: dweight = Σ dy x^, dbias = Σ dy, dx = inv_std (g - mean(g) - x^ mean(g x^)), the means over a group
  // on all ranks.
  Tensors backward_cut(Module& module, const Tensor& dy, const LayoutRef&, Frame& frame) const override {
    auto& norm = dynamic_cast<GroupNorm&>(module);
    const Tensors kept = frame.pop(module);
    const Tensor &x = kept[0], &means = kept[1], &inv = kept[2];
    expect_gradient(module, dy, x.shape(), x.layout());
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
    return {dx};
  }
};

}  // namespace

std::shared_ptr<const Passes> group_norm_passes(const DeviceMesh& axes) {
  return std::make_shared<GroupNormPasses>(axes);
}

}  // namespace weft::domain
