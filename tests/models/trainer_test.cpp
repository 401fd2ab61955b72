// A step of the Trainer is the passes, reductions and updates that it says; batches that are wrong are errors
// on all ranks.
#include "weft/models/trainer.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <functional>
#include <limits>

#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/train/gradients.hpp"

namespace weft::trainer_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kRows = 4, kSequence = 8, kVocab = 32;
constexpr int kSteps = 4;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab, c.max_seq = 8;
  c.init_std = 0.1;
  return c;
}

// Rows [first, first + rows) of the batch of a step. Some labels do not count.
struct Rows {
  Rows(int step, std::int64_t first, std::int64_t rows) {
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((step * 5 + r * 7 + i * i) % kVocab);
        labels.push_back((r + i) % 5 == 0 ? CrossEntropy::kIgnore
                                          : (step * 5 + r * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    batch = {tokens.data(), labels.data(), rows, kSequence, 0};
  }
  Rows(const Rows&) = delete;
  std::vector<std::int64_t> tokens, labels;
  TokenBatch batch;
};

struct Built {
  Built(Rank& rank, const MeshShape& shape, const BuildOptions& options = {.seed = 3})
      : compute(rank.context),
        mesh(rank.group(), shape),
        model(build_parallel_model(small(), mesh, compute, options)) {}
  std::int64_t rows() const { return kRows / model.data.size(); }
  std::int64_t first() const { return rows() * model.data.rank(); }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
};

// The parts of a step, one after the other.
double loss_by_hand(Built& built, AdamW& optimizer, const Rows& rows, int step) {
  Context& context = built.compute.context();
  const Shape shape{built.rows(), kSequence};
  Tensor tokens(context, shape, DType::i64), labels(context, shape, DType::i64);
  std::copy(rows.tokens.begin(), rows.tokens.end(), tokens.as<std::int64_t>().begin());
  std::copy(rows.labels.begin(), rows.labels.end(), labels.as<std::int64_t>().begin());
  tokens = built.model.place(tokens, kRows), labels = built.model.place(labels, kRows);
  Frame frame(built.compute, {.seed = 0, .step = step});
  CrossEntropy cross_entropy;
  const Tensor logits = built.model.model->forward({tokens}, frame)[0];
  const Tensor loss = cross_entropy.forward({logits, labels, global_valid(context, labels)}, frame)[0];
  built.model.model->backward(cross_entropy.backward({}, frame), frame);
  built.model.reducer->finish();
  if (built.model.tensor.size() > 1) sync_replicated_gradients(optimizer.parameters(), built.model.tensor);
  clip_grad_norm(optimizer.parameters(), 0.5);
  optimizer.step(0.01);
  optimizer.zero_gradients();
  return full(loss).as<double>()[0];
}

const MeshShape kMeshes[] = {
    {{"dp", 1}, {"tp", 1}}, {{"dp", 2}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}};

TEST(Trainer, AStepIsItsParts) {
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Built one(rank, shape), two(rank, shape);
      Trainer trainer(one.model, one.compute, {.max_norm = 0.5});
      AdamW optimizer(two.compute, two.model.parameters(), {});
      for (int step = 0; step < kSteps; ++step) {
        const Rows rows(step, one.first(), one.rows());
        const Trainer::Result result = trainer.step({&rows.batch, 1}, 0.01);
        EXPECT_EQ(result.loss, loss_by_hand(two, optimizer, rows, step)) << to_string(shape);
        EXPECT_EQ(result.step, step);
        EXPECT_EQ(result.tokens, std::int64_t{kRows * kSequence - 6}) << "of all ranks";
        EXPECT_GT(result.grad_norm, 0);
        EXPECT_FALSE(result.skipped);
      }
      EXPECT_EQ(trainer.steps(), kSteps);
    });
}

TEST(Trainer, AModelHasOneTrainerAtATime) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Compute compute(rank.context, 1);
    ParallelModel model =
        build_parallel_model(small(), DeviceMesh(rank.group(), {{"dp", 1}, {"tp", 1}}), compute, {});
    const auto another = [&] { weft::Trainer trainer(model, compute, {}); };
    {
      weft::Trainer first(model, compute, {});
      const std::string text =
          "trainer: the model has a Trainer already; expected its end before another begins, or another "
          "model";
      EXPECT_EQ(test::error_text(ErrorCode::bad_argument, another), text);
      const weft::Trainer moved(std::move(first));
      EXPECT_EQ(test::error_text(ErrorCode::bad_argument, another), text);
    }
    another();
    EXPECT_THROW(weft::Trainer(model, compute, {.max_norm = -1}), Error);
    another();  // what was not made has no claim
  });
}

// Held-out batches: the mean over all tokens of all ranks, without smoothing; the training goes on as
// without.
TEST(Trainer, EvaluatesHeldOutBatches) {
  std::optional<double> first_loss;
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Built one(rank, shape), two(rank, shape);
      const Trainer::Options options{.label_smoothing = 0.1, .ema = Ema::Options{.decay = 0.5}};
      Trainer trainer(one.model, one.compute, options), plain(two.model, two.compute, options);
      Built three(rank, shape);
      Trainer hard(three.model, three.compute, {});
      const Rows held(9, one.first(), one.rows());
      const TokenBatch batches[] = {held.batch, held.batch};
      for (int step = 0; step < kSteps; ++step) {
        const Rows rows(step, one.first(), one.rows());
        trainer.backward({&rows.batch, 1});
        const Trainer::Evaluation found = trainer.evaluate(batches);
        EXPECT_EQ(found.tokens, std::int64_t{2 * (kRows * kSequence - 6)}) << "of both batches and all ranks";
        EXPECT_EQ(found.perplexity, std::exp(found.loss));
        if (step == 0) {
          EXPECT_NEAR(found.loss, hard.backward(batches).loss, 1e-12) << "the loss of a pass, not smoothed";
          hard.discard();
          if (rank.rank == 0) {
            EXPECT_NEAR(found.loss, first_loss.value_or(found.loss), 1e-5) << "on any mesh";
            first_loss = found.loss;
          }
        }
        const Trainer::Result with = trainer.update(0.01), without = plain.step({&rows.batch, 1}, 0.01);
        EXPECT_EQ(with.loss, without.loss);
        EXPECT_EQ(with.grad_norm, without.grad_norm);
      }
      const double masters = trainer.evaluate(batches).loss;
      const Ema::Swapped averages(*trainer.ema());
      EXPECT_NE(trainer.evaluate(batches).loss, masters);
    });
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Built built(rank, {{"dp", 1}, {"tp", 1}});
    Trainer trainer(built.model, built.compute, {});
    EXPECT_STREQ(error_of([&] { trainer.evaluate(std::vector<TokenBatch>{}); }).what(),
                 "trainer: no batch is given; expected 1 or more");
  });
}

TEST(Trainer, MicroBatchesAddUp) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const MeshShape shape{{"dp", 2}, {"tp", 1}};
    Built one(rank, shape), two(rank, shape);
    Trainer whole(one.model, one.compute, {.optimizer = SGD::Options{}}),
        cut(two.model, two.compute, {.optimizer = SGD::Options{}});
    for (int step = 0; step < kSteps; ++step) {
      const Rows all(step, one.first(), 2), first(step, one.first(), 1), second(step, one.first() + 1, 1);
      const TokenBatch parts[] = {first.batch, second.batch};
      const Trainer::Result of_all = whole.step({&all.batch, 1}, 0.1), of_parts = cut.step(parts, 0.1);
      EXPECT_EQ(of_parts.tokens, of_all.tokens);
      EXPECT_NEAR(of_parts.loss, of_all.loss, 1e-5);
      EXPECT_NEAR(of_parts.grad_norm, of_all.grad_norm, 1e-4 * of_all.grad_norm);
    }
  });
}

// Each pass knows how many samples of the step came before, over all data ranks: Dropout draws by that.
TEST(Trainer, MicroBatchesOfUnequalSizesSayTheirFirstSample) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Built one(rank, {{"dp", 2}, {"tp", 1}});
    Trainer trainer(one.model, one.compute, {});
    std::vector<std::int64_t> firsts;
    const HookHandle hook =
        one.model.model->get("layers.0")
            .add_hook(Module::HookPoint::pre_forward,
                      [&](Module&, Tensors&, Frame& frame) { firsts.push_back(frame.pass().first_sample); });
    const Rows a(0, one.first(), 2), b(0, one.first(), 1), c(0, one.first(), 2);
    const TokenBatch parts[] = {a.batch, b.batch, c.batch};
    trainer.step(parts, 0.1);
    EXPECT_EQ(firsts, (std::vector<std::int64_t>{0, 4, 6}));
  });
}

TEST(Trainer, GoesOnWhereItWasSaved) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const MeshShape shape{{"dp", 1}, {"tp", 2}};
    Built one(rank, shape), two(rank, shape);
    Trainer before(one.model, one.compute, {}), after(two.model, two.compute, {});
    const auto step = [&](Trainer& trainer) {
      const Rows rows(static_cast<int>(trainer.steps()), 0, kRows);
      return trainer.step({&rows.batch, 1}, 0.01).loss;
    };
    step(before), step(before);
    before.save(folder.path() / "run", {{"why", "test"}});
    const CheckpointInfo info = after.load(folder.path() / "run");
    EXPECT_EQ(info.step, 2);
    EXPECT_EQ(info.extra.at("why"), "test");
    EXPECT_EQ(after.steps(), 2);
    EXPECT_EQ(step(before), step(after));
  });
}

TEST(Trainer, LogitsAreThoseOfAForwardPass) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Built built(rank, {{"dp", 1}, {"tp", 2}});
    const Rows rows(0, 0, kRows);
    const Tensor logits = compute_logits(built.model, built.compute, rows.batch);
    ASSERT_EQ(logits.shape(), (Shape{kRows, kSequence, kVocab}));
    Context& context = built.compute.context();
    Tensor tokens(context, {kRows, kSequence}, DType::i64);
    std::copy(rows.tokens.begin(), rows.tokens.end(), tokens.as<std::int64_t>().begin());
    Frame frame(built.compute);
    const Tensor expected = built.model.model->forward({built.model.place(tokens, kRows)}, frame)[0];
    EXPECT_TRUE(std::equal(logits.f32().begin(), logits.f32().end(), expected.f32().begin()));
  });
}

// The gradients of a step whose last pass failed on one rank are of a part of its batches: no rank takes the
// step.
TEST(Trainer, AnErrorInALaterMicroBatchEndsTheStepOfAllRanks) {
  for (const Unused unused : {Unused::error, Unused::zeros})
    test::run_ranks(Ranks::threads, 2, [unused](Rank& rank) {
      BuildOptions options{.seed = 3};
      options.reducer.unused = unused;
      Built built(rank, {{"dp", 2}, {"tp", 1}}, options);
      Trainer trainer(built.model, built.compute, {});
      int passes = 0;
      const HookHandle hook = built.model.model->get("layers.0.mlp")
                                  .add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors&, Frame&) {
                                    if (rank.rank == 1 && ++passes == 2)
                                      throw Error(ErrorCode::bad_argument, "mine");
                                  });
      const Rows one(0, built.first(), built.rows()), two(1, built.first(), built.rows());
      const TokenBatch both[] = {one.batch, two.batch};
      const auto values = [&] {
        std::vector<float> all;
        for (const Parameter* p : built.model.parameters())
          all.insert(all.end(), p->master().f32().begin(), p->master().f32().end());
        return all;
      };
      const std::vector<float> before = values();
      const std::string text = error_of([&] { trainer.step(both, 0.01); }).what();
      if (rank.rank == 1)
        EXPECT_EQ(text, "mine");
      else
        EXPECT_THAT(
            text, testing::HasSubstr(
                      unused == Unused::error
                          ? "gradient_reducer: no backward pass used"
                          : "gradient_reducer: the passes of dp rank 1 have failed; its own error says why"));
      EXPECT_EQ(values(), before);
      EXPECT_EQ(trainer.steps(), 0);
      trainer.step(both, 0.01);  // the next one is as usual
      EXPECT_EQ(trainer.steps(), 1);
    });
}

// Ranks that call different functions learn of that, and not of a learning rate that one did not give.
TEST(Trainer, DifferentFunctionsOnTheRanksAreNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 1}});
    Trainer trainer(built.model, built.compute, {});
    const Rows rows(0, built.first(), built.rows());
    const auto expect = [](const std::function<void()>& call) {
      EXPECT_STREQ(
          error_of(call).what(),
          "trainer: which of step(), backward() and evaluate() was called is not the same on all ranks "
          "of dp=2 x tp=1; expected the same");
    };
    const std::function<void()> step =
                                    [&] {
                                      trainer.step({&rows.batch, 1}, 0.01);
                                    },
                                backward =
                                    [&] {
                                      trainer.backward({&rows.batch, 1});
                                    },
                                evaluate = [&] {
                                  trainer.evaluate({&rows.batch, 1});
                                };
    expect(rank.rank == 0 ? step : backward);
    expect(rank.rank == 1 ? step : evaluate);
    expect(rank.rank == 0 ? backward : evaluate);
    EXPECT_EQ(trainer.calls().begun, 3);
    EXPECT_EQ(trainer.calls().failed, 3);
    step();
    EXPECT_EQ(trainer.calls().begun, 4);
    EXPECT_EQ(trainer.calls().failed, 3);
  });
}

// The same if the rank is killed there.
TEST(Trainer, ARankThatIsKilledInALaterMicroBatchEndsTheStepOfAllRanks) {
  for (const Unused unused : {Unused::error, Unused::zeros}) {
    test::RankProcesses ranks(2, [unused](Rank& rank) {
      BuildOptions options{.seed = 3};
      options.reducer.unused = unused;
      Built built(rank, {{"dp", 2}, {"tp", 1}}, options);
      Trainer trainer(built.model, built.compute, {});
      int passes = 0;
      const HookHandle hook = built.model.model->get("layers.0.mlp")
                                  .add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors&, Frame&) {
                                    if (rank.rank == 1 && ++passes == 2) ::kill(::getpid(), SIGKILL);
                                  });
      const Rows one(0, built.first(), built.rows()), two(1, built.first(), built.rows());
      const TokenBatch both[] = {one.batch, two.batch};
      const Error e = error_of([&] { trainer.step(both, 0.01); });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
      EXPECT_EQ(trainer.steps(), 0);
    });
    ranks.finish({1});
  }
}

TEST(Trainer, WhatDoesNotFitIsNamedOnAllRanks) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 2}});
    Trainer trainer(built.model, built.compute, {});
    const bool wrong_here = rank.rank == 1;
    const auto text = [&](const auto& change) {
      Rows rows(0, built.first(), built.rows());
      change(rows);
      const Error e = error_of([&] { trainer.step({&rows.batch, 1}, 0.01); });
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      return std::string(e.what());
    };
    const char* const elsewhere =
        "trainer: another rank was given a batch that does not fit; its own error says why";
    const auto expect = [&](const char* here, const auto& change) {
      EXPECT_EQ(text([&](Rows& rows) {
                  if (wrong_here) change(rows);
                }),
                wrong_here ? here : elsewhere);
    };
    expect("trainer: tokens[3] is 32; expected 0 to 31", [](Rows& r) { r.tokens[3] = kVocab; });
    expect("trainer: labels[2] is -1; expected 0 to 31, or -100", [](Rows& r) { r.labels[2] = -1; });
    expect("trainer: sequence is 9; expected 1 to 8 (max_seq)", [](Rows& r) { r.batch.sequence = 9; });
    expect("trainer: rows is -1; expected 0 or more", [](Rows& r) { r.batch.rows = -1; });
    expect("trainer: global_rows is -4; expected 0 (the same rows on each rank) or more",
           [](Rows& r) { r.batch.global_rows = -4; });
    expect("trainer: labels has no memory; expected 2 x 8", [](Rows& r) { r.batch.labels = nullptr; });
    expect("trainer: 4611686018427387904 rows of 8 tokens are too many",
           [](Rows& r) { r.batch.rows = std::int64_t{1} << 62; });
    EXPECT_EQ(text([&](Rows& r) {
                if (wrong_here) r.tokens[0] = r.tokens[0] == 0 ? 1 : 0;
              }),
              rank.rank < 2 ? "trainer: the ranks of tp=2 were given different batches; expected the same, "
                              "as they share the work on each"
                            : elsewhere);
    EXPECT_EQ(text([](Rows& r) { r.labels.assign(r.labels.size(), CrossEntropy::kIgnore); }),
              "trainer: no label of the step counts (all are -100)");
    EXPECT_STREQ(error_of([&] { trainer.step(std::vector<TokenBatch>{}, 0.01); }).what(),
                 "trainer: no batch is given; expected 1 or more");
    // Data ranks that mean batches of different sizes. The first data rank has 2 rows of 3 or of 4.
    EXPECT_EQ(
        text([&](Rows& r) { r.batch.global_rows = rank.rank < 2 ? 3 : kRows; }),
        "trainer: global_rows of the batches is not the same on all ranks of dp=2 x tp=2; expected the same");
    Rows second(0, built.first(), built.rows());
    second.tokens[1] = -7;
    const Rows first(0, built.first(), built.rows());
    const TokenBatch both[] = {first.batch, second.batch};
    EXPECT_STREQ(error_of([&] { trainer.step(both, 0.01); }).what(),
                 "trainer: batch 1: tokens[1] is -7; expected 0 to 31");
    EXPECT_STREQ(error_of([&] { compute_logits(built.model, built.compute, second.batch); }).what(),
                 "compute_logits: tokens[1] is -7; expected 0 to 31");
    EXPECT_STREQ(error_of([&] { Trainer(built.model, built.compute, {.max_norm = -1}); }).what(),
                 "trainer: max_norm is -1; expected 0 (no clipping) or more");
    EXPECT_EQ(trainer.steps(), 0);
    trainer.step({&first.batch, 1}, 0.01);
  });
}

TEST(Trainer, AStepInTwoHalvesIsAStep) {
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Built one(rank, shape), two(rank, shape);
      Trainer whole(one.model, one.compute, {.max_norm = 0.5}),
          halves(two.model, two.compute, {.max_norm = 0.5});
      for (int step = 0; step < kSteps; ++step) {
        const Rows rows(step, one.first(), one.rows());
        const Trainer::Result expected = whole.step({&rows.batch, 1}, 0.01);
        const Trainer::Result first = halves.backward({&rows.batch, 1});
        EXPECT_EQ(first.loss, expected.loss) << to_string(shape);
        EXPECT_EQ(first.tokens, expected.tokens);
        EXPECT_EQ(grad_norm(halves.gradients(), 2), expected.grad_norm) << "of what is reduced already";
        const Trainer::Result second = halves.update(0.01);
        EXPECT_EQ(second.grad_norm, expected.grad_norm);
        EXPECT_EQ(second.loss, expected.loss);
        EXPECT_EQ(second.step, step);
      }
      EXPECT_EQ(halves.steps(), kSteps);
      const std::vector<Parameter*> p = one.model.parameters(), q = two.model.parameters();
      for (std::size_t i = 0; i < p.size(); ++i)
        EXPECT_TRUE(std::equal(p[i]->master().f32().begin(), p[i]->master().f32().end(),
                               q[i]->master().f32().begin()))
            << p[i]->path();
    });
}

// The update uses the values that the program writes between the halves: with SGD at rate 1, w - g.
TEST(Trainer, GradientsMayBeReplacedBeforeTheUpdate) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 2}});
    Trainer trainer(built.model, built.compute, {.optimizer = SGD::Options{}, .max_norm = 0});
    const Rows rows(0, built.first(), built.rows());
    const std::vector<Parameter*> parameters = built.model.parameters();
    trainer.backward({&rows.batch, 1});
    const std::vector<Gradient> gradients = trainer.gradients();
    ASSERT_EQ(gradients.size(), parameters.size());
    std::vector<float> before;
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(gradients[i].name, parameters[i]->path());
      EXPECT_EQ(gradients[i].data.shape, parameters[i]->master().shape());
      before.push_back(parameters[i]->master().f32()[0]);
      elements += parameters[i]->global_shape().count();
      for (float& g : gradients[i].data.as<float>()) g = 0.25f;
    }
    const Trainer::Result result = trainer.update(1);
    EXPECT_NEAR(result.grad_norm, 0.25 * std::sqrt(static_cast<double>(elements)), 1e-9);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_EQ(parameters[i]->master().f32()[0], before[i] - 0.25f) << parameters[i]->path();
  });
}

TEST(Trainer, TheHalvesOfAStepComeInTurn) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 1}});
    Trainer trainer(built.model, built.compute, {});
    const Rows rows(0, built.first(), built.rows());
    const auto text = [](const auto& call) { return std::string(error_of(call).what()); };
    EXPECT_EQ(text([&] { trainer.update(0.1); }),
              "trainer: update() has no gradients; expected backward() first");
    EXPECT_EQ(text([&] { trainer.gradients(); }),
              "trainer: there are no gradients; expected backward() first");
    trainer.backward({&rows.batch, 1});
    for (int again = 0; again < 2; ++again)
      EXPECT_EQ(text([&] {
                  if (again == 0) trainer.backward({&rows.batch, 1});
                  if (again == 1) trainer.step({&rows.batch, 1}, 0.1);
                }),
                "trainer: the gradients of a backward() are there; expected update() or discard() first");
    trainer.discard();
    trainer.discard();
    EXPECT_EQ(text([&] { trainer.update(0.1); }),
              "trainer: update() has no gradients; expected backward() first");
    EXPECT_EQ(trainer.steps(), 0);
    EXPECT_EQ(trainer.step({&rows.batch, 1}, 0.1).step, 0);
    trainer.backward({&rows.batch, 1});
    EXPECT_EQ(text([&] { trainer.update(rank.rank == 0 ? 0.1 : -1); }),
              rank.rank == 0
                  ? "trainer: another rank was given a learning rate that is none; its own error says why"
                  : "trainer: the learning rate is -1; expected a finite number of 0 or more");
    EXPECT_EQ(text([&] { trainer.gradients(); }),
              "trainer: there are no gradients; expected backward() first");
  });
}

TEST(Trainer, LearningRatesThatDifferAreAnErrorOnAllRanks) {
  for (const bool halves : {false, true})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      Built built(rank, {{"dp", 2}, {"tp", 2}});
      Trainer trainer(built.model, built.compute, {});
      const Rows rows(0, built.first(), built.rows());
      const auto text = [&](double rate) {
        return std::string(error_of([&] {
                             if (halves) trainer.backward({&rows.batch, 1});
                             if (halves) trainer.update(rate);
                             if (!halves) trainer.step({&rows.batch, 1}, rate);
                           }).what());
      };
      const float before = built.model.parameters()[0]->master().f32()[0];
      for (int odd = 0; odd < 4; ++odd) {
        const bool here = rank.rank == odd;
        EXPECT_EQ(
            text(here ? 0.02 : 0.01),
            fmt::format("trainer: the learning rate is {} here, and 0.01 to 0.02 on the ranks of dp=2 x "
                        "tp=2; expected the same on all",
                        here ? 0.02 : 0.01));
        EXPECT_EQ(
            text(here ? std::nan("") : 0.01),
            here ? "trainer: the learning rate is nan; expected a finite number of 0 or more"
                 : "trainer: another rank was given a learning rate that is none; its own error says why");
      }
      EXPECT_EQ(built.model.parameters()[0]->master().f32()[0], before);
      EXPECT_EQ(trainer.steps(), 0);
      EXPECT_FALSE(trainer.step({&rows.batch, 1}, rank.rank == 0 ? 0.0 : -0.0).skipped) << "are one rate";
    });
}

// Long before the deadline of their group, which is 30 seconds.
TEST(Trainer, LogitsOfAWrongBatchAreAnErrorOnAllTensorRanks) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 2}});
    const auto text = [&](bool wrong, const auto& change, const std::optional<Error>& fault = std::nullopt) {
      Rows rows(0, built.first(), built.rows());
      if (wrong) change(rows);
      return std::string(
          error_of([&] { compute_logits(built.model, built.compute, rows.batch, fault); }).what());
    };
    const bool wrong = built.model.tensor.rank() == 1;  // on either data rank
    const std::string elsewhere =
        "compute_logits: another rank of tp=2 was given a batch that does not fit; its own error says why";
    EXPECT_EQ(text(wrong, [](Rows& r) { r.tokens[3] = kVocab; }),
              wrong ? "compute_logits: tokens[3] is 32; expected 0 to 31" : elsewhere);
    EXPECT_EQ(text(wrong, [](Rows& r) { r.batch.sequence = 9; }),
              wrong ? "compute_logits: sequence is 9; expected 1 to 8 (max_seq)" : elsewhere);
    EXPECT_EQ(
        text(wrong, [](Rows& r) { r.tokens[0] = r.tokens[0] == 0 ? 1 : 0; }),
        "compute_logits: the ranks of tp=2 were given different batches; expected the same, as they share "
        "the work on each");
    std::optional<Error> fault;
    if (wrong) fault.emplace(ErrorCode::bad_argument, "the caller's own");
    EXPECT_EQ(text(
                  false, [](Rows&) {}, fault),
              wrong ? "the caller's own" : elsewhere);
    Rows rows(0, built.first(), built.rows());
    rows.batch.labels = nullptr;  // are not read
    compute_logits(built.model, built.compute, rows.batch);
  });
}

TEST(Trainer, ANormThatIsNotFiniteIsAnErrorOrSkipped) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 1}});
    std::optional<Trainer> skips;
    skips.emplace(built.model, built.compute, Trainer::Options{.max_norm = 0, .non_finite = NonFinite::skip});
    const Rows rows(0, built.first(), built.rows());
    Parameter& norm = *built.model.model->parameter("norm.weight");
    norm.write_master().f32()[0] = std::numeric_limits<float>::infinity();
    const Trainer::Result result = skips->step({&rows.batch, 1}, 0.01);
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(skips->steps(), 1);
    skips.reset();
    Trainer refuses(built.model, built.compute, {.max_norm = 0});
    EXPECT_EQ(error_of([&] { refuses.step({&rows.batch, 1}, 0.01); }).code(), ErrorCode::bad_argument);
    norm.write_master().f32()[0] = 1;
    EXPECT_FALSE(refuses.step({&rows.batch, 1}, 0.01).skipped) << "an error leaves nothing behind";
  });
}

// If an error ends any part of a pass, on all ranks or on one, the next step gives the results of a run
// without the error.
TEST(Trainer, AStepAfterAPassThatThrewWorks) {
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Built one(rank, shape), two(rank, shape);
      Trainer disturbed(one.model, one.compute, {}), plain(two.model, two.compute, {});
      const auto step = [&](Trainer& trainer, int number) {
        const std::int64_t half = one.rows() / 2;
        const Rows first(number, one.first(), half), second(number, one.first() + half, one.rows() - half);
        const TokenBatch parts[] = {first.batch, second.batch};
        return trainer.step(parts, 0.01).loss;
      };
      const auto disturb = [&](int number, const char* path, Module::HookPoint point, int micro_batch) {
        int calls = 0;
        const HookHandle hook = one.model.model->get(path).add_hook(point, [&](Module&, Tensors&, Frame&) {
          if (calls++ == micro_batch) throw Error(ErrorCode::unsupported, "not today");
        });
        EXPECT_EQ(std::string(error_of([&] { step(disturbed, number); }).what()), "not today");
      };
      for (int number = 0; number < 3; ++number) {
        for (const char* path : {"layers.0.mlp", "token_embedding"})
          for (const int micro_batch : {0, 1}) {
            disturb(number, path, Module::HookPoint::post_forward, micro_batch);
            disturb(number, path, Module::HookPoint::pre_backward, micro_batch);
          }
        if (shape == MeshShape{{"dp", 2}, {"tp", 1}}) {
          if (rank.rank == 1)
            disturb(number, "layers.0", Module::HookPoint::pre_backward, 0);
          else
            EXPECT_THAT(error_of([&] { step(disturbed, number); }).what(),
                        testing::HasSubstr("gradient_reducer: no backward pass used"));
        }
        EXPECT_EQ(step(disturbed, number), step(plain, number)) << to_string(shape) << ", step " << number;
      }
    });
}

}  // namespace
}  // namespace weft::trainer_test
