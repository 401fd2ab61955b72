// A Trainer with a FreezeSchedule, on every mesh.
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"
#include "weft/train/gradients.hpp"

namespace weft::trainer_freeze_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using Weights = std::vector<std::vector<float>>;

constexpr std::int64_t kRows = 4, kSequence = 8, kVocab = 32, kUnfrozenAt = 3, kSteps = 6;
constexpr double kRate = 0.01;

struct OneRun {
  OneRun(Rank& rank, const MeshShape& shape, DataForm data)
      : compute(rank.context),
        mesh(rank.group(), shape),
        model(build_parallel_model(config(), mesh, compute, {.data = data, .seed = 3})) {}
  static TransformerConfig config() {
    TransformerConfig c;
    c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab, c.max_seq = 8;
    c.init_std = 0.2;
    return c;
  }
  // Calls `use` with this rank's rows of a step's batch.
  void with_batch(std::int64_t step, const std::function<void(const TokenBatch&)>& use) const {
    std::vector<std::int64_t> tokens, labels;
    const std::int64_t rows = kRows / model.data.size(), first = rows * model.data.rank();
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((step * 5 + r * 7 + i * i) % kVocab);
        labels.push_back((step * 5 + r * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    use({tokens.data(), labels.data(), rows, kSequence, kRows});
  }
  void step(Trainer& trainer) const {
    with_batch(trainer.steps(), [&](const TokenBatch& batch) { trainer.step({&batch, 1}, kRate); });
  }
  Weights masters() const {
    Weights all;
    for (const Parameter* p : model.parameters()) {
      const Tensor whole = full(p->master());
      all.emplace_back(whole.f32().begin(), whole.f32().end());
    }
    return all;
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
};

bool is_part(const Parameter* p) { return p->path().starts_with("layers.0."); }

const FreezeSchedule kSchedule({{0, "layers.0", true}, {kUnfrozenAt, "layers.0", false}});

struct Form {
  MeshShape mesh;
  DataForm data;
};
const Form kForms[] = {{{{"dp", 1}, {"tp", 1}}, DataForm::ddp},
                       {{{"dp", 2}, {"tp", 1}}, DataForm::ddp},
                       {{{"dp", 2}, {"tp", 2}}, DataForm::ddp},
                       {{{"dp", 2}, {"tp", 2}}, DataForm::fsdp}};

// All parameters have gradients in all steps. The part has the rate 0 until it is unfrozen: no optimizer
// steps it.
template <class Kind>
Weights with_rate_0(OneRun& run, const typename Kind::Options& options) {
  std::vector<Parameter*> part, rest;
  for (Parameter* p : run.model.parameters()) (is_part(p) ? part : rest).push_back(p);
  Kind of_rest(run.compute, rest, options);
  std::optional<Kind> of_part;
  CrossEntropy cross_entropy;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    if (step == kUnfrozenAt) of_part.emplace(run.compute, part, options);
    run.with_batch(step, [&](const TokenBatch& batch) {
      const auto placed = [&](const std::int64_t* numbers) {
        Tensor t(run.compute.context(), {batch.rows, batch.sequence}, DType::i64);
        std::copy(numbers, numbers + t.count(), t.as<std::int64_t>().begin());
        return run.model.place(t, kRows);
      };
      Frame frame(run.compute, {.step = step});
      const Tensors logits = run.model.model->forward({placed(batch.tokens)}, frame);
      cross_entropy.forward({logits[0], placed(batch.labels), scalar(run.model.mesh, kRows * kSequence)},
                            frame);
      run.model.model->backward(cross_entropy.backward({}, frame), frame);
      run.model.finish();
      if (run.model.tensor.size() > 1)
        reduce_gradients(run.model.parameters(), run.model.tensor, {.compute = &run.compute});
    });
    of_rest.step(kRate);
    if (of_part) of_part->step(kRate);
    for (Parameter* p : run.model.parameters()) p->zero_gradient();
  }
  return run.masters();
}

template <class Kind>
void expect_rate_0(const typename Kind::Options& options) {
  for (const Form& form : kForms)
    test::run_ranks(Ranks::threads, form.mesh.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(form.mesh));
      OneRun run(rank, form.mesh, form.data), plain(rank, form.mesh, form.data);
      const Weights first = run.masters();
      Trainer trainer(run.model, run.compute,
                      {.optimizer = options, .max_norm = 0, .freeze = kSchedule, .ema = Ema::Options{}});
      const std::size_t all = run.model.parameters().size(), rest = trainer.ema()->parameters().size();
      EXPECT_LT(rest, all);
      for (std::int64_t step = 0; step < kSteps; ++step) {
        run.step(trainer);
        const Weights now = run.masters();
        for (std::size_t i = 0; i < all; ++i) {
          const Parameter* const p = run.model.parameters()[i];
          const bool frozen = is_part(p) && step < kUnfrozenAt;
          EXPECT_EQ(now[i] == first[i], frozen) << p->path() << ", step " << step;
          EXPECT_EQ(p->trainable(), !frozen) << p->path() << ", step " << step;
        }
        EXPECT_EQ(trainer.ema()->parameters().size(), step < kUnfrozenAt ? rest : all);
      }
      EXPECT_EQ(run.masters(), with_rate_0<Kind>(plain, options));
    });
}

TEST(TrainerFreeze, UnfreezingIsARateOf0UntilThen) { expect_rate_0<SGD>({.weight_decay = 0.1}); }

TEST(TrainerFreeze, StateBeginsWhenAPartIsUnfrozen) {
  expect_rate_0<SGD>({.momentum = 0.9, .weight_decay = 0.1});
  expect_rate_0<AdamW>({});
}

// A run is stopped before and after the part is unfrozen, and goes on in a new trainer.
TEST(TrainerFreeze, ARunGoesOn) {
  for (const Form& form : kForms) {
    const test::TemporaryFolder folder;
    test::run_ranks(Ranks::threads, form.mesh.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(form.mesh));
      const Trainer::Options options{.freeze = kSchedule, .ema = Ema::Options{}};
      OneRun whole(rank, form.mesh, form.data);
      Trainer trainer(whole.model, whole.compute, options);
      for (std::int64_t step = 0; step < kSteps; ++step) {
        if (step == kUnfrozenAt - 1 || step == kUnfrozenAt || step == kUnfrozenAt + 1)
          trainer.save(folder / std::to_string(step));
        whole.step(trainer);
      }
      for (const std::int64_t from : {kUnfrozenAt - 1, kUnfrozenAt, kUnfrozenAt + 1}) {
        OneRun resumed(rank, form.mesh, form.data);
        Trainer again(resumed.model, resumed.compute, options);
        again.load(folder / std::to_string(from));
        EXPECT_EQ(again.steps(), from);
        while (again.steps() < kSteps) resumed.step(again);
        EXPECT_EQ(resumed.masters(), whole.masters()) << from;
      }
    });
  }
}

// A part that is frozen again keeps its values, and goes on with its state.
TEST(TrainerFreeze, APartMayBeFrozenAgain) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const DataForm data : {DataForm::ddp, DataForm::fsdp}) {
      OneRun run(rank, {{"dp", 2}, {"tp", 1}}, data);
      Trainer trainer(run.model, run.compute,
                      {.freeze = FreezeSchedule::from_text("1:frozen:layers.0,2:trained:layers.0")});
      std::vector<Weights> after{run.masters()};
      for (int step = 0; step < 3; ++step) {
        run.step(trainer);
        after.push_back(run.masters());
      }
      for (std::size_t i = 0; i < after[0].size(); ++i) {
        const bool part = is_part(run.model.parameters()[i]);
        EXPECT_NE(after[1][i], after[0][i]);
        EXPECT_EQ(after[2][i] == after[1][i], part);
        EXPECT_NE(after[3][i], after[2][i]);
      }
    }
  });
}

TEST(TrainerFreeze, WhatIsWrongIsNamed) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const MeshShape shape{{"dp", 2}, {"tp", 1}};
    const auto text = [](const auto& call) { return std::string(error_of(call).what()); };
    OneRun run(rank, shape, DataForm::ddp);
    EXPECT_EQ(text([&] {
                Trainer(run.model, run.compute, {.freeze = FreezeSchedule({{2, "layers.2", true}})});
              }),
              "freeze schedule: the pattern \"layers.2\" of step 2 matches no parameter");
    Trainer trainer(run.model, run.compute, {.freeze = kSchedule});
    run.step(trainer);
    trainer.save(folder / "saved");
    const Weights before = run.masters();
    OneRun other(rank, shape, DataForm::ddp);
    Trainer later(other.model, other.compute,
                  {.freeze = FreezeSchedule::from_text("0:frozen:layers.0,4:trained:layers.0")});
    const std::string refused = text([&] { later.load(folder / "saved"); });
    EXPECT_NE(
        refused.find("has another freeze schedule: 3:trained:layers.0 is only there, 4:trained:layers.0 "
                     "is only here"),
        std::string::npos)
        << refused;
    OneRun third(rank, shape, DataForm::ddp);
    Trainer without(third.model, third.compute, {});
    EXPECT_NE(text([&] { without.load(folder / "saved"); }).find("0:frozen:layers.0 is only there"),
              std::string::npos);
    OneRun fourth(rank, shape, DataForm::ddp);
    Trainer differs(fourth.model, fourth.compute, {.freeze = rank.rank == 0 ? kSchedule : FreezeSchedule()});
    EXPECT_EQ(text([&] { fourth.step(differs); }),
              "trainer: options.freeze is not the same on all ranks of dp=2 x tp=1; expected the same");
    EXPECT_EQ(run.masters(), before);
  });
}

}  // namespace
}  // namespace weft::trainer_freeze_test
