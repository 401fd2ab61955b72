// A whole training: hooks, evaluations, an early end, checkpoints by steps and by time, and how a run goes on
// from the newest whole checkpoint, or begins from another run's.
#include "weft/models/training.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/random.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/loss.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::training_test {
namespace {

using test::error_text;
using test::expect_error;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kRows = 4;

// Two convolutions of 1x1 that learn to give back their input.
Recipe recipe(std::int64_t width = 3) {
  Recipe r;
  r.name = "two convolutions";
  r.build = [width] {
    auto model = std::make_unique<Sequential>();
    model->append("body", std::make_unique<Conv2d>(
                              Conv2dConfig{.in = 2, .out = width, .kernel = 1, .init = Normal{0.3}}));
    model->append("head", std::make_unique<Conv2d>(
                              Conv2dConfig{.in = width, .out = 2, .kernel = 1, .init = Normal{0.3}}));
    return model;
  };
  r.loss = [] { return std::make_unique<MeanSquaredError>(); };
  return r;
}

struct Job {
  explicit Job(Rank& rank, const BuildOptions& options = {.seed = 3}, std::int64_t width = 3)
      : compute(rank.context, 1),
        mesh(rank.group(), MeshShape{{"dp", -1}, {"tp", 1}}),
        built(build_parallel_model(recipe(width), mesh, compute, options)),
        trainer(built, compute, {.seed = 1}) {}

  Batch batch(std::int64_t step) {
    const Chunk part = chunk_of(kRows, built.data.size(), built.data.rank());
    Tensor x(compute.context(), {part.size, 2, 2, 2});
    for (std::int64_t r = 0; r < part.size; ++r)
      RandomStream(9, std::to_string(step) + "." + std::to_string(part.offset + r))
          .normal(0, 8, x.f32().data() + r * 8);
    return {.inputs = {x}, .targets = {x}, .global_rows = kRows};
  }
  TrainingPlan plan(std::int64_t steps) {
    TrainingPlan p{.steps = steps};
    p.step = [this](std::int64_t step) {
      const Batch b = batch(step);
      return trainer.step({&b, 1}, 0.05);
    };
    p.evaluate = [this] {
      const Batch b = batch(-1);
      return trainer.evaluate({&b, 1});
    };
    return p;
  }
  std::vector<float> values() const {
    std::vector<float> all;
    for (const Parameter* p : built.parameters()) {
      const Tensor t = full(p->master());
      for (const float v : t.f32()) all.push_back(v);
    }
    return all;
  }

  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  Trainer trainer;
};

TEST(Training, CallsHooksInTheirOrder) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(5);
    std::string seen;
    plan.evaluate_every = 2;
    plan.checkpoints = {.folder = folder.path(), .every_steps = 2};
    plan.on_begin = [&] { seen += "begin "; };
    plan.on_step = [&](const Trainer::Result& r) { seen += "step" + std::to_string(r.step) + " "; };
    plan.on_evaluation = [&](const Trainer::Evaluation& e) {
      EXPECT_EQ(e.tokens, kRows * 8);
      seen += "evaluation ";
    };
    plan.on_checkpoint = [&](std::int64_t step) { seen += "checkpoint" + std::to_string(step) + " "; };
    plan.on_end = [&](const TrainingEnd& end) {
      EXPECT_EQ(end.steps, 5);
      seen += "end";
      EXPECT_EQ(latest_checkpoint(folder.path())->step, 5) << "all checkpoints are written";
    };
    const TrainingEnd end = train(job.trainer, plan);
    EXPECT_EQ(seen,
              "begin step0 step1 evaluation checkpoint2 step2 step3 evaluation checkpoint4 step4 checkpoint5 "
              "end");
    EXPECT_EQ(end.why, TrainingEnded::steps);
    EXPECT_TRUE(end.best_loss.has_value());
    EXPECT_EQ(train(job.trainer, plan).steps, 5) << "nothing is left to do";
  });
}

// A run that is saved and goes on has the bits of one that was not interrupted, and keeps the last two.
TEST(Training, GoesOnFromACheckpointOnAnotherMesh) {
  const test::TemporaryFolder folder;
  std::vector<float> whole;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Job job(rank);
    train(job.trainer, job.plan(9));
    whole = job.values();
  });
  for (const bool background : {true, false}) {
    const std::filesystem::path run = folder / (background ? "background" : "at once");
    const auto until = [&](int ranks, std::int64_t steps) {
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        Job job(rank, {.data = DataForm::fsdp, .seed = 3});
        TrainingPlan plan = job.plan(steps);
        plan.checkpoints = {.folder = run, .every_steps = 2, .keep = 2, .background = background};
        plan.checkpoints.extra = [] { return CheckpointExtra{{"mine", "yes"}}; };
        if (steps > 5) plan.resumed = job.trainer.load_newest(run).extra;
        if (steps > 5) {
          EXPECT_EQ(plan.resumed.at("mine"), "yes");
        }
        train(job.trainer, plan);
        const std::vector<float> values = job.values();
        for (std::size_t i = 0; steps == 9 && i < whole.size(); ++i)
          EXPECT_NEAR(values[i], whole[i], 1e-5) << i;
      });
    };
    until(2, 5);
    until(1, 9);
    EXPECT_TRUE(std::filesystem::exists(run / "step-00000008"));
    EXPECT_FALSE(std::filesystem::exists(run / "step-00000006")) << "two are kept";
  }
}

// The clock of rank 0 counts: here it is the only one that has time for a checkpoint.
TEST(Training, SavesByTheClockOfOneRank) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(6);
    plan.checkpoints = {.folder = folder.path(), .every = std::chrono::milliseconds(150), .at_end = false};
    std::vector<std::int64_t> saved;
    plan.on_checkpoint = [&](std::int64_t step) { saved.push_back(step); };
    plan.on_step = [&](const Trainer::Result& r) {
      if (r.step == 3) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    };
    train(job.trainer, plan);
    EXPECT_EQ(saved, std::vector<std::int64_t>{4});
  });
}

TEST(Training, EndsOnAllRanksIfOneAsks) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(50);
    int asked = 0;
    plan.stop = [&] { return ++asked == 3 && rank.rank == 2 ? 15 : 0; };
    const TrainingEnd end = train(job.trainer, plan);
    EXPECT_EQ(end.why, TrainingEnded::stop);
    EXPECT_EQ(end.reason, 15);
    EXPECT_EQ(end.steps, 3);
  });
}

TEST(Training, EndsIfEvaluationsDoNotImproveAndRemembersIt) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const std::vector<double> losses{3, 2, 1.95, 2.5, 1, 1};  // of the evaluations, one a step
    const auto of = [&](Job& job, std::int64_t steps) {
      TrainingPlan plan = job.plan(steps);
      plan.evaluate_every = 1;
      plan.evaluate = [&job, &losses] {
        return Trainer::Evaluation{.loss = losses[static_cast<std::size_t>(job.trainer.steps() - 1)]};
      };
      plan.patience = 2, plan.least_gain = 0.1;
      plan.checkpoints = {.folder = folder.path()};
      return plan;
    };
    Job whole(rank);
    const TrainingEnd end = train(whole.trainer, of(whole, 6));
    EXPECT_EQ(end.why, TrainingEnded::patience);
    EXPECT_EQ(end.steps, 4);
    EXPECT_EQ(*end.best_loss, 2);
    Job first(rank);
    EXPECT_EQ(train(first.trainer, of(first, 3)).why, TrainingEnded::steps);
    Job second(rank);
    TrainingPlan plan = of(second, 6);
    plan.resumed = second.trainer.load_newest(folder.path()).extra;
    EXPECT_EQ(plan.resumed.at("train.early_stop"), "2 1");
    EXPECT_EQ(train(second.trainer, plan).steps, 4) << "as the run that was not interrupted";
    plan.resumed["train.early_stop"] = "2";
    expect_error(ErrorCode::bad_argument,
                 "train: \"train.early_stop\" of the checkpoint is \"2\"; expected a loss and a count",
                 [&] { return train(second.trainer, plan).steps; });
  });
}

TEST(Training, AHookThatFailsEndsAllRanks) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(50);
    plan.on_step = [&](const Trainer::Result& r) {
      if (r.step == 2 && rank.rank == 1) throw std::runtime_error("disk full");
    };
    if (rank.rank == 1) {
      try {
        train(job.trainer, plan);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& e) {
        EXPECT_STREQ(e.what(), "disk full");
      }
    } else {
      expect_error(ErrorCode::bad_argument, "train: a hook failed on another rank; its own error says why",
                   [&] { return train(job.trainer, plan).steps; });
    }
    EXPECT_EQ(job.trainer.steps(), 3);
  });
}

// A function of the plan that throws on one rank ends all ranks at once, wherever the others are then.
TEST(Training, AFunctionOfThePlanThatFailsEndsAllRanks) {
  const test::TemporaryFolder folder;
  enum class Where { before_step, between_halves, after_step, before_evaluation, after_evaluation, extra };
  for (const Where where : {Where::before_step, Where::between_halves, Where::after_step,
                            Where::before_evaluation, Where::after_evaluation, Where::extra})
    for (const DataForm form : {DataForm::ddp, DataForm::fsdp})
      test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
        Job job(rank, {.data = form, .seed = 3});
        const auto fails = [&](Where here) {
          if (rank.rank == 1 && here == where && job.trainer.steps() >= 2)
            throw std::runtime_error("file not found");
        };
        TrainingPlan plan = job.plan(20);
        plan.step = [&](std::int64_t step) {
          fails(Where::before_step);
          const Batch b = job.batch(step);
          job.trainer.backward({&b, 1});
          fails(Where::between_halves);
          const Trainer::Result result = job.trainer.update(0.05);
          fails(Where::after_step);
          return result;
        };
        plan.evaluate_every = 1;
        plan.evaluate = [&] {
          fails(Where::before_evaluation);
          const Batch b = job.batch(-1);
          const Trainer::Evaluation found = job.trainer.evaluate({&b, 1});
          fails(Where::after_evaluation);
          return found;
        };
        plan.checkpoints = {.folder = folder.path(), .every_steps = 1, .check_replicas = false};
        plan.checkpoints.extra = [&] {
          fails(Where::extra);
          return CheckpointExtra{};
        };
        const auto run = [&] { return train(job.trainer, plan).steps; };
        if (rank.rank == 1) {
          EXPECT_THAT(run, testing::ThrowsMessage<std::runtime_error>("file not found"));
        } else {
          const bool waits = where == Where::before_step || where == Where::between_halves ||
                             where == Where::before_evaluation;
          expect_error(ErrorCode::bad_argument,
                       waits ? "trainer: another rank has given up; its own error says why"
                             : "train: a hook failed on another rank; its own error says why",
                       run);
        }
        // Nothing is left behind: the next step is that of a trainer that has not failed.
        const Batch b = job.batch(5);
        EXPECT_GT(job.trainer.step({&b, 1}, 0.05).loss, 0);
      });
}

TEST(Training, ReplicasAreComparedBeforeACheckpoint) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(4);
    plan.checkpoints = {.folder = folder.path(), .every_steps = 3};
    plan.on_step = [&](const Trainer::Result& r) {
      if (r.step == 2 && rank.rank == 1) job.built.parameters()[0]->write_master().f32()[0] += 1;
    };
    EXPECT_TRUE(test::error_text([&] {
                  train(job.trainer, plan);
                }).starts_with("mismatch: check_replicas: \"body.weight\" is Replicate on dp=2, but "));
    EXPECT_FALSE(latest_checkpoint(folder.path()).has_value()) << "nothing was saved";
  });
}

TEST(Training, RefusesPlans) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Job job(rank);
    const auto expect = [&](const std::string& text, const std::function<void(TrainingPlan&)>& change) {
      TrainingPlan plan = job.plan(2);
      change(plan);
      expect_error(ErrorCode::bad_argument, text, [&] { return train(job.trainer, plan).steps; });
      EXPECT_EQ(job.trainer.steps(), 0);
    };
    expect("train: step is empty; expected a function", [](TrainingPlan& p) { p.step = {}; });
    expect("train: steps is -1; expected 0 or more", [](TrainingPlan& p) { p.steps = -1; });
    expect("train: evaluate_every is -2; expected 0 or more", [](TrainingPlan& p) { p.evaluate_every = -2; });
    expect("train: evaluate_every is 2 and evaluate is empty; expected a function",
           [](TrainingPlan& p) { p.evaluate_every = 2, p.evaluate = {}; });
    expect("train: patience is 3 and evaluate_every 0; expected evaluations",
           [](TrainingPlan& p) { p.patience = 3; });
    expect("train: least_gain is -1; expected 0 or more", [](TrainingPlan& p) { p.least_gain = -1; });
    expect("train: checkpoints.folder is empty; expected a folder for the checkpoints",
           [](TrainingPlan& p) { p.checkpoints.every_steps = 1; });
    expect("train: checkpoints.keep is -1; expected 0 or more",
           [](TrainingPlan& p) { p.checkpoints.keep = -1; });
    expect(
        "train: the plan is not the same on all ranks of dp=2 x tp=1; expected the same steps, evaluations "
        "and checkpoints",
        [&](TrainingPlan& p) { p.steps = 2 + rank.rank; });
    expect(rank.rank == 1
               ? "train: step is empty; expected a function"
               : "train: another rank was given a plan that cannot be followed; its own error says why",
           [&](TrainingPlan& p) {
             if (rank.rank == 1) p.step = {};
           });
    expect("train: step(0) left the trainer at step 0; expected 1",
           [](TrainingPlan& p) { p.step = [](std::int64_t) { return Trainer::Result{}; }; });
  });
}

// --- the newest whole checkpoint ---

void overwrite(const std::filesystem::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << text;
}
// Changes a byte in the middle of a file.
void damage(const std::filesystem::path& file) {
  std::fstream f(file, std::ios::binary | std::ios::in | std::ios::out);
  f.seekg(-8, std::ios::end);
  const char c = static_cast<char>(f.peek() ^ 1);
  f.seekp(-8, std::ios::end);
  f.put(c);
}

TEST(Training, LoadsTheNewestWholeCheckpointWhereTheLatestIsBroken) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(3);
    plan.checkpoints = {.folder = folder.path(), .every_steps = 1};
    train(job.trainer, plan);
  });
  const std::string first = (folder / "step-00000001").string(), third = (folder / "step-00000003").string();
  const auto loads = [&](std::int64_t step, const std::string& warning) {
    std::mutex mutex;
    std::vector<std::string> warnings;
    test::RankOptions options;
    options.context.log_sink = [&](LogLevel level, std::string_view line) {
      const std::lock_guard lock(mutex);
      if (level == LogLevel::warning) warnings.emplace_back(line);
    };
    test::run_ranks(
        Ranks::threads, 2,
        [&](Rank& rank) {
          Job job(rank);
          EXPECT_EQ(job.trainer.load_newest(folder.path()).step, step);
          EXPECT_EQ(job.trainer.steps(), step);
        },
        options);
    ASSERT_EQ(warnings.size(), warning.empty() ? 0u : 1u) << "one rank warns, once";
    for (const std::string& line : warnings) EXPECT_NE(line.find(warning), std::string::npos) << line;
  };
  loads(3, "");
  damage(folder / "step-00000003" / "rank-00000.safetensors");  // found out by its bytes alone
  loads(2, "trainer: \"" + (folder / "step-00000002").string() +
               "\" is loaded, the newest whole checkpoint; a newer one is broken: checkpoint: " + third);
  std::filesystem::remove(folder / "step-00000002" / "rank-00000.safetensors");
  overwrite(folder / "step-00000003" / "index.json", "{");
  loads(1, "trainer: \"" + first +
               "\" is loaded, the newest whole checkpoint; a newer one is broken: checkpoint: " + third +
               "/index.json");
  overwrite(folder / "latest", "step-00000009\n");
  loads(1, "a newer one is broken: checkpoint: " + (folder / "latest").string() + " names \"step-00000009\"");
  const WholeCheckpoint whole = newest_whole_checkpoint(folder.path());
  EXPECT_EQ(whole.found->folder, first);
  EXPECT_EQ(whole.broken.size(), 3u) << "latest, step 3 and step 2";
  // A save that ended between the folder and the name of it.
  std::filesystem::remove(folder / "latest");
  loads(1, "a newer one is broken: checkpoint: " + (folder / "latest").string() + " is missing");
  std::filesystem::remove_all(folder / "step-00000001");
  EXPECT_TRUE(newest_whole_checkpoint(folder.path()).broken.empty())
      << "nothing is whole, and nothing is named";
  overwrite(folder / "latest", "step-00000009\n");
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Job job(rank);
    EXPECT_TRUE(error_text([&] {
                  job.trainer.load_newest(folder.path());
                }).starts_with("bad_argument: trainer: there is no whole checkpoint in \""));
    EXPECT_FALSE(newest_whole_checkpoint(folder / "nowhere").found.has_value());
  });
}

// --- fine-tuning ---

TEST(Training, BeginsFromTheParametersOfAnotherRun) {
  const test::TemporaryFolder folder;
  std::vector<float> trained;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Job job(rank);
    TrainingPlan plan = job.plan(3);
    plan.checkpoints = {.folder = folder.path()};
    train(job.trainer, plan);
    const std::vector<float> values = job.values();
    if (rank.rank == 0) trained = values;
  });
  const std::size_t of_body = 3 * 2 + 3;
  test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 3}, {"tp", 1}});
    ParallelModel built = build_parallel_model(recipe(), mesh, compute,
                                               {.data = DataForm::fsdp, .seed = 5, .frozen = {"body"}});
    const auto values = [&] {
      std::vector<float> all;
      for (const Parameter* p : built.parameters()) {
        const Tensor t = full(p->master());
        all.insert(all.end(), t.f32().begin(), t.f32().end());
      }
      return all;
    };
    const std::vector<float> initial = values();
    EXPECT_EQ(init_from(folder.path(), mesh, *built.model, {.except = {"head"}}).step, 3);
    const std::vector<float> begun = values();
    ASSERT_EQ(begun.size(), trained.size());
    for (std::size_t i = 0; i < begun.size(); ++i)
      EXPECT_EQ(begun[i], i < of_body ? trained[i] : initial[i]) << i;
    Trainer trainer(built, compute, {});
    EXPECT_EQ(trainer.steps(), 0);
    const Tensor x = Tensor::zeros(rank.context, {1, 2, 2, 2});
    const Batch batch{.inputs = {x}, .targets = {x}};
    trainer.step({&batch, 1}, 0.1);
    const std::vector<float> after = values();
    EXPECT_TRUE(
        std::equal(begun.begin(), begun.begin() + static_cast<std::ptrdiff_t>(of_body), after.begin()))
        << "frozen";
    EXPECT_NE(begun, after);
    expect_error(ErrorCode::bad_argument, "init_from: except: nothing in the model matches \"haed\"",
                 [&] { return init_from(folder.path(), mesh, *built.model, {.except = {"haed"}}).step; });
    // Names of another program; what the model has not is left out.
    Recipe renamed = recipe();
    renamed.build = [] {
      auto model = std::make_unique<Sequential>();
      model->append("trunk", std::make_unique<Conv2d>(
                                 Conv2dConfig{.in = 2, .out = 3, .kernel = 1, .init = Normal{0.3}}));
      return model;
    };
    ParallelModel other = build_parallel_model(renamed, mesh, compute, {.seed = 5});
    InitOptions options;
    options.remap = [](std::string_view name, const Shape& shape) {
      std::vector<RemappedTensor> to;
      if (name.starts_with("param.body."))
        to.push_back({"param.trunk." + std::string(name.substr(11)), shape, 0});
      return to;
    };
    EXPECT_NE(error_text([&] { init_from(folder.path(), mesh, *other.model, options); }).find("param.head."),
              std::string::npos)
        << "what is not read must be left out by name";
    options.left_out = {"head"};
    init_from(folder.path(), mesh, *other.model, options);
    std::size_t i = 0;
    for (const Parameter* p : other.parameters()) {
      const Tensor t = full(p->master());
      for (const float v : t.f32()) EXPECT_EQ(v, trained[i++]);
    }
    EXPECT_EQ(i, of_body);
  });
}

}  // namespace
}  // namespace weft::training_test
