// A training that stops on one mesh and goes on on another one, into a second epoch, has the losses of the run that never
// stopped: what is stored and what is a function of seed and step are all that there is.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/random.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/dp/sampler.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/schedule.hpp"
#include "weft/nn/spectral_norm.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/gradients.hpp"

namespace weft::checkpoint_meshes_test {
namespace {

using test::Rank;
using test::Ranks;

constexpr std::int64_t kSequence = 8, kVocab = 34, kBatch = 4;
constexpr std::int64_t kSamples = 24;  // an epoch is 6 steps
constexpr int kStop = 4, kSteps = 10;
constexpr double kNear = 1e-6;

struct Plan {
  const char* name;
  MeshShape mesh;
  bool sequence_and_vocab = false;
};

const Plan kPlans[] = {{"one rank", {{"dp", 1}, {"tp", 1}}},
                       {"dp=2", {{"dp", 2}, {"tp", 1}}},
                       {"tp=2", {{"dp", 1}, {"tp", 2}}},
                       {"dp=2 x tp=2", {{"dp", 2}, {"tp", 2}}},
                       {"tp=2, sequence parallel, vocabulary split", {{"dp", 1}, {"tp", 2}}, true},
                       {"dp=4", {{"dp", 4}, {"tp", 1}}}};

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab;
  c.max_seq = kSequence, c.init_std = 0.1;
  return c;
}

BuildOptions options_of(const Plan& plan) {
  BuildOptions options{.seed = 3};
  options.tensor.sequence_parallel = plan.sequence_and_vocab;
  options.tensor.vocab = plan.sequence_and_vocab ? VocabSplit::shard : VocabSplit::whole;
  return options;
}

// A Trainer with a schedule and a sampler, as a program has them.
struct Training {
  Training(Rank& rank, const Plan& plan, std::uint64_t seed)
      : compute(rank.context, 1),
        mesh(rank.group(), plan.mesh),
        model(build_parallel_model(small(), mesh, compute, options_of(plan))),
        trainer(model, compute, {.seed = seed}),
        sampler(model.data, kSamples, kBatch, 11) {}

  double step() {
    const std::int64_t step = trainer.steps();
    std::vector<std::int64_t> tokens, labels;
    const std::vector<std::int64_t> samples = sampler.local_batch(step);
    for (const std::int64_t sample : samples)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((sample * 7 + i * i) % kVocab);
        labels.push_back((sample + i) % 9 == 0 ? CrossEntropy::kIgnore
                                               : (sample * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    const TokenBatch batch{tokens.data(), labels.data(), static_cast<std::int64_t>(samples.size()), kSequence,
                           kBatch};
    return trainer.step({&batch, 1}, schedule.at(step)).loss;
  }
  std::vector<double> steps_to(int last) {
    std::vector<double> losses;
    while (trainer.steps() < last) losses.push_back(step());
    return losses;
  }

  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
  Trainer trainer;
  CosineSchedule schedule{.peak = 2e-3, .floor = 1e-4, .warmup = 3, .total = kSteps};
  Sampler sampler;
};

// The losses after kStop of a run that saves there and goes on.
std::vector<double> save_and_go_on(const Plan& plan, const std::filesystem::path& folder) {
  std::vector<double> losses;
  test::run_ranks(Ranks::threads, plan.mesh.size(), [&](Rank& rank) {
    Training run(rank, plan, 5);
    AsyncCheckpoint saves(run.mesh);
    run.steps_to(kStop);
    run.trainer.save(saves, folder);
    const std::vector<double> rest = run.steps_to(kSteps);
    saves.wait();
    if (rank.rank == 0) losses = rest;
  });
  return losses;
}

std::vector<double> resume(const Plan& plan, const std::filesystem::path& folder) {
  std::vector<double> losses;
  test::run_ranks(Ranks::threads, plan.mesh.size(), [&](Rank& rank) {
    Training run(rank, plan, 99);  // the seed is the checkpoint's
    for (Parameter* p : run.model.parameters()) initialise(*p, 77);
    run.step();
    run.trainer.load(folder);
    const std::vector<double> rest = run.steps_to(kSteps);
    if (rank.rank == 0) losses = rest;
  });
  return losses;
}

TEST(CheckpointMeshes, ARunGoesOnOnAnyOtherMesh) {
  for (const Plan& from : kPlans) {
    const test::TemporaryFolder folder;
    const std::vector<double> never_stopped = save_and_go_on(from, folder.path());
    ASSERT_EQ(never_stopped.size(), static_cast<std::size_t>(kSteps - kStop));
    for (const Plan& to : kPlans) {
      SCOPED_TRACE(fmt::format("{} -> {}", from.name, to.name));
      const std::vector<double> resumed = resume(to, folder.path());
      ASSERT_EQ(resumed.size(), never_stopped.size());
      for (std::size_t i = 0; i < resumed.size(); ++i) {
        if (&from == &to) {
          EXPECT_EQ(resumed[i], never_stopped[i]) << "step " << kStop + i;
        } else {
          EXPECT_NEAR(resumed[i], never_stopped[i], kNear) << "step " << kStop + i;
        }
      }
    }
  }
}

// With the step it is all that randomness depends on.
TEST(CheckpointMeshes, TheSeedIsThatOfTheCheckpoint) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Training first(rank, kPlans[0], 5), second(rank, kPlans[0], 6);
    first.step();
    first.trainer.save(folder / "a");
    EXPECT_EQ(second.trainer.load(folder / "a").extra.at("trainer.seed"), "5");
    second.trainer.save(folder / "b");
    EXPECT_EQ(latest_checkpoint(folder / "b")->extra.at("trainer.seed"), "5");
    // The same with a seed that is none.
    const CheckpointReader reader = CheckpointReader::open(folder / "a");
    std::vector<Tensor> tensors;
    std::vector<NamedView> views;
    for (const std::string& name : reader.names()) {
      tensors.push_back(reader.read(rank.context, name));
      views.push_back({name, tensors.back().view(), nullptr});
    }
    save_checkpoint(folder / "c", {}, 1, views, {{"trainer.seed", "-1"}});
    EXPECT_EQ(test::error_text([&] { second.trainer.load(folder / "c"); }),
              fmt::format("bad_argument: trainer: \"trainer.seed\" of {} is \"-1\"; expected a number from 0 "
                          "to 2^64 - 1",
                          (folder / "c" / "step-00000001").string()));
  });
}

// Buffers (the vectors of spectral norms, which every pass in training moves on) and dropout, which draws by seed and step. The
// model is trained by hand: AdamW on sum(y^2) / 2.
struct WeatherRun {
  WeatherRun(Rank& rank, const MeshShape& shape)
      : compute(rank.context, 1), mesh(rank.group(), shape), stage(config()) {
    add_spectral_norm(stage);
    parallelize(stage, mesh["tp"], OwnPlanOptions{.under_spectral_norm = WholeByDefault::split});
    replicate(stage, mesh);
    materialise(stage, compute);
    initialise(stage, 3);
    averager.emplace(stage.parameters(), mesh["dp"]);
    optimizer.emplace(compute, stage.parameters(), AdamW::Options{});
  }
  static WeatherStageConfig config() {
    WeatherStageConfig c;
    c.dim = 32, c.depth = 1, c.head_dim = 8, c.local_window = 2, c.global_window = 2;
    c.init_std = 0.5, c.dropout = 0.2;
    return c;
  }
  // The mean over all elements of y^2 / 2.
  double step(std::int64_t number) {
    const Shape whole{4, 32, 4, 4};
    Tensor all(compute.context(), whole);
    RandomStream(static_cast<std::uint64_t>(5 + number), "x").normal(0, all.count(), all.f32().data());
    const LayoutRef replicated = replicated_layout(mesh, whole);
    const Tensor x = redistribute(all.with_layout(replicated), mesh["dp"], Shard{0});
    Frame frame(compute, {.seed = 21, .step = number});
    const Tensor y = stage.forward({x}, frame)[0];
    const Tensor dy = y.clone(compute.context());
    double sum = 0;
    const Tensor together = full(y);
    for (const float value : together.f32())
      sum += 0.5 * static_cast<double>(value) * static_cast<double>(value);
    for (float& value : dy.f32()) value /= static_cast<float>(whole.count());
    stage.backward({dy.with_layout(y.layout())}, frame);
    averager->finish();
    if (mesh.size("tp") > 1) sync_replicated_gradients(optimizer->parameters(), mesh["tp"]);
    optimizer->step(1e-3);
    optimizer->zero_gradients();
    return sum / static_cast<double>(whole.count());
  }

  Compute compute;
  DeviceMesh mesh;
  WeatherStage stage;
  std::optional<GradientAverager> averager;
  std::optional<AdamW> optimizer;
};

TEST(CheckpointMeshes, BuffersAndDropoutGoOn) {
  const MeshShape shapes[] = {
      {{"dp", 1}, {"tp", 1}}, {{"dp", 2}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}};
  constexpr std::int64_t kBefore = 2, kAll = 4;
  for (const MeshShape& from : shapes) {
    const test::TemporaryFolder folder;
    std::vector<double> expected;
    test::run_ranks(Ranks::threads, from.size(), [&](Rank& rank) {
      WeatherRun run(rank, from);
      std::vector<double> losses;
      for (std::int64_t i = 0; i < kAll; ++i) {
        if (i == kBefore) save_checkpoint(folder.path(), run.mesh, i, run.stage, &*run.optimizer);
        losses.push_back(run.step(i));
      }
      if (rank.rank == 0) expected = losses;
    });
    for (const MeshShape& to : shapes)
      test::run_ranks(Ranks::threads, to.size(), [&](Rank& rank) {
        WeatherRun run(rank, to);
        run.step(100);
        const CheckpointInfo info = load_checkpoint(folder.path(), run.mesh, run.stage, &*run.optimizer);
        for (std::int64_t i = info.step; i < kAll; ++i) {
          const double loss = run.step(i), never_stopped = expected[static_cast<std::size_t>(i)];
          if (from == to) {
            EXPECT_EQ(loss, never_stopped) << to_string(from) << ", step " << i;
          } else {
            EXPECT_NEAR(loss, never_stopped, 1e-6 * never_stopped)
                << to_string(from) << " -> " << to_string(to) << ", step " << i;
          }
        }
      });
  }
}

}  // namespace
}  // namespace weft::checkpoint_meshes_test
