// Recipes: models that the library knows and one that it does not know are built for any mesh in one order of
// steps; another order is an error.
#include "weft/models/recipe.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/outputs.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/optimizer.hpp"
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
    {"domain parallel", &ModelBuilder::domain_parallel,
     "float8 and recomputation run the passes of its layers"},
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
    BuildOptions cut;
    cut.domain_axes = {"tp"};
    expect(weather, cut,
           "build_parallel_model: domain_axes has \"tp\", a data or tensor axis of dp=1 x tp=1; expected "
           "another");
    ParallelModel built = build_parallel_model(weather, mesh, compute);
    expect_error(ErrorCode::bad_argument, "transformer_of: the model is no Transformer",
                 [&] { return transformer_of(built).config().dim; });
  });
}

// --- models of maps, trained over meshes ---

constexpr std::int64_t kRows = 6, kSize = 8;

// Pictures of stripes along the rows (target 0) or along the columns (target 1), with noise: this rank's
// part.
Batch pictures_of(Context& context, const ParallelModel& built, std::int64_t step) {
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
  return {.inputs = {maps}, .targets = {kinds}, .global_rows = kRows};
}

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

// This rank's rows of random maps, which the model is to give back.
Batch maps_of(Context& context, const ParallelModel& built, std::int64_t step) {
  const Chunk part = chunk_of(kRows, built.data.size(), built.data.rank());
  Tensor x(context, {part.size, 8, 4, 4});
  for (std::int64_t r = 0; r < part.size; ++r)
    RandomStream(9, std::to_string(step) + "." + std::to_string(part.offset + r))
        .normal(0, 8 * 4 * 4, x.f32().data() + r * 8 * 4 * 4);
  return {.inputs = {x}, .targets = {x}, .global_rows = kRows};
}

// A training of any recipe of maps.
struct Training {
  Training(Rank& rank, const Recipe& recipe, const MeshShape& shape, const BuildOptions& options)
      : compute(rank.context, 1),
        mesh(rank.group(), shape),
        built(build_parallel_model(recipe, mesh, compute, options)),
        trainer(built, compute, {.seed = 1}) {}

  double step(const Batch& batch) { return trainer.step({&batch, 1}, 0.02).loss; }
  double step_on_pictures() { return step(pictures_of(compute.context(), built, trainer.steps())); }
  double step_on_maps() { return step(maps_of(compute.context(), built, trainer.steps())); }

  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  Trainer trainer;
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
    training.trainer.save(folder.path());
  });
  test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
    Training training(rank, classifier(), {{"dp", 3}, {"tp", 1}}, {.seed = 4});
    EXPECT_EQ(training.trainer.load(folder.path()).step, kSaved);
    for (int i = kSaved; i < kAll; ++i)
      EXPECT_NEAR(training.step_on_pictures(), one[static_cast<std::size_t>(i)], 1e-3);
  });
}

Recipe weather(double dropout = 0.1) {
  return weather_recipe({.dim = 8,
                         .depth = 2,
                         .head_dim = 4,
                         .local_window = 2,
                         .global_window = 2,
                         .mult = 2,
                         .dropout = dropout,
                         .init_std = 0.2});
}

TEST(Recipe, TheWeatherStageTrainsOnAnyMesh) {
  const auto losses = [&](const MeshShape& shape, const BuildOptions& options) {
    std::vector<double> found(4);
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Training training(rank, weather(), shape, options);
      std::vector<double> mine;
      for (std::size_t i = 0; i < found.size(); ++i) mine.push_back(training.step_on_maps());
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
  for (const DataForm form : {DataForm::ddp, DataForm::fsdp})
    for (const MeshShape& shape : {MeshShape{{"dp", 2}, {"tp", 1}, {"h", 2}, {"w", 1}},
                                   MeshShape{{"dp", 1}, {"tp", 2}, {"h", 2}, {"w", 1}},
                                   MeshShape{{"dp", 1}, {"tp", 1}, {"h", 2}, {"w", 2}}}) {
      const std::vector<double> found =
          losses(shape, {.data = form, .domain_axes = {"h", "w"}, .seed = 3, .ac = {.mode = AcMode::full}});
      for (std::size_t i = 0; i < one.size(); ++i)
        EXPECT_NEAR(found[i], one[i], 1e-4 * one[i]) << to_string(shape);
    }
}

// A loop of one's own over the parts of a built model gives the bits of the Trainer.
TEST(Recipe, TheTrainerGivesTheBitsOfItsParts) {
  const BuildOptions options{.domain_axes = {"h"}, .seed = 3};
  const MeshShape shape{{"dp", 2}, {"tp", 1}, {"h", 2}};
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Training training(rank, weather(), shape, options);
    const DeviceMesh mesh = training.mesh;
    ParallelModel built = build_parallel_model(weather(), mesh, training.compute, options);
    AdamW optimizer(training.compute, built.parameters(), {});
    for (std::int64_t step = 0; step < 3; ++step) {
      const Batch batch = maps_of(rank.context, built, step);
      Frame frame(training.compute, {.seed = 1, .step = step});
      const Tensor y = built.model->forward(built.place(batch.inputs[0], kRows), frame)[0];
      const Tensor target = built.place(batch.targets[0], kRows);
      const Tensor loss = built.loss->forward({y, target, global_count(training.compute, y)}, frame)[0];
      built.model->backward(built.loss->backward({}, frame), frame);
      built.finish();
      for (const DeviceMesh& axes : built.axes_of_equal_rows())
        if (axes.size() > 1) reduce_gradients(built.parameters(), axes, {.compute = &training.compute});
      clip_grad_norm(built.parameters(), 1.0);
      optimizer.step(0.02);
      optimizer.zero_gradients();
      EXPECT_EQ(training.step_on_maps(), full(loss).as<double>()[0]) << step;
    }
  });
}

// Micro-batches of parts of the rows give the loss of all rows, and so does evaluate().
TEST(Recipe, MicroBatchesAndEvaluationAreMeansOverAllElements) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const MeshShape shape{{"dp", 2}, {"tp", 1}};
    Training whole(rank, weather(0), shape, {.seed = 3}), parts(rank, weather(0), shape, {.seed = 3});
    const Batch batch = maps_of(rank.context, whole.built, 0);  // 3 rows on each of 2 ranks
    const auto rows = [&](std::int64_t first, std::int64_t count) {
      const Tensor part = batch.inputs[0].slice_flat(first * 8 * 4 * 4, {count, 8, 4, 4});
      return Batch{.inputs = {part}, .targets = {part}};
    };
    const std::vector<Batch> two{rows(0, 2), rows(2, 1)};
    const double before = whole.trainer.evaluate({&batch, 1}).loss;
    EXPECT_NEAR(parts.trainer.evaluate(two).loss, before, 1e-12);
    const Trainer::Result of_whole = whole.trainer.step({&batch, 1}, 0.02),
                          of_parts = parts.trainer.step(two, 0.02);
    EXPECT_EQ(of_whole.tokens, kRows * 8 * 4 * 4);
    EXPECT_EQ(of_parts.tokens, kRows * 8 * 4 * 4);
    EXPECT_NEAR(of_whole.loss, before, 1e-12);
    EXPECT_NEAR(of_parts.loss, before, 1e-12);
    EXPECT_NEAR(of_parts.grad_norm, of_whole.grad_norm, 1e-5 * of_whole.grad_norm);
  });
}

// The recipe says what a sample is: here a row.
TEST(Recipe, CountsWhatTheRecipeSays) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Recipe recipe = weather();
    recipe.count = [](std::span<const Tensor> inputs, std::span<const Tensor>) {
      return inputs[0].shape()[0];
    };
    const MeshShape shape{{"dp", 2}, {"tp", 1}};
    Training by_rows(rank, recipe, shape, {.seed = 3}), by_elements(rank, weather(), shape, {.seed = 3});
    const Batch batch = maps_of(rank.context, by_rows.built, 0);
    const Trainer::Result rows = by_rows.trainer.step({&batch, 1}, 0.01);
    const Trainer::Result elements = by_elements.trainer.step({&batch, 1}, 0.01);
    EXPECT_EQ(rows.tokens, kRows);
    EXPECT_EQ(elements.tokens, kRows * 8 * 4 * 4);
    EXPECT_NEAR(rows.loss, elements.loss * 8 * 4 * 4, 1e-6 * rows.loss);
  });
}

TEST(Recipe, TheTrainerRefusesBatchesThatDoNotFit) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Training training(rank, weather(), {{"dp", 1}, {"tp", 1}, {"h", 2}}, {.domain_axes = {"h"}, .seed = 3});
    const auto expect = [&](const std::string& text, const std::function<void(Batch&)>& change) {
      Batch batch = maps_of(rank.context, training.built, 0);
      change(batch);
      expect_error(ErrorCode::bad_argument, text, [&] { return training.step(batch); });
    };
    expect("trainer: inputs is empty; expected 1 tensor or more", [](Batch& b) { b.inputs.clear(); });
    expect("trainer: targets[0] has 5 rows; expected 6, as inputs[0]", [&](Batch& b) {
      b.targets[0] = Tensor::zeros(rank.context, {kRows - 1, 8, 4, 4});
    });
    expect("trainer: inputs[0] has no dimension; expected (rows, …)",
           [](Batch& b) { b.inputs[0] = Tensor(); });
    expect("trainer: targets[0] has a layout; expected the plain rows of this rank", [&](Batch& b) {
      b.targets[0] = b.targets[0].with_layout(replicated_layout(training.mesh, b.targets[0].shape()));
    });
    expect("trainer: rows is 6; expected 7, the part of rank 0 of 1 in global_rows 7",
           [](Batch& b) { b.global_rows = 7; });
    expect("trainer: global_rows is -1; expected 0 (the same rows on each rank) or more",
           [](Batch& b) { b.global_rows = -1; });
    expect(
        "trainer: nothing in the step counts: no row has a target; expected 1 element or more on all ranks",
        [&](Batch& b) {
          b.inputs[0] = b.targets[0] = Tensor::zeros(rank.context, {0, 8, 4, 4}), b.global_rows = 0;
        });
    expect(
        "trainer: the ranks of h=2 were given different batches; expected the same, as they share the work "
        "on each",
        [&](Batch& b) { b.inputs[0].f32()[3] += static_cast<float>(rank.rank); });
    expect(
        rank.rank == 1
            ? "shard_spatial: x (6, 8, 1, 4) has 1 elements in dimension 2 for h=2; each rank needs at least "
              "one: fewer ranks, or a larger map"
            : "trainer: another rank was given a batch that does not fit; its own error says why",
        [&](Batch& b) {
          if (rank.rank == 1) b.inputs[0] = Tensor::zeros(rank.context, {kRows, 8, 1, 4});
        });
    std::vector<std::int64_t> tokens(4, 0);
    const TokenBatch of_tokens{tokens.data(), tokens.data(), 1, 4, 0};
    expect_error(ErrorCode::bad_argument,
                 "trainer: the model has no TokenSizes (ParallelModel::tokens); expected a model of tokens",
                 [&] {
                   return training.trainer.step({&of_tokens, 1}, 0.1).loss;
                 });
    expect_error(
        ErrorCode::bad_argument,
        "trainer: label_smoothing is 0.1 and z_loss 0; the loss of the model is no CrossEntropy, and "
        "has no such options",
        [&] { return Trainer(training.built, training.compute, {.label_smoothing = 0.1}).steps(); });
    training.built.loss.reset();
    expect_error(ErrorCode::bad_argument, "trainer: the model has no loss; expected a Recipe with one",
                 [&] { return Trainer(training.built, training.compute, {}).steps(); });
  });
}

// Outputs of any mesh are those of one rank: this rank's rows of them.
TEST(Recipe, OutputsOfAnyMesh) {
  std::vector<float> of;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Training one(rank, weather(), {{"dp", 1}, {"tp", 1}}, {.seed = 3});
    const Tensor whole = compute_outputs(one.built, one.compute, maps_of(rank.context, one.built, 0))[0];
    of.assign(whole.f32().begin(), whole.f32().end());
  });
  for (const MeshShape& shape :
       {MeshShape{{"dp", 2}, {"tp", 2}, {"h", 1}}, MeshShape{{"dp", 1}, {"tp", 2}, {"h", 2}},
        MeshShape{{"dp", 4}, {"tp", 1}, {"h", 1}}})
    test::run_ranks(Ranks::threads, 4, [&](Rank& part) {
      Training training(part, weather(), shape, {.data = DataForm::fsdp, .domain_axes = {"h"}, .seed = 3});
      Batch batch = maps_of(part.context, training.built, 0);
      batch.targets.clear();
      const Tensor y = compute_outputs(training.built, training.compute, batch)[0];
      const Chunk rows = chunk_of(kRows, training.built.data.size(), training.built.data.rank());
      EXPECT_EQ(y.shape(), (Shape{rows.size, 8, 4, 4}));
      EXPECT_EQ(y.layout(), nullptr);
      for (std::int64_t i = 0; i < y.count(); ++i)
        EXPECT_NEAR(y.f32()[static_cast<std::size_t>(i)],
                    of[static_cast<std::size_t>(rows.offset * 8 * 4 * 4 + i)], 1e-5)
            << to_string(shape);
    });
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Training training(rank, weather(), {{"dp", 1}, {"tp", 1}, {"h", 2}}, {.domain_axes = {"h"}, .seed = 3});
    const Batch good = maps_of(rank.context, training.built, 0);
    Batch batch = good;
    if (rank.rank == 1) batch.inputs.clear();
    const auto outputs = [&] { return compute_outputs(training.built, training.compute, batch).size(); };
    expect_error(ErrorCode::bad_argument,
                 rank.rank == 1 ? "compute_outputs: inputs is empty; expected 1 tensor or more"
                                : "compute_outputs: another rank of h=2 was given a batch that does not fit; "
                                  "its own error says why",
                 outputs);
    batch = {.inputs = {Tensor::zeros(rank.context, {2, 8, 4, 4})}};
    batch.inputs[0].f32()[0] = static_cast<float>(rank.rank);
    expect_error(ErrorCode::bad_argument,
                 "compute_outputs: the ranks of h=2 were given different batches; expected the same, as they "
                 "share the work on each",
                 outputs);
    batch = good;
    EXPECT_EQ(outputs(), 1U);
    ParallelModel pipeline = build_parallel_model(
        transformer_recipe(small()), DeviceMesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 1}, {"pp", 2}}),
        training.compute, {.pipeline_axis = "pp"});
    expect_error(ErrorCode::bad_argument, "compute_outputs: the model is a pipeline; expected a whole model",
                 [&] { return compute_outputs(pipeline, training.compute, good).size(); });
  });
}

// A Trainer that ends between backward() and update() leaves no gradients to the next one.
TEST(Recipe, ATrainerLeavesNoGradientsBehind) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    ParallelModel built = build_parallel_model(classifier(), mesh, compute, {.seed = 3});
    const Batch batch = pictures_of(rank.context, built, 0);
    std::optional<Trainer> first(std::in_place, built, compute, Trainer::Options{.seed = 1});
    const double norm = first->step({&batch, 1}, 0).grad_norm;
    first->backward({&batch, 1});
    EXPECT_TRUE(built.parameters()[0]->has_gradient());
    first.reset();
    for (const Parameter* p : built.parameters()) EXPECT_FALSE(p->has_gradient()) << p->path();
    Trainer second(built, compute, {.seed = 1});
    EXPECT_EQ(second.step({&batch, 1}, 0).grad_norm, norm);
  });
}

}  // namespace
}  // namespace weft::recipe_test
