// A padded weather model whose maps are cut in space, with heads and samples cut on other axes: passes, and a training, as on one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/random.hpp"
#include "weft/domain/domain.hpp"
#include "weft/domain/loss.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/gradients.hpp"

namespace weft::domain_models_test {
namespace {

using test::Rank;

// Maps of 22 x 12 are padded to 24 x 16, a globe's columns going on on the other side.
constexpr std::int64_t kHeight = 22, kWidth = 12, kBatch = 4;
constexpr SpatialPadding kPadding{1, 1, 2, 2};

std::unique_ptr<Sequential> make_model() {
  auto model = std::make_unique<Sequential>();
  model->append("embed", std::make_unique<Conv2d>(
                             Conv2dConfig{.in = 3, .out = 32, .kernel = 4, .stride = 2, .padding = 1}));
  model->append("stage",
                std::make_unique<WeatherStage>(WeatherStageConfig{
                    .dim = 32, .depth = 1, .head_dim = 8, .local_window = 2, .global_window = 4, .mult = 2}));
  model->append("norm", std::make_unique<GroupNorm>(2, 32));
  model->append("space",
                std::make_unique<LayerNorm>(Shape{32, 12, 8}));  // a gain for each pixel, cut as they are
  model->append("up", std::make_unique<ConvTranspose2d>(
                          ConvTranspose2dConfig{.in = 32, .out = 6, .kernel = 2, .stride = 2}));
  model->append("out", std::make_unique<Conv2d>(Conv2dConfig{.in = 6, .out = 2, .kernel = 3, .padding = 1}));
  return model;
}

Tensor random_map(Context& context, const Shape& shape, std::string_view name) {
  Tensor t(context, shape);
  RandomStream(7, name).normal(0, t.count(), t.f32().data());
  return t;
}

double difference(const Tensor& got, const Tensor& want) {
  double largest = 1e-30, worst = 0;
  for (const float f : want.f32()) largest = std::max(largest, std::abs(static_cast<double>(f)));
  for (std::size_t i = 0; i < want.f32().size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(want.f32()[i])));
  return worst / largest;
}

void set_up(Module& model, Compute& compute) {
  for (Parameter* p : model.parameters())
    if (p->global_shape().rank() > 1 && p->global_shape()[0] > 1) p->set_init(Normal{0.2});
  materialise(model, compute);
  initialise(model, 5);
}

// The whole's maps, padded on one rank.
Tensor padded(Compute& compute, const Tensor& x) {
  Pad2d pad({.top = kPadding.top,
             .bottom = kPadding.bottom,
             .left = kPadding.left,
             .right = kPadding.right,
             .rows = kernels::Padding::replicate,
             .columns = kernels::Padding::circular});
  Frame frame = Frame::inference(compute);
  return pad.forward(x, frame)[0];
}

struct Training {
  std::vector<double> losses;
  std::vector<Tensor> weights;  // whole
  Tensor y;                     // of the first step, whole
};

Tensor latitude_weights(Context& context) {
  Tensor w(context, {kHeight});
  for (std::int64_t i = 0; i < kHeight; ++i)
    w.f32()[static_cast<std::size_t>(i)] =
        static_cast<float>(std::cos((static_cast<double>(i) + 0.5) / kHeight * 3.14159 - 1.5708));
  return w;
}

// Steps on a mesh of dp, tp and h, of one rank each where it is the serial run.
Training train(Compute& compute, const DeviceMesh& mesh, int steps) {
  Context& context = compute.context();
  const std::unique_ptr<Sequential> model = make_model();
  parallelize(*model, mesh["tp"]);
  DomainOptions options;
  options.data = mesh["dp"];
  const DomainManager manager = apply_domain_parallel(*model, mesh["h"], options);
  replicate(*model, mesh);
  set_up(*model, compute);
  SGD optimizer(compute, model->parameters(), {.momentum = 0.9});
  MapSquaredError error;
  Training training;
  const Tensor weights =
      distribute(latitude_weights(context), make_layout(mesh, {{"h", Shard{0}}}, {kHeight}));
  for (int step = 0; step < steps; ++step) {
    const Tensor x =
        padded(compute, random_map(context, {kBatch, 3, kHeight, kWidth}, "x" + std::to_string(step % 4)));
    const Tensor target = random_map(context, {kBatch, 2, kHeight, kWidth}, "t" + std::to_string(step % 4));
    Frame frame(compute, {.seed = 1, .step = step});
    const Tensor part = distribute(x, manager.layout(x.shape()));
    const Tensor padded_y = model->forward(part, frame)[0];
    const Tensor y = unpad_shard_interp(padded_y, kPadding, manager, kHeight, kWidth);
    const Tensor loss = error.forward({y, distribute(target, y.layout()), weights}, frame)[0];
    training.losses.push_back(full(loss).as<double>()[0]);
    if (step == 0) training.y = full(y);
    const Tensor dy = error.backward({}, frame)[0];
    model->backward(unpad_shard_interp_adjoint(dy, kPadding, padded_y.layout(), manager), frame);
    sync_replicated_gradients(model->parameters(), mesh);
    optimizer.step(0.05);
    for (Parameter* p : model->parameters()) p->zero_gradient();
  }
  for (Parameter* p : model->parameters()) training.weights.push_back(full(p->master()));
  return training;
}

void expect_as_serial(const MeshShape& shape, int steps) {
  {
    Context context;
    Compute compute(context, 1);
    const Training serial =
        train(compute, DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 1}, {"h", 1}}, 0), steps);
    EXPECT_LT(serial.losses.back(), steps > 10 ? 0.98 * serial.losses.front() : 1e9);
    test::run_ranks(test::Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute mine(rank.context, 1);
      const DeviceMesh mesh(rank.group(), shape);
      const Training got = train(mine, mesh, steps);
      EXPECT_LE(difference(got.y, serial.y), 5e-6);
      ASSERT_EQ(got.losses.size(), serial.losses.size());
      for (std::size_t i = 0; i < got.losses.size(); ++i)
        EXPECT_NEAR(got.losses[i] / serial.losses[i], 1, i == 0 ? 1e-6 : 1e-4) << "step " << i;
      ASSERT_EQ(got.weights.size(), serial.weights.size());
      double worst = 0;
      for (std::size_t i = 0; i < got.weights.size(); ++i)
        for (std::size_t j = 0; j < got.weights[i].f32().size(); ++j)
          worst = std::max(
              worst, static_cast<double>(std::abs(got.weights[i].f32()[j] - serial.weights[i].f32()[j])));
      EXPECT_LE(worst, steps == 1 ? 1e-6 : 2e-4);
    });
  }
}

TEST(DomainTraining, PaddedMapsOnOneToSixRanks) {
  for (const int n : {1, 2, 3, 4, 6}) expect_as_serial({{"dp", 1}, {"tp", 1}, {"h", n}}, 1);
}

TEST(DomainTraining, TwentyStepsOnEightRanks) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 2}, {"tp", 2}, {"h", 2}}, MeshShape{{"dp", 1}, {"tp", 2}, {"h", 4}},
        MeshShape{{"dp", 4}, {"tp", 1}, {"h", 2}}, MeshShape{{"dp", 1}, {"tp", 4}, {"h", 2}}})
    expect_as_serial(shape, 20);
}

// What ranks hold of a gain for each pixel is saved as the whole's; another mesh loads its parts of it.
TEST(DomainCheckpoint, AGainOfEachPixelGoesFromMeshToMesh) {
  const test::TemporaryFolder folder;
  const auto model_on = [](Compute& compute, const DeviceMesh& mesh) {
    std::unique_ptr<Sequential> model = make_model();
    apply_domain_parallel(*model, mesh);
    replicate(*model, mesh);
    materialise(*model, compute);
    return model;
  };
  const auto value = [](const Parameter& p, std::int64_t i) {
    return static_cast<float>(i % 4099) + static_cast<float>(p.path().size());
  };
  test::run_ranks(test::Ranks::threads, 3, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 3}, {"w", 1}});
    const std::unique_ptr<Sequential> model = model_on(compute, mesh);
    EXPECT_EQ(model->parameter("space.weight")->layout(),
              make_layout(mesh, {{"h", Shard{1}}, {"w", Shard{2}}}, {32, 12, 8}));
    for (Parameter* p : model->parameters()) {
      Tensor whole(rank.context, p->global_shape());
      for (std::int64_t i = 0; i < whole.count(); ++i)
        whole.f32()[static_cast<std::size_t>(i)] = value(*p, i);
      p->set_master(distribute(whole, p->layout()));
    }
    save_checkpoint(folder.path(), mesh, 1, *model, {});
  });
  test::run_ranks(test::Ranks::threads, 4, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 2}, {"w", 2}});
    const std::unique_ptr<Sequential> model = model_on(compute, mesh);
    load_checkpoint(folder.path(), mesh, *model, {});
    for (Parameter* p : model->parameters()) {
      const Tensor whole = full(p->master());
      ASSERT_EQ(whole.shape(), p->global_shape());
      for (std::int64_t i = 0; i < whole.count(); ++i)
        ASSERT_EQ(whole.f32()[static_cast<std::size_t>(i)], value(*p, i)) << p->path() << " " << i;
    }
  });
}

TEST(MapSquaredError, RefusesWhatDoesNotFit) {
  Context context;
  Compute compute(context, 1);
  Frame frame = Frame::inference(compute);
  MapSquaredError error;
  const Tensor y(context, {1, 2, 3, 4});
  EXPECT_EQ(test::error_text([&] {
              error.forward({y, Tensor(context, {1, 2, 3, 5})}, frame);
            }),
            "bad_argument: \"\": target is (1, 2, 3, 5); expected (1, 2, 3, 4) as y");
  EXPECT_EQ(test::error_text([&] {
              error.forward({y, y, Tensor(context, {4})}, frame);
            }),
            "bad_argument: \"\": weights is (4); expected (3), one for each row of y");
  EXPECT_EQ(test::error_text([&] { error.forward(y, frame); }),
            "bad_argument: \"\": got 1 inputs; expected 2");
}

}  // namespace
}  // namespace weft::domain_models_test
