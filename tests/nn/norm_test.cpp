// Group norm and batch norm on one rank, against the plain-loop kernels and finite differences. Over ranks:
// tp/layers.
#include "weft/nn/norm.hpp"

#include "nn/kernels/reference_maps.hpp"
#include "nn/support.hpp"

namespace weft::norm_test {
namespace {

namespace reference = kernels::reference;
using test::doubles;
using test::error_text;
using test::random_tensor;

using Doubles = std::vector<double>;
Doubles zeros(std::int64_t n) { return Doubles(static_cast<std::size_t>(n)); }

void set_up(Module& module, Compute& compute) {
  materialise(module, compute);
  initialise(module, 3);
  for (Parameter* p : module.parameters())
    RandomStream(5, p->path()).normal(0, p->master().count(), p->write_master().f32().data());
}

TEST(GroupNormLayer, NormalisesEachGroupOfChannels) {
  test::Bench bench;
  GroupNorm layer(2, 6, 1e-3);
  set_up(layer, bench.compute);
  const Tensor x = random_tensor(bench.context, {2, 6, 3, 2}, "x");
  Doubles y = zeros(72), mean = zeros(4), inv = zeros(4);
  reference::group_norm_forward(doubles(x).data(), doubles(layer.weight->master()).data(),
                                doubles(layer.bias->master()).data(), y.data(), mean.data(), inv.data(),
                                {2, 6, 6}, 2, 1e-3);
  Frame frame = Frame::inference(bench.compute);
  test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y");
  test::expect_gradients_match_differences(layer, x, bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor(bench.context, {2, 4, 3}), frame);
                       }),
            "\"\": x is (2, 4, 3); expected (batch, 6, …)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [] { GroupNorm(4, 6); }),
            "group norm: 6 channels in 4 groups; expected at least 1 of both, and groups that divide the "
            "channels");
  EXPECT_FALSE(layer.shard_rule(Split::row).refused.empty());
}

// Over several dimensions it is a layer norm of rows of so many elements, with a gain for each.
TEST(LayerNormLayer, OverSeveralDimensions) {
  test::Bench bench;
  for (const Shape& dims : {Shape{3, 4, 2}, Shape{4, 2}}) {
    LayerNorm layer(dims, 1e-3);
    set_up(layer, bench.compute);
    const Tensor x = random_tensor(bench.context, {2, 3, 4, 2}, "x");
    for (float& f : x.f32()) f = f * 2 + 3;
    const std::int64_t n = dims.count();
    const Doubles in = doubles(x), w = doubles(layer.weight->master()), b = doubles(layer.bias->master());
    Doubles y = zeros(48);
    for (std::int64_t row = 0; row < 48 / n; ++row) {
      double mean = 0, variance = 0;
      const auto at = [&](std::int64_t i) { return static_cast<std::size_t>(row * n + i); };
      for (std::int64_t i = 0; i < n; ++i) mean += in[at(i)] / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i)
        variance += (in[at(i)] - mean) * (in[at(i)] - mean) / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i)
        y[at(i)] = (in[at(i)] - mean) / std::sqrt(variance + 1e-3) * w[static_cast<std::size_t>(i)] +
                   b[static_cast<std::size_t>(i)];
    }
    Frame frame = Frame::inference(bench.compute);
    test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y");
    test::expect_gradients_match_differences(layer, x, bench.compute);
    EXPECT_EQ(error_text(ErrorCode::bad_argument,
                         [&] {
                           layer.forward(Tensor(bench.context, {2, 3, 2, 4}), frame);
                         }),
              "\"\": x is (2, 3, 2, 4); expected last dimensions of " + to_string(dims) + " (the weight's)");
  }
}

constexpr kernels::MapShape kMaps{3, 4, 5};
constexpr std::int64_t kCount = 3 * 4 * 5;

struct Expected {
  Doubles mean, variance, y;
};

// By loops: each channel's mean and variance, and y.
Expected normalised(const BatchNorm& layer, const Tensor& x) {
  const Doubles in = doubles(x), w = doubles(layer.weight->master()), b = doubles(layer.bias->master());
  Expected e{zeros(4), zeros(4), zeros(kCount)};
  const auto each = [&](auto&& run) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(kCount); ++i) run(i, i / 5 % 4);
  };
  each([&](std::size_t i, std::size_t c) { e.mean[c] += in[i] / 15; });
  each(
      [&](std::size_t i, std::size_t c) { e.variance[c] += (in[i] - e.mean[c]) * (in[i] - e.mean[c]) / 15; });
  each([&](std::size_t i, std::size_t c) {
    e.y[i] = (in[i] - e.mean[c]) / std::sqrt(e.variance[c] + layer.config().eps) * w[c] + b[c];
  });
  return e;
}

TEST(BatchNormLayer, NormalisesEachChannelAndKeepsRunningStatistics) {
  test::Bench bench;
  BatchNorm layer(4, {.eps = 1e-3, .momentum = 0.25});
  set_up(layer, bench.compute);
  Doubles mean = zeros(4), variance(4, 1.0);
  for (int pass = 0; pass < 3; ++pass) {
    const Tensor x = random_tensor(bench.context, {3, 4, 5}, "x" + std::to_string(pass));
    for (float& f : x.f32()) f = f * 2 + 3;
    Frame frame(bench.compute);
    const Expected e = normalised(layer, x);
    test::expect_near(layer.forward(x, frame)[0], e.y, 1e-5, "y");
    for (std::size_t c = 0; c < 4; ++c) {
      mean[c] = 0.75 * mean[c] + 0.25 * e.mean[c];
      variance[c] = 0.75 * variance[c] + 0.25 * e.variance[c] * 15 / 14;
    }
    test::expect_near(layer.running_mean->tensor(), mean, 1e-5, "running_mean");
    test::expect_near(layer.running_var->tensor(), variance, 1e-5, "running_var");
  }
  EXPECT_EQ(layer.num_batches_tracked->tensor().as<std::int64_t>()[0], 3);
  // Outside training the running statistics are used, and do not change.
  const Tensor x = random_tensor(bench.context, {3, 4, 5}, "x");
  Doubles y;
  for (std::size_t i = 0; i < static_cast<std::size_t>(kCount); ++i) {
    const std::size_t c = i / 5 % 4;
    y.push_back((doubles(x)[i] - mean[c]) / std::sqrt(variance[c] + 1e-3) *
                    doubles(layer.weight->master())[c] +
                doubles(layer.bias->master())[c]);
  }
  Frame frame = Frame::inference(bench.compute);
  test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y of inference");
  test::expect_near(layer.running_mean->tensor(), mean, 1e-5, "running_mean after inference");
  EXPECT_EQ(layer.num_batches_tracked->tensor().as<std::int64_t>()[0], 3);
}

// Forward passes of a training, so that the statistics depend on x.
TEST(BatchNormLayer, GradientsMatchDifferencesOfTrainingPasses) {
  test::Bench bench;
  BatchNorm layer(4);
  set_up(layer, bench.compute);
  const Tensor x = random_tensor(bench.context, {3, 4, 5}, "x"),
               cotangent = random_tensor(bench.context, {3, 4, 5}, "dy");
  Frame frame(bench.compute);
  layer.forward(x, frame);
  const Tensor dx = layer.backward(cotangent, frame)[0];
  const auto loss = [&] {
    Frame scratch(bench.compute);
    return test::dot(layer.forward(x, scratch)[0], cotangent);
  };
  const auto check = [&](const Tensor& at, const Tensor& gradient, const std::string& what) {
    const Tensor direction = random_tensor(bench.context, at.shape(), "direction of " + what);
    const std::vector<float> kept = test::floats(at);
    double value[2];
    for (const int side : {0, 1}) {
      for (std::size_t i = 0; i < kept.size(); ++i)
        at.f32()[i] = kept[i] + (side == 0 ? 1.0f : -1.0f) / 64 * direction.f32()[i];
      value[side] = loss();
    }
    std::ranges::copy(kept, at.f32().begin());
    const double scale = std::sqrt(test::dot(gradient, gradient) * test::dot(direction, direction));
    EXPECT_NEAR((value[0] - value[1]) * 32, test::dot(gradient, direction), 2e-3 * scale) << what;
  };
  check(x, dx, "x");
  for (Parameter* p : layer.parameters()) check(p->master(), p->gradient(), p->path());
}

TEST(BatchNormLayer, WithRunningStatisticsTheyAreConstants) {
  test::Bench bench;
  BatchNorm layer(4);
  set_up(layer, bench.compute);
  layer.running_mean->tensor().f32()[1] = 2;
  layer.running_var->tensor().f32()[2] = 4;
  const Tensor x = random_tensor(bench.context, {3, 4, 5}, "x"),
               dy = random_tensor(bench.context, {3, 4, 5}, "dy");
  Frame frame(bench.compute, {.training = false});
  layer.forward(x, frame);
  Doubles expected;
  for (std::size_t i = 0; i < static_cast<std::size_t>(kCount); ++i) {
    const std::size_t c = i / 5 % 4;
    expected.push_back(doubles(dy)[i] * doubles(layer.weight->master())[c] /
                       std::sqrt((c == 2 ? 4.0 : 1.0) + 1e-5));
  }
  test::expect_near(layer.backward(dy, frame)[0], expected, 1e-5, "dx");
}

TEST(BatchNormLayer, RefusesWhatDoesNotFit) {
  test::Bench bench;
  const auto refused = [](std::int64_t channels, const BatchNormConfig& c) {
    return error_text(ErrorCode::bad_argument, [&] { BatchNorm(channels, c); });
  };
  EXPECT_EQ(refused(0, {}), "batch norm: channels is 0; expected at least 1");
  EXPECT_EQ(refused(1, {.eps = 0}), "batch norm: eps is 0; expected more than 0");
  const std::string wrong = ": eps is -1; expected a finite number of 0 or more";
  EXPECT_EQ(error_text([] { RMSNorm(3, -1); }), "bad_argument: rms norm" + wrong);
  EXPECT_EQ(error_text([] { LayerNorm(3, -1); }), "bad_argument: layer norm" + wrong);
  EXPECT_EQ(error_text([] { ChannelNorm(3, -1); }), "bad_argument: channel norm" + wrong);
  EXPECT_EQ(error_text([] { GroupNorm(1, 3, -1); }), "bad_argument: group norm" + wrong);
  EXPECT_EQ(refused(1, {.momentum = 1.5}), "batch norm: momentum is 1.5; expected 0 to 1");
  BatchNorm layer(2);
  set_up(layer, bench.compute);
  Frame frame(bench.compute);
  const auto text = [&](const Shape& shape) {
    return error_text(ErrorCode::bad_argument,
                      [&] { layer.forward(Tensor::zeros(bench.context, shape), frame); });
  };
  EXPECT_EQ(text({3, 3}), "\"\": x is (3, 3); expected (batch, 2, …)");
  EXPECT_EQ(text({1, 2}),
            "\"\": x has 1 value for each channel; a batch norm needs at least 2 in a training");
}

}  // namespace
}  // namespace weft::norm_test
