// A padded weather model whose maps are cut in space, with heads and samples cut on other axes: passes, and a
// training, as on one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "support/errors.hpp"
#include "support/masked_backend.hpp"
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

// Maps of 22 x 12 are padded to 24 x 16; the columns wrap around the globe.
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

double largest_difference(const Tensor& got, const Tensor& want) {
  double worst = 0;
  for (std::size_t i = 0; i < want.f32().size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(want.f32()[i])));
  return worst;
}
double largest_of(const Tensor& t) {
  double largest = 1e-30;
  for (const float f : t.f32()) largest = std::max(largest, std::abs(static_cast<double>(f)));
  return largest;
}
double difference(const Tensor& got, const Tensor& want) {
  return largest_difference(got, want) / largest_of(want);
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

Tensor latitude_weights(Context& context) {
  Tensor w(context, {kHeight});
  for (std::int64_t i = 0; i < kHeight; ++i)
    w.f32()[static_cast<std::size_t>(i)] =
        static_cast<float>(std::cos((static_cast<double>(i) + 0.5) / kHeight * 3.14159 - 1.5708));
  return w;
}

// A training on a mesh of dp, tp, h and w; in the serial training each of them has one rank.
class Training {
 public:
  Training(Compute& compute, const DeviceMesh& mesh)
      : compute_(compute),
        mesh_(mesh),
        model_(make_model()),
        manager_(split(*model_, mesh)),
        optimizer_(made(*model_, compute), model_->parameters(), {.momentum = 0.9}),
        weights_(distribute(latitude_weights(compute.context()),
                            make_layout(mesh, {{"h", Shard{0}}}, {kHeight}))) {}

  /// The loss of a step; afterwards the parameters have the gradients.
  double pass(int step) {
    Context& context = compute_.context();
    for (Parameter* p : parameters()) p->zero_gradient();
    const Tensor x =
        padded(compute_, random_map(context, {kBatch, 3, kHeight, kWidth}, "x" + std::to_string(step % 4)));
    const Tensor target = random_map(context, {kBatch, 2, kHeight, kWidth}, "t" + std::to_string(step % 4));
    Frame frame(compute_, {.seed = 1, .step = step});
    const Tensor padded_y = model_->forward(distribute(x, manager_.layout(x.shape())), frame)[0];
    const Tensor y = unpad_shard_interp(padded_y, kPadding, manager_, kHeight, kWidth);
    const Tensor loss = error_.forward({y, distribute(target, y.layout()), weights_}, frame)[0];
    y_ = full(y);
    const Tensor dy = error_.backward({}, frame)[0];
    model_->backward(unpad_shard_interp_adjoint(dy, kPadding, padded_y.layout(), manager_), frame);
    sync_replicated_gradients(parameters(), mesh_);
    return full(loss).as<double>()[0];
  }
  void update() { optimizer_.step(0.05); }

  std::vector<Parameter*> parameters() const { return model_->parameters(); }
  const Tensor& y() const { return y_; }  ///< of the last pass, whole
  std::vector<Tensor> whole_gradients() const {
    std::vector<Tensor> all;
    for (const Parameter* p : parameters())
      all.push_back(copy_of(p->gradient_layout()->replicated() ? p->gradient() : full(p->gradient())));
    return all;
  }
  std::vector<Tensor> whole_weights() const {
    std::vector<Tensor> all;
    for (const Parameter* p : parameters()) all.push_back(copy_of(full(p->master())));
    return all;
  }
  /// `whole`: of all parameters, in order.
  void set_weights(const std::vector<Tensor>& whole) {
    std::size_t i = 0;
    for (Parameter* p : parameters()) p->set_master(distribute(whole[i++], p->layout()));
  }

 private:
  Tensor copy_of(const Tensor& t) const { return t.clone(compute_.context()); }
  static DomainManager split(Module& model, const DeviceMesh& mesh) {
    parallelize(model, mesh["tp"]);
    DomainOptions options;
    options.data = mesh["dp"];
    return apply_domain_parallel(model, mesh[{"h", "w"}], options);
  }
  Compute& made(Module& model, Compute& compute) {
    replicate(model, mesh_);
    set_up(model, compute);
    return compute;
  }

  Compute& compute_;
  DeviceMesh mesh_;
  std::unique_ptr<Sequential> model_;
  DomainManager manager_;
  SGD optimizer_;
  MapSquaredError error_;
  Tensor weights_, y_;
};

MeshShape mesh_of(int dp, int tp, int h, int w = 1) { return {{"dp", dp}, {"tp", tp}, {"h", h}, {"w", w}}; }

// The largest difference of a step, relative to the largest element. A constant added to all scores changes
// nothing, so gradients of a position bias are sums of parts that cancel; and its first norm multiplies
// rounding by 1 / sqrt(eps) at offset (0, 0), if all features are alike. They are compared with the
// largest one of their attention.
struct Bounds {
  double y = 1e-6, loss = 1e-6, gradients = 1e-6, of_position_bias = 5e-6;
};
Bounds bounds_of(const MeshShape& shape) {
  if (shape.size() == 1) return {0, 0, 0, 0};
  if (shape.size("tp") == 1) return {};
  // Tensor ranks sum products in another order than one rank.
  return {.gradients = 2e-6, .of_position_bias = 1e-5};
}

void expect_gradients(const std::vector<Parameter*>& parameters, const std::vector<Tensor>& got,
                      const std::vector<Tensor>& want, const Bounds& bounds, int step) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    const std::string& path = parameters[i]->path();
    const std::size_t dpb = path.find("dpb.");
    double largest = 1e-30;
    for (std::size_t j = 0; j < want.size(); ++j)
      if (i == j || (dpb != std::string::npos && parameters[j]->path().starts_with(path.substr(0, dpb))))
        largest = std::max(largest, largest_of(want[j]));
    EXPECT_LE(largest_difference(got[i], want[i]),
              largest * (dpb == std::string::npos ? bounds.gradients : bounds.of_position_bias))
        << "step " << step << " " << path;
  }
}

// Every step begins with the weights that the split run has by then, on one rank, too: so what differs is the
// rounding of this step alone, and nothing that adds up can hide in a wider bound.
void expect_each_step_as_serial(const MeshShape& shape, int steps, test::Ranks kind = test::Ranks::threads,
                                const test::RankOptions& options = {}) {
  const Bounds bounds = bounds_of(shape);
  const auto body = [&](Rank& rank) {
    SCOPED_TRACE(to_string(shape));
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), shape),
        one = DeviceMesh::arithmetic(rank.context, mesh_of(1, 1, 1), 0);
    Training split(compute, mesh);
    std::optional<Training> serial;
    if (rank.rank == 0) serial.emplace(compute, one);
    double first = 0, last = 0;
    for (int step = 0; step < steps; ++step) {
      const std::vector<Tensor> weights = split.whole_weights();
      const double loss = split.pass(step);
      const std::vector<Tensor> gradients = split.whole_gradients();
      split.update();
      (step == 0 ? first : last) = loss;
      if (!serial) continue;
      serial->set_weights(weights);
      const double want = serial->pass(step);
      EXPECT_LE(difference(split.y(), serial->y()), bounds.y) << "step " << step;
      EXPECT_LE(std::abs(loss / want - 1), bounds.loss) << "step " << step;
      expect_gradients(split.parameters(), gradients, serial->whole_gradients(), bounds, step);
    }
    if (steps > 10) {
      EXPECT_LT(last, 0.98 * first);  // it learns, so that steps differ
    }
  };
  test::run_ranks(kind, shape.size(), body, options);
}
// Losses of steps that go on from each other, and the weights after the last one.
struct Trajectory {
  std::vector<double> losses;
  std::vector<Tensor> weights;
};
Trajectory steps_of(Compute& compute, const DeviceMesh& mesh, int steps) {
  Training training(compute, mesh);
  Trajectory t;
  for (int step = 0; step < steps; ++step) {
    t.losses.push_back(training.pass(step));
    training.update();
  }
  t.weights = training.whole_weights();
  return t;
}

TEST(DomainTraining, PaddedMapsOnOneToSixRanks) {
  for (const auto& [h, w] :
       {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 1}, {6, 1}, {1, 2}, {2, 2}, {1, 4}, {3, 2}, {2, 3}})
    expect_each_step_as_serial(mesh_of(1, 1, h, w), 1);
}

TEST(DomainTraining, OverProcessesAndByMessages) {
  expect_each_step_as_serial(mesh_of(1, 1, 2, 2), 2, test::Ranks::processes);
  test::RankOptions by_messages;
  by_messages.factory = test::masked(test::messages_only());
  expect_each_step_as_serial(mesh_of(1, 1, 3), 2, test::Ranks::threads, by_messages);
}

const std::vector<MeshShape>& eight_ranks() {
  static const std::vector<MeshShape> all{
      mesh_of(2, 2, 2), mesh_of(1, 2, 4),    mesh_of(4, 1, 2),    mesh_of(1, 4, 2),    mesh_of(2, 1, 4),
      mesh_of(1, 1, 8), mesh_of(1, 2, 2, 2), mesh_of(2, 1, 2, 2), mesh_of(1, 1, 4, 2), mesh_of(2, 4, 1)};
  return all;
}

TEST(DomainTraining, EachOfTwentyStepsOnEightRanks) {
  for (const MeshShape& shape : eight_ranks()) expect_each_step_as_serial(shape, 20);
}

TEST(DomainTraining, TwentyStepsOnEightRanks) {
  Context context;
  Compute compute(context, 1);
  const Trajectory serial = steps_of(compute, DeviceMesh::arithmetic(context, mesh_of(1, 1, 1), 0), 20);
  for (const MeshShape& shape : eight_ranks())
    test::run_ranks(test::Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute mine(rank.context, 1);
      const Trajectory got = steps_of(mine, DeviceMesh(rank.group(), shape), 20);
      for (std::size_t i = 0; i < serial.losses.size(); ++i)
        EXPECT_NEAR(got.losses[i] / serial.losses[i], 1, 1e-6) << "step " << i;
      ASSERT_EQ(got.weights.size(), serial.weights.size());
      for (std::size_t i = 0; i < serial.weights.size(); ++i)
        EXPECT_LE(largest_difference(got.weights[i], serial.weights[i]), 1e-6) << i;
    });
}

// The parts of a gain for each pixel are saved as one tensor; another mesh loads its parts of it.
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
