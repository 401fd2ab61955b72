// Exact mode of models of maps: the stage of a weather model has the same bits of losses, gradients and
// parameters however its maps and samples are cut.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/norm.hpp"

namespace weft::exact_maps_test {
namespace {

using test::Rank;
using test::Ranks;

constexpr std::int64_t kSamples = 12, kChannels = 8, kHeight = 16, kWidth = 4;

Recipe stage(double dropout) {
  return weather_recipe({.dim = kChannels,
                         .depth = 2,
                         .head_dim = 4,
                         .local_window = 2,
                         .global_window = 2,
                         .mult = 2,
                         .dropout = dropout,
                         .init_std = 0.2,
                         .attention_dropout = dropout});
}

// This rank's samples of a step: functions of the step and of the global indices.
Batch batch_of(Context& context, const ParallelModel& model, int step) {
  const Chunk rows = chunk_of(kSamples, model.data.size(), model.data.rank());
  const Tensor x(context, {rows.size, kChannels, kHeight, kWidth}), y(context, x.shape());
  const std::int64_t each = kChannels * kHeight * kWidth;
  for (std::int64_t i = 0; i < x.count(); ++i) {
    const double at = static_cast<double>(rows.offset * each + i + 1000 * step);
    x.f32()[static_cast<std::size_t>(i)] = static_cast<float>(std::sin(at * at));
    y.f32()[static_cast<std::size_t>(i)] = static_cast<float>(std::cos(0.7 * at));
  }
  return {.inputs = {x}, .targets = {y}, .global_rows = kSamples};
}

// The bits of all values of a run, by name: "step 1: gradient of layers.0…".
using Bits = std::vector<std::pair<std::string, std::vector<std::uint64_t>>>;

std::vector<std::uint64_t> bits_of(const Tensor& t) {
  const Tensor all = full(t);
  std::vector<std::uint64_t> bits;
  for (const float v : all.f32()) bits.push_back(std::bit_cast<std::uint32_t>(v));
  return bits;
}

Bits run(const MeshShape& shape, BuildOptions options = {}, double dropout = 0) {
  Bits bits;
  std::mutex mutex;
  test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
    Compute compute(rank.context, rank.rank % 2 + 1);
    const DeviceMesh mesh(rank.group(), shape);
    options.exact = Exact::yes;
    options.seed = 3;
    if (shape.has("domain")) options.domain_axes = {"domain"};
    ParallelModel model = build_parallel_model(stage(dropout), mesh, compute, options);
    Trainer trainer(model, compute, {.max_norm = 0.5});
    Bits own;
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of(rank.context, model, step);
      const Trainer::Result result = trainer.backward({&batch, 1});
      own.emplace_back(fmt::format("step {}: loss", step),
                       std::vector{std::bit_cast<std::uint64_t>(result.loss)});
      for (const Parameter* p : model.model->parameters())
        own.emplace_back(fmt::format("step {}: gradient of {}", step, p->path()), bits_of(p->gradient()));
      own.emplace_back(fmt::format("step {}: norm", step),
                       std::vector{std::bit_cast<std::uint64_t>(trainer.update(0.01).grad_norm)});
      for (const Parameter* p : model.model->parameters())
        own.emplace_back(fmt::format("step {}: {}", step, p->path()), bits_of(p->master()));
    }
    const Batch batch = batch_of(rank.context, model, 9);
    own.emplace_back("evaluation",
                     std::vector{std::bit_cast<std::uint64_t>(trainer.evaluate(std::span(&batch, 1)).loss)});
    const std::scoped_lock lock(mutex);
    if (rank.rank == 0) bits = std::move(own);
  });
  return bits;
}

// Tells the first value that differs.
void expect_same(const std::string& mesh, const Bits& found, const Bits& expected) {
  ASSERT_EQ(found.size(), expected.size()) << mesh;
  for (std::size_t i = 0; i < found.size(); ++i)
    if (found[i] != expected[i]) {
      ADD_FAILURE() << mesh << ": " << found[i].first << " has other bits";
      return;
    }
}

TEST(ExactMaps, DomainAndData) {
  const Bits one = run({{"dp", 1}, {"tp", 1}});
  for (const auto& [dp, domain] : {std::pair{1, 2}, {1, 4}, {1, 8}, {2, 1}, {2, 2}, {4, 1}, {4, 2}})
    expect_same(fmt::format("dp {} domain {}", dp, domain), run({{"dp", dp}, {"tp", 1}, {"domain", domain}}),
                one);
}

TEST(ExactMaps, ShardedParametersDropoutAndActivationCheckpointing) {
  const Bits one = run({{"dp", 1}, {"tp", 1}}, {}, 0.1);
  const MeshShape shape{{"dp", 2}, {"tp", 1}, {"domain", 2}};
  expect_same("fsdp", run(shape, {.data = DataForm::fsdp}, 0.1), one);
  expect_same("ac", run(shape, {.ac = {.mode = AcMode::full}}, 0.1), one);
  expect_same("hsdp",
              run({{"r", 2}, {"dp", 2}, {"tp", 1}, {"domain", 2}},
                  {.replicate_axis = "r", .data = DataForm::fsdp}, 0.1),
              one);
}

TEST(ExactMaps, WeightsInBf16) {
  const BuildOptions options{.dtype = DType::bf16};
  expect_same("domain 2", run({{"dp", 2}, {"tp", 1}, {"domain", 2}}, options),
              run({{"dp", 1}, {"tp", 1}}, options));
}

// Exact losses and gradients are those of the other mode, except for rounding.
TEST(ExactMaps, AgreesWithTheOtherMode) {
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 1}});
    ParallelModel exact = build_parallel_model(stage(0), mesh, compute, {.seed = 3, .exact = Exact::yes});
    ParallelModel other = build_parallel_model(stage(0), mesh, compute, {.seed = 3});
    Trainer of_exact(exact, compute, {}), of_other(other, compute, {});
    const Batch batch = batch_of(rank.context, exact, 0);
    EXPECT_NEAR(of_exact.backward(std::span(&batch, 1)).loss, of_other.backward(std::span(&batch, 1)).loss,
                1e-9);
    const std::vector<Gradient> a = of_exact.gradients(), b = of_other.gradients();
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      const auto values = [](const Gradient& g) {
        return std::span(reinterpret_cast<const float*>(g.data.data),
                         static_cast<std::size_t>(g.data.shape.count()));
      };
      float largest = 0;
      for (const float v : values(b[i])) largest = std::max(largest, std::abs(v));
      for (std::size_t k = 0; k < values(a[i]).size(); ++k)
        EXPECT_NEAR(values(a[i])[k], values(b[i])[k], 1e-4 * largest + 1e-9) << a[i].name;
    }
  });
}

TEST(ExactMaps, RefusesWithTheArithmetic) {
  const auto refused = [](const MeshShape& shape, const Recipe& recipe, BuildOptions options,
                          std::int64_t height) {
    std::string text;
    std::mutex mutex;
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), shape);
      options.exact = Exact::yes;
      const std::string found = test::error_text([&] {
        ParallelModel model = build_parallel_model(recipe, mesh, compute, options);
        Trainer trainer(model, compute, {});
        const Tensor x = Tensor::zeros(rank.context, {2, kChannels, height, kWidth});
        const Batch batch{.inputs = {x}, .targets = {x}};
        trainer.step(std::span(&batch, 1), 0.1);
      });
      const std::scoped_lock lock(mutex);
      if (text.empty()) text = found;
      EXPECT_EQ(found, text) << "on every rank";
    });
    return text;
  };
  const MeshShape two{{"dp", 1}, {"tp", 1}, {"domain", 2}};
  EXPECT_EQ(refused(two, stage(0), {.domain_axes = {"domain"}}, 6),
            "bad_argument: exact: \"layers.0.0\": x in exact mode: rows of windows of 2: 3 over 2 ranks (3 = "
            "2 x 1 + 1); "
            "expected equal parts");
  EXPECT_EQ(
      refused({{"dp", 1}, {"tp", 2}}, stage(0), {}, 8),
      "bad_argument: exact: \"layers.0.0\" is of kind WindowAttention, which has no rule for exact mode");
  EXPECT_EQ(refused({{"dp", 1}, {"tp", 1}, {"h", 2}, {"w", 2}}, stage(0), {.domain_axes = {"h", "w"}}, 8),
            "bad_argument: exact: \"layers.0.0\" is cut in rows and in columns, which has no rule for exact "
            "mode; expected one axis");
  for (const Float8Recipe recipe : {Float8Recipe::rowwise, Float8Recipe::rowwise_gw_hp})
    EXPECT_EQ(refused(two, stage(0),
                      {.domain_axes = {"domain"},
                       .float8 = recipe,
                       .float8_options = {.filter = {.only = {"*.to_q"}}, .scales = Float8Scales::whole}},
                      8),
              fmt::format("bad_argument: exact: float8 is {} with domain_axes; expected one of them: float8 "
                          "layers have no rule for maps that are cut",
                          name(recipe)));
  Recipe with_group_norm;
  with_group_norm.name = "norm";
  with_group_norm.build = [] { return std::make_unique<GroupNorm>(2, kChannels); };
  with_group_norm.loss = [] { return std::make_unique<MeanSquaredError>(); };
  EXPECT_EQ(refused(two, with_group_norm, {.domain_axes = {"domain"}}, 8),
            "bad_argument: exact: \"\" is of kind GroupNorm, which has no rule for exact mode");
}

}  // namespace
}  // namespace weft::exact_maps_test
