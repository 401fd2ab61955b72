// Without exact mode, the losses of a training on any mesh differ from those on one rank as rounding does.
// With the mutants of weft_train (parity_mutants_test.cpp), they differ as a fault does.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "parity_verdict.hpp"
#include "support/run_ranks.hpp"
#include "weft/dp/sampler.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/trainer.hpp"

namespace weft::parity_meshes_test {
namespace {

using test::Rank;
using test::Ranks;
using tools::Losses;

constexpr double kTolerance = 1e-5;

struct Mesh {
  std::string name = {};
  int dp = 1, tp = 1;
  bool sharded = false, sequence_parallel = false, vocabulary = false;
};

struct Job {
  TransformerConfig model;
  Trainer::Options training;
  std::int64_t rows = 4, sequence = 16;
  int steps = 8, micro_batches = 1;
  std::uint64_t seed = 1;
  double lr = 0.01;
};

// Tokens with a pattern that can be learnt; some labels do not count, most of them in the first rows.
struct Rows {
  Rows(const Job& job, int step, std::int64_t first, std::int64_t rows, std::int64_t global) {
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < job.sequence; ++i) {
        const auto token = [&](std::int64_t at) { return (step * 5 + r * 7 + at * at) % job.model.vocab; };
        tokens.push_back(token(i));
        labels.push_back(r < global / 2 && i % 3 == 0 ? CrossEntropy::kIgnore : token(i + 1));
      }
    batch = {tokens.data(), labels.data(), rows, job.sequence, global};
  }
  Rows(const Rows&) = delete;
  std::vector<std::int64_t> tokens, labels;
  TokenBatch batch;
};

Losses losses_on(const Mesh& on, const Job& job) {
  Losses losses;
  std::mutex mutex;
  test::run_ranks(Ranks::threads, on.dp * on.tp, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", on.dp}, {"tp", on.tp}});
    BuildOptions options{.seed = job.seed};
    options.tensor.sequence_parallel = on.sequence_parallel;
    if (on.vocabulary) options.tensor.vocab = VocabSplit::shard;
    if (on.sharded) options.data = DataForm::fsdp;
    ParallelModel model = build_parallel_model(job.model, mesh, compute, options);
    Trainer trainer(model, compute, job.training);
    Losses own;
    for (int step = 0; step < job.steps; ++step) {
      std::vector<std::unique_ptr<Rows>> all;
      std::vector<TokenBatch> batches;
      for (int i = 0; i < job.micro_batches; ++i) {
        const Chunk here = chunk_of(job.rows, model.data.size(), model.data.rank());
        all.push_back(std::make_unique<Rows>(job, step, i * job.rows + here.offset, here.size, job.rows));
        batches.push_back(all.back()->batch);
      }
      own.push_back(trainer.step(batches, job.lr).loss);
    }
    const std::lock_guard lock(mutex);
    losses = own;
  });
  return losses;
}

// The check of `weft parity`.
void expect_parity(const std::vector<Mesh>& meshes, const Job& job) {
  std::vector<Losses> losses;
  std::vector<std::string> names;
  for (const Mesh& mesh : meshes) {
    losses.push_back(losses_on(mesh, job));
    names.push_back(mesh.name);
    ASSERT_EQ(losses.back().size(), static_cast<std::size_t>(job.steps)) << mesh.name;
  }
  tools::ParityVerdict verdict = tools::verdict_of(losses, nullptr, kTolerance);
  Losses control;
  if (!verdict.passed) {
    Job faster = job;
    faster.lr *= tools::kControlRate;
    control = losses_on(meshes[0], faster);
    verdict = tools::verdict_of(losses, &control, kTolerance);
  }
  EXPECT_TRUE(verdict.passed) << tools::sentence(verdict, names, losses[0],
                                                 control.empty() ? nullptr : &control, kTolerance);
}

Job usual() {
  Job job;
  TransformerConfig& c = job.model;
  c.dim = 32, c.layers = 1, c.heads = 4, c.kv_heads = 4, c.head_size = 8, c.ffn_hidden = 48, c.vocab = 48;
  c.max_seq = job.sequence, c.init_std = 0.1;
  job.training.optimizer = SGD::Options{};  // AdamW does not see a factor of all gradients
  job.training.max_norm = 0;                // nor does a step that is clipped
  job.lr = 0.3;
  return job;
}

const Mesh kOne{"1x1"}, kData{"2x1", 2}, kTensor{"1x2", 1, 2};

TEST(ParityMeshes, Data) { expect_parity({kOne, kData}, usual()); }
TEST(ParityMeshes, Clipped) {
  Job job = usual();
  job.training.max_norm = 0.1;
  expect_parity({kOne, kData}, job);
}
TEST(ParityMeshes, Tensor) { expect_parity({kOne, kTensor}, usual()); }
TEST(ParityMeshes, SequenceParallel) {
  expect_parity({kOne, {.name = "sp:1x2", .tp = 2, .sequence_parallel = true}}, usual());
}
TEST(ParityMeshes, Vocabulary) {
  expect_parity({kOne, {.name = "1x2", .tp = 2, .vocabulary = true}}, usual());
}
TEST(ParityMeshes, Sharded) {
  expect_parity({kOne, {.name = "fsdp:2x1", .dp = 2, .sharded = true}}, usual());
}
TEST(ParityMeshes, SharedHeads) {
  Job job = usual();
  job.model.kv_heads = 1;
  expect_parity({kOne, kTensor}, job);
}
TEST(ParityMeshes, MicroBatches) {
  Job job = usual();
  job.micro_batches = 2;
  expect_parity({kOne, kData}, job);
}
TEST(ParityMeshes, Muon) {
  Job job = usual();
  job.training.optimizer = Muon::Options{};
  job.lr = 0.01;
  expect_parity({kOne, kTensor}, job);
}

// Sizes, steps, seeds, rates, optimizers and meshes at random.
void random_configuration(unsigned seed) {
  std::mt19937 random(seed);
  const auto one_of = [&](std::initializer_list<int> values) {
    return *(values.begin() + std::uniform_int_distribution<std::size_t>(0, values.size() - 1)(random));
  };
  const auto coin = [&] { return one_of({0, 1}) == 1; };
  Job job;
  TransformerConfig& c = job.model;
  c.heads = one_of({2, 4, 6}), c.kv_heads = coin() ? c.heads : c.heads / 2, c.head_size = one_of({4, 8, 12});
  c.dim = one_of({20, 36, 48, 64}), c.ffn_hidden = one_of({24, 50, 96}), c.vocab = one_of({34, 64, 98});
  c.layers = one_of({1, 2, 3}), c.init_std = 0.02 * one_of({1, 5});
  job.sequence = c.max_seq = one_of({6, 16, 30});
  job.rows = one_of({2, 3, 5, 8});
  job.steps = one_of({10, 20, 30});
  job.micro_batches = one_of({1, 1, 2});
  job.seed = static_cast<std::uint64_t>(one_of({1, 7, 99}));
  job.lr = 0.001 * one_of({1, 3, 10, 30});
  job.training.max_norm = one_of({0, 1});
  switch (one_of({0, 1, 2})) {
    case 1: job.training.optimizer = Lion::Options{}; break;
    case 2: job.training.optimizer = ScheduleFreeAdamW::Options{}; break;
    default: break;
  }
  Mesh mesh{.dp = one_of({1, 2}), .tp = one_of({1, 2})};
  if (mesh.dp * mesh.tp == 1) mesh.dp = 2;
  mesh.sharded = mesh.dp > 1 && coin(), mesh.sequence_parallel = mesh.tp > 1 && coin();
  mesh.vocabulary = mesh.tp > 1 && coin();
  mesh.name = fmt::format("{}{}{}{}x{}", mesh.sequence_parallel ? "sp:" : "", mesh.vocabulary ? "vocab:" : "",
                          mesh.sharded ? "fsdp:" : "", mesh.dp, mesh.tp);
  SCOPED_TRACE(fmt::format("seed {}: {}, {} steps of {} rows of {}, rate {}", seed, mesh.name, job.steps,
                           job.rows, job.sequence, job.lr));
  expect_parity({kOne, mesh}, job);
}

// WEFT_PARITY_CONFIGURATIONS: how many; 20 in the full tier.
TEST(ParityMeshes, RandomConfigurations) {
  const char* const count = std::getenv("WEFT_PARITY_CONFIGURATIONS");
  for (unsigned seed = 1; seed <= (count == nullptr ? 5u : static_cast<unsigned>(std::atoi(count))); ++seed)
    random_configuration(seed);
}

}  // namespace
}  // namespace weft::parity_meshes_test
