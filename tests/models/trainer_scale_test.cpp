// Loss scaling and micro-batches of the Trainer: settings that change no result, and steps that all ranks
// skip.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"

namespace weft::trainer_scale_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kRows = 8, kSequence = 8, kVocab = 32;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab, c.max_seq = 8;
  c.init_std = 0.1;
  return c;
}

struct Built {
  Built(Rank& rank, const MeshShape& shape, DataForm form = DataForm::ddp)
      : compute(rank.context),
        mesh(rank.group(), shape),
        model(build_parallel_model(small(), mesh, compute, {.data = form, .seed = 3})) {}
  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
};

// Rows [first, first + rows) of a step's batch. Rows have very different numbers of labels that count: 0 to
// 8.
struct Rows {
  Rows(int step, std::int64_t first, std::int64_t rows, std::int64_t global) {
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((step * 5 + r * 7 + i * i) % kVocab);
        labels.push_back(i < (r * 3 + step) % 9 ? (step * 5 + r * 7 + (i + 1) * (i + 1)) % kVocab
                                                : CrossEntropy::kIgnore);
      }
    batch = {tokens.data(), labels.data(), rows, kSequence, global};
  }
  std::vector<std::int64_t> tokens, labels;
  TokenBatch batch;
};

std::vector<float> weights(const Built& built) {
  std::vector<float> all;
  for (const Parameter* p : built.model.parameters()) {
    const Tensor whole = full(p->master());
    all.insert(all.end(), whole.f32().begin(), whole.f32().end());
  }
  return all;
}

const MeshShape kMeshes[] = {
    {{"dp", 1}, {"tp", 1}}, {{"dp", 2}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}};

// Parameters that are replicated on the data ranks, and parameters that are divided over them.
template <class Run>
void on_every_mesh(const Run& run) {
  for (const DataForm form : {DataForm::ddp, DataForm::fsdp})
    for (const MeshShape& shape : kMeshes) {
      SCOPED_TRACE(to_string(shape) + (form == DataForm::fsdp ? ", divided" : ""));
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) { run(rank, shape, form); });
    }
}

// Four micro-batches against one batch, with uneven numbers of valid tokens: the same gradients, norms,
// losses and weights, up to rounding; and that on every mesh, against one rank.
TEST(TrainerAccumulation, FourMicroBatchesAreTheLargeBatch) {
  constexpr int kSteps = 5;
  std::vector<double> losses, norms;  // of one rank, of the large batch
  std::vector<float> trained;
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Built one(rank, shape), two(rank, shape);
      const Trainer::Options options{.optimizer = SGD::Options{.momentum = 0.9}, .max_norm = 0.3};
      Trainer whole(one.model, one.compute, options), cut(two.model, two.compute, options);
      const std::int64_t ranks = one.model.data.size(), mine = kRows / ranks,
                         first = mine * one.model.data.rank();
      for (int step = 0; step < kSteps; ++step) {
        const Rows all(step, first, mine, kRows);
        std::vector<Rows> parts;
        for (std::int64_t k = 0; k < 4; ++k)
          parts.emplace_back(step, first + k * mine / 4, mine / 4, kRows / 4);
        std::vector<TokenBatch> batches;
        for (const Rows& p : parts) batches.push_back(p.batch);
        const Trainer::Result large = whole.step({&all.batch, 1}, 0.1), small = cut.step(batches, 0.1);
        EXPECT_EQ(large.tokens, small.tokens);
        EXPECT_NEAR(small.loss, large.loss, 1e-6 * large.loss);
        EXPECT_NEAR(small.grad_norm, large.grad_norm, 1e-5 * large.grad_norm);
        if (shape.size() == 1) {
          losses.push_back(large.loss);
          norms.push_back(large.grad_norm);
        } else {
          EXPECT_NEAR(large.loss, losses[static_cast<std::size_t>(step)], 1e-5 * large.loss);
          EXPECT_NEAR(large.grad_norm, norms[static_cast<std::size_t>(step)], 1e-4 * large.grad_norm);
        }
      }
      const std::vector<float> a = weights(one), b = weights(two);
      if (shape.size() == 1) trained = a;
      ASSERT_EQ(a.size(), trained.size());
      for (std::size_t i = 0; i < a.size(); ++i) {
        ASSERT_NEAR(a[i], b[i], 1e-5) << i;
        ASSERT_NEAR(a[i], trained[i], 1e-4) << i << " on " << to_string(shape);
      }
    });
}

// Powers of two change no bit of what neither overflows nor vanishes.
TEST(TrainerLossScale, ChangesNoBit) {
  on_every_mesh([&](Rank& rank, const MeshShape& shape, DataForm form) {
    Built one(rank, shape, form), two(rank, shape, form);
    Trainer plain(one.model, one.compute, {}),
        scaled(two.model, two.compute, {.loss_scale = LossScaler::Options{.scale = 1024, .interval = 2}});
    const std::int64_t mine = kRows / one.model.data.size(), first = mine * one.model.data.rank();
    double scale = 1024;
    for (int step = 0; step < 5; ++step) {
      const Rows rows(step, first, mine, kRows);
      const Trainer::Result a = plain.step({&rows.batch, 1}, 0.01), b = scaled.step({&rows.batch, 1}, 0.01);
      EXPECT_EQ(a.loss, b.loss);
      EXPECT_EQ(a.grad_norm, b.grad_norm) << "gradients are those of the loss";
      EXPECT_EQ(a.loss_scale, 1);
      EXPECT_EQ(b.loss_scale, scale);
      if (step % 2 == 1) scale *= 2;
    }
    EXPECT_EQ(weights(one), weights(two));
  });
}

// An overflow on one rank alone: all skip the step, keep their weights, and go on with half the scale, also
// after a restart.
TEST(TrainerLossScale, AllRanksSkipAnOverflowAndGoOn) {
  const test::TemporaryFolder folder;
  on_every_mesh([&](Rank& rank, const MeshShape& shape, DataForm form) {
    Built built(rank, shape, form), again(rank, shape, form);
    const Trainer::Options options{.loss_scale = LossScaler::Options{.scale = 64, .interval = 3}};
    Trainer trainer(built.model, built.compute, options), resumed(again.model, again.compute, options);
    const std::int64_t mine = kRows / built.model.data.size(), first = mine * built.model.data.rank();
    const auto step = [&](Trainer& t, int number) {
      const Rows rows(number, first, mine, kRows);
      return t.step({&rows.batch, 1}, 0.01);
    };
    EXPECT_FALSE(step(trainer, 0).skipped);
    const std::vector<float> before = weights(built);
    {
      const HookHandle overflow =
          built.model.model->get("layers.0.mlp")
              .add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors& dy, Frame&) {
                if (rank.rank == rank.size - 1)
                  dy[0].data_ptr<float>()[0] = std::numeric_limits<float>::infinity();
              });
      const Trainer::Result result = step(trainer, 1);
      EXPECT_TRUE(result.skipped);
      EXPECT_EQ(result.loss_scale, 64);
      EXPECT_EQ(result.grad_norm, std::numeric_limits<double>::infinity());
    }
    EXPECT_EQ(weights(built), before);
    const Trainer::Result next = step(trainer, 2);
    EXPECT_FALSE(next.skipped);
    EXPECT_EQ(next.loss_scale, 32);
    const std::filesystem::path saved =
        folder.path() / (to_string(shape) + (form == DataForm::fsdp ? "-divided" : ""));
    trainer.save(saved);
    resumed.load(saved);
    for (int number = 3; number < 7; ++number) {
      const Trainer::Result a = step(trainer, number), b = step(resumed, number);
      EXPECT_EQ(a.loss, b.loss);
      EXPECT_EQ(a.loss_scale, b.loss_scale);
      EXPECT_EQ(a.loss_scale, number < 5 ? 32 : 64);
    }
    EXPECT_EQ(weights(built), weights(again));
  });
}

TEST(TrainerLossScale, OptionsThatAreNoneAreNamed) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Built built(rank, {{"dp", 1}, {"tp", 1}});
    EXPECT_STREQ(error_of([&] {
                   Trainer(built.model, built.compute, {.loss_scale = LossScaler::Options{.scale = -1}});
                 }).what(),
                 "loss_scaler: scale is -1; expected a finite number above 0");
  });
}

}  // namespace
}  // namespace weft::trainer_scale_test
