// Group norm of maps that are cut in space. Each rank sums its own pixels in f64, channel by channel; the sums of a group are added over ranks in one
// all-reduce of two numbers for each sample and group, and the number of pixels, which parts of different size share.
#include <algorithm>
#include <cmath>

#include "domain/rules.hpp"
#include "nn/norms/numbers.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain {
namespace {

using norms::Numbers;
using norms::placed;

// The sums over the axes that cut x in height or width.
Numbers summed_in_space(Context& context, const Numbers& mine, const LayoutRef& x) {
  return norms::summed(context, mine, x, [&](std::size_t axis) {
    return is_shard(x->placements[axis], kHeight) || is_shard(x->placements[axis], kWidth);
  });
}

Numbers on_host(Frame& frame, const Tensor& t) { return norms::on_host(frame.compute().context(), t); }

// Sizes of this rank's part.
struct Sizes {
  std::int64_t batch, channels, pixels, groups;
  kernels::MapShape sample() const { return {1, channels, pixels}; }
  std::int64_t map() const { return channels * pixels; }  // elements of a sample
  std::size_t group(std::int64_t b, std::int64_t c) const {
    return static_cast<std::size_t>(b * groups + c / (channels / groups));
  }
};

Sizes sizes_of(const GroupNorm& norm, const Tensor& x) {
  const std::int64_t of_group = norm.weight->global_shape()[0] / norm.groups();
  if (x.size(1) % of_group != 0)
    throw Error(ErrorCode::layout, fmt::format("{} has {} channels on this rank; expected whole groups of {}",
                                               layouts::named(norm, "x").text(), x.size(1), of_group));
  return {x.size(0), x.size(1), x.size(2) * x.size(3), x.size(1) / of_group};
}

class GroupNormPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    auto& norm = dynamic_cast<GroupNorm&>(module);
    if (inputs.size() != 1 || !cut_in_space(inputs[0].layout())) return own_forward(module, inputs, frame);
    const Tensor& x = inputs[0];
    maps::expect_map(module, x);
    layouts::expect_whole_dim(layouts::named(module, "x"), x, "a norm", -1);
    const Tensor w = widened(frame, norm.weight->weight()), b = widened(frame, norm.bias->weight());
    if (x.size(1) != w.count())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {}; expected (batch, {}, …)", layouts::named(module, "x").text(),
                              to_string(x.shape()), w.count()));
    const Sizes s = sizes_of(norm, x);
    const Tensor sums = frame.compute().make({s.batch, 2, s.channels}, DType::f64);
    for (std::int64_t i = 0; i < s.batch; ++i)
      kernels::channel_moments(frame.kernels(), x.data_ptr<float>() + i * s.map(),
                               sums.data_ptr<double>() + 2 * i * s.channels,
                               sums.data_ptr<double>() + (2 * i + 1) * s.channels, s.sample());
    const Numbers mine = on_host(frame, sums);
    const auto all_groups = static_cast<std::size_t>(s.batch * s.groups);
    Numbers of_groups(2 * all_groups + 1, 0.0);
    for (std::int64_t i = 0; i < s.batch; ++i)
      for (std::int64_t c = 0; c < s.channels; ++c) {
        of_groups[s.group(i, c)] += mine[static_cast<std::size_t>(2 * i * s.channels + c)];
        of_groups[all_groups + s.group(i, c)] += mine[static_cast<std::size_t>((2 * i + 1) * s.channels + c)];
      }
    of_groups.back() = static_cast<double>(s.pixels);
    of_groups = summed_in_space(frame.compute().context(), of_groups, x.layout());
    const double count =
        of_groups.back() * static_cast<double>(s.channels / std::max<std::int64_t>(1, s.groups));
    Numbers mean, inv_std;  // of each sample and channel
    for (std::int64_t i = 0; i < s.batch; ++i)
      for (std::int64_t c = 0; c < s.channels; ++c) {
        const double m = of_groups[s.group(i, c)] / count;
        mean.push_back(m);
        inv_std.push_back(
            1 / std::sqrt(std::max(0.0, of_groups[all_groups + s.group(i, c)] / count - m * m) + norm.eps()));
      }
    const Tensor means = placed(frame, mean), inv = placed(frame, inv_std);
    const Tensor y = frame.compute().make(x.shape(), DType::f32, Memory::shared).with_layout(x.layout());
    for (std::int64_t i = 0; i < s.batch; ++i)
      kernels::batch_norm_forward(frame.kernels(), x.data_ptr<float>() + i * s.map(), w.data_ptr<float>(),
                                  b.data_ptr<float>(), means.data_ptr<float>() + i * s.channels,
                                  inv.data_ptr<float>() + i * s.channels, y.data_ptr<float>() + i * s.map(),
                                  s.sample());
    const Tensor counted(frame.compute().context(), {1}, DType::f64);
    counted.as<double>()[0] = count;
    frame.push(module, {x, means, inv, counted});
    return {y};
  }

  // With x^ = (x - mean) inv_std and g = dy weight: dweight = Σ dy x^, dbias = Σ dy, dx = inv_std (g - mean(g) - x^ mean(g x^)), the means over a group
  // on all ranks.
  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override {
    auto& norm = dynamic_cast<GroupNorm&>(module);
    if (gradients.size() != 1 || !cut_in_space(gradients[0].layout()))
      return own_backward(module, gradients, frame);
    const Tensor& dy = gradients[0];
    const Tensors kept = frame.pop(module);
    const Tensor &x = kept[0], &means = kept[1], &inv = kept[2];
    const double count = kept[3].as<double>()[0];
    expect_gradient(module, dy, x.shape(), x.layout());
    const Sizes s = sizes_of(norm, x);
    const Tensor w = widened(frame, norm.weight->weight());
    const Tensor sums = frame.compute().make({s.batch, 2, s.channels}, DType::f64);
    for (std::int64_t i = 0; i < s.batch; ++i)
      kernels::batch_norm_backward_sums(
          frame.kernels(), dy.data_ptr<float>() + i * s.map(), x.data_ptr<float>() + i * s.map(),
          means.data_ptr<float>() + i * s.channels, inv.data_ptr<float>() + i * s.channels,
          sums.data_ptr<double>() + 2 * i * s.channels, sums.data_ptr<double>() + (2 * i + 1) * s.channels,
          s.sample());
    const Numbers mine = on_host(frame, sums), weights = on_host(frame, w);
    const auto all_groups = static_cast<std::size_t>(s.batch * s.groups),
               channels = static_cast<std::size_t>(s.channels);
    Numbers of_groups(2 * all_groups, 0.0), dweight(channels, 0.0), dbias(channels, 0.0);
    for (std::int64_t i = 0; i < s.batch; ++i)
      for (std::int64_t c = 0; c < s.channels; ++c) {
        const double sum = mine[static_cast<std::size_t>(2 * i * s.channels + c)],
                     with_x = mine[static_cast<std::size_t>((2 * i + 1) * s.channels + c)];
        dbias[static_cast<std::size_t>(c)] += sum;
        dweight[static_cast<std::size_t>(c)] += with_x;
        of_groups[s.group(i, c)] += weights[static_cast<std::size_t>(c)] * sum;
        of_groups[all_groups + s.group(i, c)] += weights[static_cast<std::size_t>(c)] * with_x;
      }
    const auto accumulate = [&](Parameter& p, const Numbers& gradient) {
      if (p.trainable())
        p.accumulate(
            placed(frame, gradient).with_layout(layouts::gradient_of(p.weight().layout(), x.layout(), 1)));
    };
    accumulate(*norm.bias, dbias);
    accumulate(*norm.weight, dweight);
    of_groups = summed_in_space(frame.compute().context(), of_groups, x.layout());
    Numbers mean_g, mean_gx;
    for (std::int64_t i = 0; i < s.batch; ++i)
      for (std::int64_t c = 0; c < s.channels; ++c) {
        mean_g.push_back(of_groups[s.group(i, c)] / count);
        mean_gx.push_back(of_groups[all_groups + s.group(i, c)] / count);
      }
    const Tensor of_g = placed(frame, mean_g), of_gx = placed(frame, mean_gx),
                 ones = placed(frame, Numbers(channels, 1.0)), zeros = placed(frame, Numbers(channels, 0.0));
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

std::shared_ptr<const Passes> group_norm_passes() { return std::make_shared<GroupNormPasses>(); }

}  // namespace weft::domain
