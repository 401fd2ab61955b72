// Recipes: models that the library knows and one that it does not know are built for any mesh in one order of
// steps; another order is an error.
#include "weft/models/recipe.hpp"

#include <gtest/gtest.h>

#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/gradients.hpp"

namespace weft::recipe_test {
namespace {

using test::expect_error;
using test::Rank;
using test::Ranks;

// --- the order of the steps ---

using Call = void (ModelBuilder::*)();
constexpr struct {
  const char* name;
  Call call;
  const char* reason;
} kSteps[] = {
    {"tensor parallel", &ModelBuilder::tensor_parallel,
     "layouts must be final before gradients are reduced or divided"},
    {"float8", &ModelBuilder::float8,
     "the weights of its layers are gathered as codes, and run again as they are"},
    {"activation checkpointing", &ModelBuilder::activation_checkpointing,
     "a block runs again inside the gather of its weights"},
    {"data parallel", &ModelBuilder::data_parallel, "a rank must never hold more than its part"},
    {"memory and values", &ModelBuilder::memory_and_values, ""},
};

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = 32, c.max_seq = 8;
  c.init_std = 0.1;
  return c;
}

TEST(Recipe, EveryPairOfStepsInTheWrongOrderNamesBoth) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 1}});
    for (std::size_t late = 0; late < std::size(kSteps); ++late)
      for (std::size_t before = late; before < std::size(kSteps); ++before)
        for (const DataForm form : {DataForm::ddp, DataForm::fsdp}) {
          ModelBuilder builder(transformer_recipe(small()), mesh, compute, {.data = form});
          const auto first = kSteps[before].call, second = kSteps[late].call;
          (builder.*first)();
          expect_error(
              ErrorCode::bad_argument,
              late == before
                  ? std::string("build_parallel_model: \"") + kSteps[late].name + "\" was done already"
                  : std::string("build_parallel_model: \"") + kSteps[late].name +
                        "\" comes too late, after \"" + kSteps[before].name + "\": " + kSteps[late].reason,
              [&] {
                (builder.*second)();
                return 0;
              });
        }
    ModelBuilder builder(transformer_recipe(small()), mesh, compute);
    expect_error(ErrorCode::bad_argument, "build_parallel_model: take() without \"data parallel\"",
                 [&] { return builder.take(); });
    builder.data_parallel();
    expect_error(ErrorCode::bad_argument, "build_parallel_model: take() without \"memory and values\"",
                 [&] { return builder.take(); });
    builder.memory_and_values();
    const ParallelModel built = builder.take();
    EXPECT_EQ(transformer_of(built).config().dim, 16) << "steps may be left out";
    expect_error(ErrorCode::bad_argument, "build_parallel_model: \"float8\" after take()", [&] {
      builder.float8();
      return 0;
    });
  });
}

TEST(Recipe, RefusesOptionsWithoutMeaning) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 1}});
    const Recipe weather = weather_recipe(
        {.dim = 8, .depth = 1, .head_dim = 4, .local_window = 2, .global_window = 2, .mult = 2});
    const auto expect = [&](const Recipe& recipe, const BuildOptions& options, const std::string& text) {
      expect_error(ErrorCode::bad_argument, text,
                   [&] { return build_parallel_model(recipe, mesh, compute, options); });
    };
    expect(weather, {.compile_model = true},
           "build_parallel_model: compile_model is true; weft has no compiler, and its layers need none");
    BuildOptions split;
    split.tensor.sequence_parallel = true;
    expect(weather, split,
           "build_parallel_model: options.tensor is for models of tokens; recipe \"weather stage\" has none");
    expect({.name = "none", .build = {}}, {},
           "build_parallel_model: recipe \"none\" has no build; expected a function");
    expect({.name = "null", .build = [] { return std::unique_ptr<Module>(); }}, {},
           "build_parallel_model: recipe \"null\" built no model");
    ParallelModel built = build_parallel_model(weather, mesh, compute);
    expect_error(ErrorCode::bad_argument,
                 "trainer: the model has no TokenSizes (ParallelModel::tokens); expected a model of tokens",
                 [&] { return Trainer(built, compute, {}).steps(); });
    expect_error(ErrorCode::bad_argument, "transformer_of: the model is no Transformer",
                 [&] { return transformer_of(built).config().dim; });
  });
}

// --- models of maps, trained over meshes ---

constexpr std::int64_t kRows = 6, kSize = 8;

// Pictures of stripes along the rows (target 0) or along the columns (target 1), with noise: this rank's
// part.
struct Pictures {
  Pictures(Context& context, const ParallelModel& built, int step) {
    const Chunk part = chunk_of(kRows, built.data.size(), built.data.rank());
    Tensor maps(context, {part.size, 1, kSize, kSize}), kinds(context, {part.size, 1, 1, 1});
    for (std::int64_t r = 0; r < part.size; ++r) {
      const std::int64_t sample = part.offset + r, kind = sample % 2;
      kinds.f32()[static_cast<std::size_t>(r)] = static_cast<float>(kind);
      float* const to = maps.f32().data() + r * kSize * kSize;
      RandomStream(5, std::to_string(step) + "." + std::to_string(sample)).normal(0, kSize * kSize, to);
      for (std::int64_t at = 0; at < kSize * kSize; ++at)
        to[at] = 0.3f * to[at] + static_cast<float>((kind == 1 ? at % kSize : at / kSize) % 2);
    }
    pictures = built.place(maps, kRows), targets = built.place(kinds, kRows);
  }
  Tensor pictures, targets;
};

// A model that the library does not know.
class Residual : public Module {
 public:
  explicit Residual(std::int64_t width) : branch(width, 2 * width, 0.1, Normal{0.2}, Normal{0.2}) {
    add("branch", branch);
  }
  ChannelFeedForward branch;

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    return {add_tensors(x[0], branch.forward(x, f)[0], f.compute(), TensorName(path(), "x + branch"))};
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return {add_tensors(dy[0], branch.backward(dy, f)[0], f.compute(), TensorName(path(), "d(x + branch)"))};
  }
};

Recipe classifier() {
  Recipe recipe;
  recipe.name = "classifier of pictures";
  recipe.build = [] {
    auto model = std::make_unique<Sequential>();
    model->append("embed", std::make_unique<Conv2d>(Conv2dConfig{
                               .in = 1, .out = 8, .kernel = 3, .padding = 1, .init = Normal{0.3}}));
    model->append("act", std::make_unique<GELU>());
    model->append("pool", std::make_unique<AdaptiveAvgPool2d>(Extent2d(1)));
    auto stages = std::make_unique<Sequential>();
    for (int i = 0; i < 2; ++i) stages->append(std::make_unique<Residual>(8));
    model->append("stages", std::move(stages));
    model->append(
        "head", std::make_unique<Conv2d>(Conv2dConfig{.in = 8, .out = 1, .kernel = 1, .init = Normal{0.3}}));
    return model;
  };
  recipe.blocks = {"stages.*"};
  recipe.loss = [] { return std::make_unique<BinaryCrossEntropy>(); };
  return recipe;
}

// A training of any recipe of maps.
struct Training {
  Training(Rank& rank, const Recipe& recipe, const MeshShape& shape, const BuildOptions& options)
      : compute(rank.context, 1),
        mesh(rank.group(), shape),
        built(build_parallel_model(recipe, mesh, compute, options)),
        optimizer(compute, built.parameters(), {}) {}

  double step(const Tensor& x, const Tensor& target) {
    Frame frame(compute, {.seed = 1, .step = steps++});
    const Tensor y = built.model->forward(x, frame)[0];
    const Tensor loss = built.loss->forward({y, target, global_count(compute, y)}, frame)[0];
    built.model->backward(built.loss->backward({}, frame), frame);
    built.finish();
    reduce_gradients(built.parameters(), built.tensor, {.compute = &compute});
    clip_grad_norm(built.parameters(), 1.0);
    optimizer.step(0.02);
    optimizer.zero_gradients();
    return full(loss).as<double>()[0];
  }
  double step_on_pictures() {
    const Pictures batch(compute.context(), built, static_cast<int>(steps));
    return step(batch.pictures, batch.targets);
  }

  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  AdamW optimizer;
  std::int64_t steps = 0;
};

// dp 2 x tp 2 with activation checkpointing and divided parameters, saved, and resumed on three ranks: the
// losses of one rank.
TEST(Recipe, AModelFromOutsideTrainsSavesAndResumesOnOtherRanks) {
  const test::TemporaryFolder folder;
  constexpr int kSaved = 12, kAll = 24;
  std::vector<double> one(kAll);
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Training training(rank, classifier(), {{"dp", 1}, {"tp", 1}}, {.seed = 3});
    for (double& loss : one) loss = training.step_on_pictures();
  });
  EXPECT_LT(one.back(), 0.5 * one.front());
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Training training(rank, classifier(), {{"dp", 2}, {"tp", 2}},
                      {.data = DataForm::fsdp, .seed = 3, .ac = {.mode = AcMode::full}});
    EXPECT_TRUE(training.built.model->get("stages.1").recompute());
    for (int i = 0; i < kSaved; ++i)
      EXPECT_NEAR(training.step_on_pictures(), one[static_cast<std::size_t>(i)], 1e-4);
    save_checkpoint(folder.path(), training.built.mesh, training.steps, *training.built.model,
                    TrainingState(&training.optimizer, nullptr));
  });
  test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
    Training training(rank, classifier(), {{"dp", 3}, {"tp", 1}}, {.seed = 4});
    training.steps = load_checkpoint(folder.path(), training.built.mesh, *training.built.model,
                                     TrainingState(&training.optimizer, nullptr))
                         .step;
    EXPECT_EQ(training.steps, kSaved);
    for (int i = kSaved; i < kAll; ++i)
      EXPECT_NEAR(training.step_on_pictures(), one[static_cast<std::size_t>(i)], 1e-3);
  });
}

TEST(Recipe, TheWeatherStageTrainsOnAnyMesh) {
  const Recipe weather = weather_recipe({.dim = 8,
                                         .depth = 2,
                                         .head_dim = 4,
                                         .local_window = 2,
                                         .global_window = 2,
                                         .mult = 2,
                                         .dropout = 0.1,
                                         .init_std = 0.2});
  const auto losses = [&](const MeshShape& shape, const BuildOptions& options) {
    std::vector<double> found(4);
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Training training(rank, weather, shape, options);
      std::vector<double> mine;
      for (std::size_t i = 0; i < found.size(); ++i) {
        const Chunk part = chunk_of(kRows, training.built.data.size(), training.built.data.rank());
        Tensor x(rank.context, {part.size, 8, 4, 4});
        for (std::int64_t r = 0; r < part.size; ++r)
          RandomStream(9, std::to_string(i) + "." + std::to_string(part.offset + r))
              .normal(0, 8 * 4 * 4, x.f32().data() + r * 8 * 4 * 4);
        const Tensor placed = training.built.place(x, kRows);
        mine.push_back(training.step(placed, placed));
      }
      if (rank.rank == 0) found = mine;
    });
    return found;
  };
  const std::vector<double> one = losses({{"dp", 1}, {"tp", 1}}, {.seed = 3});
  EXPECT_LT(one.back(), one.front());
  for (const BuildOptions& options :
       {BuildOptions{.seed = 3},
        BuildOptions{.data = DataForm::fsdp, .seed = 3, .ac = {.mode = AcMode::full}},
        BuildOptions{.data = DataForm::fsdp, .seed = 3, .ac = {.mode = AcMode::selective}}})
    for (const MeshShape& shape : {MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 3}, {"tp", 1}}}) {
      const std::vector<double> found = losses(shape, options);
      for (std::size_t i = 0; i < one.size(); ++i)
        EXPECT_NEAR(found[i], one[i], 1e-4 * one[i]) << to_string(shape);
    }
}

}  // namespace
}  // namespace weft::recipe_test
