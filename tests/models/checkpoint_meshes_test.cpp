// A training run that stops on one mesh and continues on another, into a second epoch, has the losses of a
// run that never stopped: its state is the checkpoint and a function of seed and step.
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
#include "weft/tp/parallelize.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/fully_shard.hpp"
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
  bool sharded = false;  // fully_shard over dp_shard, replicated over dp_replicate
};

const Plan kPlans[] = {
    {"one rank", {{"dp", 1}, {"tp", 1}}},
    {"dp=2", {{"dp", 2}, {"tp", 1}}},
    {"tp=2", {{"dp", 1}, {"tp", 2}}},
    {"dp=2 x tp=2", {{"dp", 2}, {"tp", 2}}},
    {"tp=2, sequence parallel, vocabulary split", {{"dp", 1}, {"tp", 2}}, true},
    {"dp=4", {{"dp", 4}, {"tp", 1}}},
    {"sharded over 3, unevenly", {{"dp_replicate", 1}, {"dp_shard", 3}, {"tp", 1}}, false, true},
    {"sharded over 2, in tp=2", {{"dp_replicate", 1}, {"dp_shard", 2}, {"tp", 2}}, false, true},
    {"sharded over 2, twice", {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 1}}, false, true}};

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

constexpr Schedule kSchedule{.peak = 2e-3, .floor = 1e-4, .warmup = 3, .total = kSteps};

// Rows of a step's batch that one data rank has.
struct Rows {
  explicit Rows(const std::vector<std::int64_t>& samples) : count(static_cast<std::int64_t>(samples.size())) {
    for (const std::int64_t sample : samples)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((sample * 7 + i * i) % kVocab);
        labels.push_back((sample + i) % 9 == 0 ? CrossEntropy::kIgnore
                                               : (sample * 7 + (i + 1) * (i + 1)) % kVocab);
      }
  }
  std::int64_t count;
  std::vector<std::int64_t> tokens, labels;
};

// A model that is trained, with a schedule and a sampler, as a program has them.
class Training {
 public:
  virtual ~Training() = default;
  virtual double step() = 0;
  virtual std::int64_t steps() const = 0;
  virtual void save(AsyncCheckpoint& saves, const std::filesystem::path& folder) = 0;
  virtual void load(const std::filesystem::path& folder) = 0;
  virtual const DeviceMesh& mesh() const = 0;
  std::vector<double> steps_to(int last) {
    std::vector<double> losses;
    while (steps() < last) losses.push_back(step());
    return losses;
  }
};

struct WithTrainer : Training {
  WithTrainer(Rank& rank, const Plan& plan, std::uint64_t seed)
      : compute(rank.context, 1),
        whole(rank.group(), plan.mesh),
        model(build_parallel_model(small(), whole, compute, options_of(plan))),
        trainer(model, compute, {.seed = seed}),
        sampler(model.data, kSamples, kBatch, 11) {}
  double step() override {
    const Rows rows(sampler.local_batch(trainer.steps()));
    const TokenBatch batch{rows.tokens.data(), rows.labels.data(), rows.count, kSequence, kBatch};
    return trainer.step({&batch, 1}, kSchedule.at(trainer.steps())).loss;
  }
  std::int64_t steps() const override { return trainer.steps(); }
  void save(AsyncCheckpoint& saves, const std::filesystem::path& folder) override {
    trainer.save(saves, folder);
  }
  void load(const std::filesystem::path& folder) override { trainer.load(folder); }
  const DeviceMesh& mesh() const override { return whole; }

  Compute compute;
  DeviceMesh whole;
  ParallelModel model;
  Trainer trainer;
  Sampler sampler;
};

// The same with fully_shard, by hand.
struct Sharded : Training {
  Sharded(Rank& rank, const Plan& plan)
      : compute(rank.context, 1),
        whole(rank.group(), plan.mesh),
        data(whole[{"dp_replicate", "dp_shard"}].flatten("dp")),
        model(small()),
        sampler(data, kSamples, kBatch, 11) {
    parallelize(model, whole["tp"], transformer_plan(small()));
    replicate(model, whole);
    sharded = fully_shard(model, {whole["dp_shard"], whole["dp_replicate"]}, {.blocks = {"layers.*"}});
    materialise(model, compute);
    initialise(model, 3);
    optimizer.emplace(compute, model.parameters(), AdamW::Options{});
  }
  Tensor placed(const std::vector<std::int64_t>& numbers) {
    const LayoutRef layout = replicated_layout(whole, {kBatch, kSequence})
                                 ->with("dp_replicate", Shard{0})
                                 ->with("dp_shard", Shard{0});
    Tensor t(compute.context(), layout->local_shape(), DType::i64);
    std::ranges::copy(numbers, t.as<std::int64_t>().begin());
    return t.with_layout(layout);
  }
  double step() override {
    const Rows rows(sampler.local_batch(done));
    const Tensor tokens = placed(rows.tokens), labels = placed(rows.labels);
    Frame frame(compute, {.seed = 0, .step = done});
    CrossEntropy cross_entropy;
    const Tensor logits = model.forward({tokens}, frame)[0];
    const Tensor loss =
        cross_entropy.forward({logits, labels, global_valid(compute.context(), labels)}, frame)[0];
    model.backward(cross_entropy.backward({}, frame), frame);
    if (whole.size("tp") > 1) sync_replicated_gradients(optimizer->parameters(), whole["tp"]);
    clip_grad_norm(optimizer->parameters(), 1);
    optimizer->step(kSchedule.at(done++));
    optimizer->zero_gradients();
    return full(loss).as<double>()[0];
  }
  std::int64_t steps() const override { return done; }
  void save(AsyncCheckpoint& saves, const std::filesystem::path& folder) override {
    start_save(saves, folder, done, model, &*optimizer);
  }
  void load(const std::filesystem::path& folder) override {
    done = load_checkpoint(folder, whole, model, &*optimizer).step;
  }
  const DeviceMesh& mesh() const override { return whole; }

  Compute compute;
  DeviceMesh whole, data;
  Transformer model;
  std::unique_ptr<FullySharded> sharded;
  std::optional<AdamW> optimizer;
  Sampler sampler;
  std::int64_t done = 0;
};

std::unique_ptr<Training> training(Rank& rank, const Plan& plan, std::uint64_t seed) {
  if (plan.sharded) return std::make_unique<Sharded>(rank, plan);
  return std::make_unique<WithTrainer>(rank, plan, seed);
}

// The losses after kStop of a run that saves there and goes on.
std::vector<double> save_and_go_on(const Plan& plan, const std::filesystem::path& folder) {
  std::vector<double> losses;
  test::run_ranks(Ranks::threads, plan.mesh.size(), [&](Rank& rank) {
    const std::unique_ptr<Training> run = training(rank, plan, 5);
    AsyncCheckpoint saves(run->mesh());
    run->steps_to(kStop);
    run->save(saves, folder);
    const std::vector<double> rest = run->steps_to(kSteps);
    saves.wait();
    if (rank.rank == 0) losses = rest;
  });
  return losses;
}

std::vector<double> resume(const Plan& plan, const std::filesystem::path& folder) {
  std::vector<double> losses;
  test::run_ranks(Ranks::threads, plan.mesh.size(), [&](Rank& rank) {
    const std::unique_ptr<Training> run = training(rank, plan, 99);
    run->step();  // nothing of it is left
    run->load(folder);
    const std::vector<double> rest = run->steps_to(kSteps);
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

// Randomness depends only on the seed and the step.
TEST(CheckpointMeshes, TheSeedIsThatOfTheCheckpoint) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    WithTrainer first(rank, kPlans[0], 5), second(rank, kPlans[0], 6);
    first.step();
    first.trainer.save(folder / "a");
    EXPECT_EQ(second.trainer.load(folder / "a").extra.at("trainer.seed"), "5");
    second.trainer.save(folder / "b");
    EXPECT_EQ(latest_checkpoint(folder / "b")->extra.at("trainer.seed"), "5");
    // The same with an invalid seed.
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

// The arguments of a save are compared between ranks, and all load the checkpoint that rank 0 chose: from a
// Trainer, too.
TEST(CheckpointMeshes, ATrainersRanksAgree) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    WithTrainer run(rank, kPlans[1], 5);
    const std::string mine = rank.rank == 0 ? "v" : "w";
    const std::string text =
        "mismatch: save_checkpoint: argument 4 is extra \"k\" = \"v\" on dp,tp rank 0, but extra \"k\" = "
        "\"w\" on "
        "dp,tp rank 1";
    EXPECT_EQ(test::error_text([&] { run.trainer.save(folder / "run", {{"k", mine}}); }), text);
    AsyncCheckpoint saves(run.whole);
    EXPECT_EQ(test::error_text([&] { run.trainer.save(saves, folder / "run", {{"k", mine}}); }), text);
    run.trainer.save(folder / "run");
    run.step();
    run.trainer.save(folder / "later");
    run.whole.group().barrier().wait();
    const Error e = test::error_of([&] { run.trainer.load(folder / (rank.rank == 0 ? "run" : "later")); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    EXPECT_EQ(run.trainer.steps(), 1);
  });
}

// Buffers (the vectors of spectral norms, which every pass in training moves on) and dropout, which draws by
// seed and step. The model is trained by hand: AdamW on sum(y^2) / 2.
struct WeatherRun {
  WeatherRun(Rank& rank, const MeshShape& shape)
      : compute(rank.context, 1), mesh(rank.group(), shape), stage(config()) {
    add_spectral_norm(stage);
    parallelize(stage, mesh["tp"], OwnPlanOptions{.under_spectral_norm = WholeByDefault::split});
    replicate(stage, mesh);
    materialise(stage, compute);
    initialise(stage, 3);
    reducer.emplace(stage.parameters(), mesh["dp"]);
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
    reducer->finish();
    if (mesh.size("tp") > 1) sync_replicated_gradients(optimizer->parameters(), mesh["tp"]);
    optimizer->step(1e-3);
    optimizer->zero_gradients();
    return sum / static_cast<double>(whole.count());
  }

  Compute compute;
  DeviceMesh mesh;
  WeatherStage stage;
  std::optional<GradientReducer> reducer;
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
