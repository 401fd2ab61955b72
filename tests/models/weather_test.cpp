// The stage of a weather model: what it refuses, and how its plans split it. For its numbers see
// weather_golden_test.cpp.
#include "weft/models/weather.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/gradients.hpp"
#include "weft/train/replicas.hpp"

namespace weft::weather_test {
namespace {

using test::error_text;

WeatherStageConfig small() {
  WeatherStageConfig c;
  c.dim = 8, c.depth = 2, c.head_dim = 4, c.local_window = 2, c.global_window = 2;
  return c;
}

TEST(WeatherStage, RefusesSizes) {
  const auto refused = [](auto change) {
    WeatherStageConfig c = small();
    change(c);
    return error_text(ErrorCode::bad_argument, [&] { WeatherStage{c}; });
  };
  EXPECT_EQ(refused([](WeatherStageConfig& c) { c.depth = 0; }),
            "weather stage: depth is 0; expected at least 1");
  EXPECT_EQ(refused([](WeatherStageConfig& c) { c.global_window = -1; }),
            "weather stage: global_window is -1; expected at least 1");
  EXPECT_EQ(refused([](WeatherStageConfig& c) { c.head_dim = 9; }),
            "weather stage: head_dim is 9; expected at most dim 8");
}

TEST(WeatherStage, RefusesMapsThatAreNoWholeWindows) {
  Context context;
  Compute compute(context, 1);
  WeatherStage stage(small());
  materialise(stage, compute);
  initialise(stage, 1);
  Frame frame = Frame::inference(compute);
  const auto text = [&](const Shape& shape) {
    return error_text(ErrorCode::bad_argument, [&] { stage.forward(Tensor::zeros(context, shape), frame); });
  };
  EXPECT_EQ(text({1, 8, 3, 4}),
            "\"layers.0.0\": x is (1, 8, 3, 4); expected height and width in whole windows of 2x2");
  EXPECT_EQ(text({1, 7, 4, 4}), "\"layers.0.0\": x is (1, 7, 4, 4); expected (batch, 8, height, width)");
  EXPECT_EQ(stage.forward(Tensor::zeros(context, {0, 8, 4, 4}), frame)[0].shape(), Shape({0, 8, 4, 4}));
}

TEST(WeatherStage, ItsPlansNameHeadsThatDoNotDivide) {
  Context context;
  WeatherStage stage(small());
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}, {"tp", 3}}, 0);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { parallelize(stage, mesh["tp"]); }),
            "parallelize: \"layers.0.0\" has 2 heads; tp=3 needs at least one for each rank (2 = 3 x 0 + 2)");
  for (const Parameter* p : stage.parameters()) EXPECT_EQ(p->layout(), nullptr) << p->path();
}

TEST(WeatherStage, ItsPlansHaveOneBoundaryForQKAndV) {
  Context context;
  WeatherStage stage(small());
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}, {"tp", 2}}, 0);
  EXPECT_EQ(parallelize(stage, mesh["tp"]).split, 8);
  std::string boundaries;
  stage.get("layers.1").visit([&](Module& m) {
    for (std::size_t i = 0; i < m.before().size(); ++i) boundaries += m.path() + " before, ";
    for (std::size_t i = 0; i < m.after().size(); ++i) boundaries += m.path() + " after, ";
  });
  EXPECT_EQ(boundaries,
            "layers.1.0.norm after, layers.1.0.to_out after, layers.1.1.layers.1 before, layers.1.1.layers.4 "
            "after, "
            "layers.1.2.norm after, layers.1.2.to_out after, layers.1.3.layers.1 before, layers.1.3.layers.4 "
            "after, ");
}

// All Linear layers of a stage with a spectral norm, those of the position bias, too: split on request, and
// whole by default.
TEST(WeatherStage, WithSpectralNormsIsAsOnOneRank) {
  for (const bool split : {true, false})
    test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& rank) {
      SCOPED_TRACE(split ? "split" : "whole");
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 2}});
      WeatherStageConfig config = small();
      config.dim = 32, config.depth = 1, config.head_dim = 8, config.init_std = 0.5;
      WeatherStage serial(config), parallel(config);
      for (WeatherStage* stage : {&serial, &parallel}) EXPECT_EQ(add_spectral_norm(*stage), 20);
      const OwnPlanCount count = parallelize(
          parallel, mesh["tp"],
          OwnPlanOptions{.under_spectral_norm = split ? WholeByDefault::split : WholeByDefault::skip});
      EXPECT_EQ(count.split, split ? 4 : 0);
      replicate(parallel, mesh);
      for (WeatherStage* stage : {&serial, &parallel}) {
        materialise(*stage, compute);
        initialise(*stage, 3);
      }
      Tensor x(rank.context, {2, 32, 4, 4}), dy(rank.context, {2, 32, 4, 4});
      RandomStream(5, "x").normal(0, x.count(), x.f32().data());
      RandomStream(5, "dy").normal(0, dy.count(), dy.f32().data());
      const auto stated = [&](const Tensor& t) { return t.with_layout(replicated_layout(mesh, t.shape())); };
      const auto expect_near = [](const Tensor& got, const Tensor& expected, const std::string& what) {
        double largest = 0, worst = 0;
        for (std::size_t i = 0; i < expected.f32().size(); ++i) {
          largest = std::max(largest, std::abs(static_cast<double>(expected.f32()[i])));
          worst = std::max(
              worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(expected.f32()[i])));
        }
        EXPECT_LE(worst, 1e-4 * largest) << what;
      };
      Frame plain(compute), frame(compute);
      expect_near(full(parallel.forward(stated(x), frame)[0]), serial.forward(x, plain)[0], "y");
      expect_near(full(parallel.backward(stated(dy), frame)[0]), serial.backward(dy, plain)[0], "dx");
      for (Parameter* p : serial.parameters()) {
        const ParameterRef other = parallel.parameter(p->path());
        ASSERT_TRUE(other->has_gradient()) << p->path();
        if (p->path().ends_with("dpb.layers.9.bias"))
          continue;  // added to all scores of a softmax: 0 up to rounding
        expect_near(full(other->gradient()), p->gradient(), p->path());
      }
    });
}

// Replicas, the position bias of all heads among them, have the same bits after 200 steps.
TEST(WeatherStage, ReplicasAreEqualAfterTwoHundredSteps) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 2}});
    WeatherStageConfig config = small();
    config.dim = 16, config.depth = 1, config.head_dim = 4, config.init_std = 0.3;
    WeatherStage stage(config);
    parallelize(stage, mesh["tp"]);
    replicate(stage, mesh);
    materialise(stage, compute);
    initialise(stage, 3);
    const std::vector<Parameter*> parameters = stage.parameters();
    AdamW adamw(compute, parameters, {});
    Tensor x(rank.context, {2, 16, 4, 4}), target(rank.context, {2, 16, 4, 4});
    RandomStream(5, "x").normal(0, x.count(), x.f32().data());
    RandomStream(5, "target").normal(0, target.count(), target.f32().data());
    const auto stated = [&](const Tensor& t) { return t.with_layout(replicated_layout(mesh, t.shape())); };
    MeanSquaredError loss;
    Frame frame(compute);
    double first = 0, last = 0;
    for (int step = 0; step < 200; ++step) {
      adamw.zero_gradients();
      const Tensor y = stage.forward(stated(x), frame)[0];
      last = full(loss.forward({y, stated(target), global_count(compute, y)}, frame)[0]).as<double>()[0];
      if (step == 0) first = last;
      stage.backward(loss.backward({}, frame), frame);
      sync_replicated_gradients(parameters, mesh["tp"]);
      clip_grad_norm(parameters, 1.0);
      adamw.step(3e-3);
    }
    EXPECT_LT(last, 0.5 * first) << "nothing was learnt";
    check_replicas(parameters, mesh["tp"]);
    if (rank.rank == 1) stage.parameter("layers.0.0.dpb.layers.0.weight")->write_master().f32()[0] += 1e-6f;
    EXPECT_TRUE(
        test::error_text([&] {
          check_replicas(parameters, mesh["tp"]);
        }).starts_with("mismatch: check_replicas: \"layers.0.0.dpb.layers.0.weight\" is Replicate on tp=2"));
  });
}

}  // namespace
}  // namespace weft::weather_test
