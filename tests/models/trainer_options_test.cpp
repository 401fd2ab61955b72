// Averages and label smoothing of the Trainer, on every mesh.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/norm.hpp"

namespace weft::trainer_options_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kRows = 4, kSequence = 8, kVocab = 30;

struct Built {
  Built(Rank& rank, const MeshShape& shape, const BuildOptions& options)
      : compute(rank.context),
        mesh(rank.group(), shape),
        model(build_parallel_model(config(), mesh, compute, options)) {}
  static TransformerConfig config() {
    TransformerConfig c;
    c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab, c.max_seq = 8;
    c.init_std = 0.2;
    return c;
  }
  // The rows of this rank of a step's batch; some labels do not count.
  Trainer::Result step(Trainer& trainer, int number, double rate = 0.01) const {
    std::vector<std::int64_t> tokens, labels;
    const std::int64_t rows = kRows / model.data.size(), first = rows * model.data.rank();
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((number * 5 + r * 7 + i * i) % kVocab);
        labels.push_back((r + i) % 5 == 0 ? CrossEntropy::kIgnore
                                          : (number * 5 + r * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    const TokenBatch batch{tokens.data(), labels.data(), rows, kSequence, kRows};
    return trainer.step({&batch, 1}, rate);
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
};

std::vector<float> whole(const Tensor& t) {
  const Tensor all = full(t);
  return {all.f32().begin(), all.f32().end()};
}
std::vector<std::vector<float>> masters(const Built& built) {
  std::vector<std::vector<float>> all;
  for (const Parameter* p : built.model.parameters()) all.push_back(whole(p->master()));
  return all;
}
std::vector<std::vector<float>> averages(const Trainer& trainer) {
  std::vector<std::vector<float>> all;
  for (std::size_t i = 0; i < trainer.ema()->parameters().size(); ++i)
    all.push_back(whole(trainer.ema()->average(i)));
  return all;
}

struct Form {
  MeshShape mesh;
  DataForm data;
};
const Form kForms[] = {{{{"dp", 1}, {"tp", 1}}, DataForm::ddp},
                       {{{"dp", 2}, {"tp", 2}}, DataForm::ddp},
                       {{{"dp", 2}, {"tp", 1}}, DataForm::fsdp},
                       {{{"dp", 2}, {"tp", 2}}, DataForm::fsdp}};

// average <- d average + (1 - d) master after each step that is taken; a step that is skipped leaves it.
TEST(TrainerAverages, FollowTheStepsThatAreTaken) {
  for (const Form& form : kForms)
    test::run_ranks(Ranks::threads, form.mesh.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(form.mesh));
      const Built built(rank, form.mesh, {.data = form.data, .seed = 3});
      Trainer trainer(const_cast<ParallelModel&>(built.model), const_cast<Compute&>(built.compute),
                      {.non_finite = NonFinite::skip, .ema = Ema::Options{.decay = 0.75}});
      std::vector<std::vector<float>> expected = masters(built);
      ASSERT_EQ(trainer.ema()->parameters().size(), expected.size());
      EXPECT_EQ(averages(trainer), expected) << "they begin as the masters";
      for (int number = 0; number < 4; ++number) {
        HookHandle overflow;
        if (number == 2)
          overflow = built.model.model->get("layers.0.mlp")
                         .add_hook(Module::HookPoint::pre_backward,
                                   [](Module&, Tensors& dy, Frame&) { dy[0].data_ptr<float>()[0] = NAN; });
        EXPECT_EQ(built.step(trainer, number).skipped, number == 2);
        const std::vector<std::vector<float>> now = masters(built), got = averages(trainer);
        for (std::size_t p = 0; p < now.size(); ++p)
          for (std::size_t i = 0; i < now[p].size(); ++i) {
            if (number != 2) expected[p][i] = 0.75F * expected[p][i] + 0.25F * now[p][i];
            ASSERT_NEAR(got[p][i], expected[p][i], 1e-6) << "step " << number;
          }
      }
      EXPECT_NE(averages(trainer), masters(built));
    });
}

TEST(TrainerAverages, AreSavedAndGoOn) {
  const test::TemporaryFolder folder;
  for (const Form& form : kForms)
    test::run_ranks(Ranks::threads, form.mesh.size(), [&](Rank& rank) {
      const std::filesystem::path saved =
          folder.path() / (to_string(form.mesh) + (form.data == DataForm::fsdp ? " divided" : ""));
      const Trainer::Options options{.ema = Ema::Options{.decay = 0.9, .warm_up = true}};
      Built one(rank, form.mesh, {.data = form.data, .seed = 3}),
          two(rank, form.mesh, {.data = form.data, .seed = 4}),
          none(rank, form.mesh, {.data = form.data, .seed = 4});
      Trainer trainer(one.model, one.compute, options), resumed(two.model, two.compute, options),
          without(none.model, none.compute, {});
      EXPECT_EQ(trainer.memory().states, without.memory().states + trainer.memory().gradients)
          << "averages are as large as gradients";
      for (int number = 0; number < 3; ++number) one.step(trainer, number);
      trainer.save(saved);
      resumed.load(saved);
      EXPECT_EQ(averages(resumed), averages(trainer));
      for (int number = 3; number < 5; ++number) {
        one.step(trainer, number);
        two.step(resumed, number);
      }
      EXPECT_EQ(averages(resumed), averages(trainer));
      EXPECT_EQ(masters(two), masters(one));
      const Error e = error_of([&] { without.load(saved); });
      EXPECT_NE(std::string(e.what()).find("ema."), std::string::npos) << e.what();
      EXPECT_EQ(without.ema(), nullptr);
    });
}

// Only one rank has swapped in its averages: no rank continues alone.
TEST(TrainerAverages, InThePlaceOfMastersNoStepIsTaken) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Built built(rank, {{"dp", 2}, {"tp", 2}}, {.seed = 3});
    Trainer trainer(built.model, built.compute, {.ema = Ema::Options{.decay = 0.5}});
    built.step(trainer, 0);
    const std::vector<std::vector<float>> before = masters(built);
    if (rank.rank == 1) trainer.ema()->swap_in();
    const Error e = error_of([&] { built.step(trainer, 1); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_STREQ(e.what(), rank.rank == 1
                               ? "trainer: the averages are in the place of the masters; swap_out() first"
                               : "trainer: another rank has averages, or values for evaluation, in the place "
                                 "of its masters; its own error says why");
    if (rank.rank == 1) trainer.ema()->swap_out();
    EXPECT_EQ(masters(built), before);
    EXPECT_FALSE(built.step(trainer, 1).skipped);
  });
}

// A loss with other terms is the same on every mesh, over the whole vocabulary, however it is split.
void expect_same_on_every_mesh(const Trainer::Options& of_loss) {
  struct Losses {
    double with, plain;
    std::vector<std::vector<float>> weights;
  };
  std::optional<Losses> serial;
  for (const VocabSplit vocab : {VocabSplit::whole, VocabSplit::shard})
    for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 1}}, MeshShape{{"dp", 1}, {"tp", 2}},
                                   MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}}) {
      if (vocab == VocabSplit::whole && kVocab % shape.size("tp") != 0) continue;
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        SCOPED_TRACE(to_string(shape));
        const BuildOptions options{.seed = 3, .tensor = {.vocab = vocab}};
        Built one(rank, shape, options), two(rank, shape, options);
        Trainer with(one.model, one.compute, of_loss),
            plain(two.model, two.compute, {.optimizer = SGD::Options{}});
        const double first = one.step(with, 0, 0.5).loss, other = two.step(plain, 0, 0.5).loss;
        const Losses got{first, other, masters(one)};
        EXPECT_GT(std::abs(first - other), 1e-4);
        if (!serial) serial = got;
        EXPECT_NEAR(got.with, serial->with, 1e-6);
        EXPECT_NEAR(got.plain, serial->plain, 1e-6);
        for (std::size_t p = 0; p < got.weights.size(); ++p)
          for (std::size_t i = 0; i < got.weights[p].size(); ++i)
            ASSERT_NEAR(got.weights[p][i], serial->weights[p][i], 2e-5);
      });
    }
}

TEST(TrainerLabelSmoothing, IsTheSameOnEveryMesh) {
  expect_same_on_every_mesh({.optimizer = SGD::Options{}, .label_smoothing = 0.2});
}

TEST(TrainerZLoss, IsTheSameOnEveryMesh) {
  expect_same_on_every_mesh({.optimizer = SGD::Options{}, .z_loss = 0.01});
}

TEST(TrainerOptions, ThatAreOutOfRangeAreNamed) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Built built(rank, {{"dp", 1}, {"tp", 1}}, {});
    const auto text = [&](const Trainer::Options& options) {
      return std::string(error_of([&] { Trainer(built.model, built.compute, options); }).what());
    };
    EXPECT_EQ(text({.label_smoothing = 1.5}), "cross entropy: label_smoothing is 1.5; expected 0 to 1");
    EXPECT_EQ(text({.z_loss = -1}), "cross entropy: z_loss is -1; expected a finite number of 0 or more");
    EXPECT_EQ(text({.ema = Ema::Options{.decay = 1}}),
              "ema: decay is 1; expected 0 or more, and less than 1");
  });
}

// Ranks whose models differ in what shapes do not say, and data that a program compares.
TEST(TrainerOptions, DifferentModelsAndDataAreRefused) {
  const auto step_with = [](const std::function<void(TransformerConfig&)>& on_rank_1,
                            const std::string& identity) {
    std::string text;
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
      TransformerConfig config = Built::config();
      if (rank.rank == 1) on_rank_1(config);
      ParallelModel model = build_parallel_model(config, mesh, compute, {});
      Trainer trainer(model, compute, {.identity = rank.rank == 1 ? identity : "book"});
      const std::vector<std::int64_t> tokens(kSequence, 3);
      const TokenBatch batch{tokens.data(), tokens.data(), 1, kSequence, 2};
      const std::string own = test::error_text([&] { trainer.step({&batch, 1}, 0.01); });
      if (rank.rank == 0) text = own;
    });
    return text;
  };
  const std::string model =
      "bad_argument: trainer: the model (its recipe, or the paths and shapes of its parameters) is not the "
      "same on all ranks of dp=2 x tp=1; expected the same";
  EXPECT_EQ(step_with([](TransformerConfig& c) { c.norm_eps = 1e-3; }, "book"), model);
  EXPECT_EQ(step_with([](TransformerConfig& c) { c.rope_theta = 50; }, "book"), model);
  EXPECT_EQ(step_with([](TransformerConfig& c) { c.heads = 2; }, "book"), model);
  EXPECT_EQ(step_with([](TransformerConfig& c) { c.ffn_hidden = 40; }, "book"), model);
  EXPECT_EQ(
      step_with([](TransformerConfig&) {}, "another book"),
      "bad_argument: trainer: options.identity is not the same on all ranks of dp=2 x tp=1; expected the "
      "same");
  EXPECT_EQ(step_with([](TransformerConfig&) {}, "book"), "no error");
}

// A batch norm counts by the layout, so the samples of all ranks must have one shape.
TEST(TrainerOptions, SamplesOfDifferentShapesWithABatchNormAreRefused) {
  for (const bool normed : {true, false})
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
      Recipe recipe;
      recipe.name = "maps";
      recipe.build = [normed]() -> std::unique_ptr<Module> {
        if (normed) return std::make_unique<BatchNorm>(3);
        return std::make_unique<GroupNorm>(1, 3);
      };
      recipe.loss = [] { return std::make_unique<MeanSquaredError>(); };
      ParallelModel model = build_parallel_model(recipe, mesh, compute, {});
      Trainer trainer(model, compute, {});
      const Tensor x(rank.context, {2, 3, 4, 5 + rank.rank});
      std::fill_n(x.f32().data(), x.count(), 1.0f);
      const Batch batch{.inputs = {x}, .targets = {x}};
      EXPECT_EQ(
          test::error_text([&] {
            trainer.step({&batch, 1}, 0.01);
          }),
          normed ? "bad_argument: trainer: the shape of a sample, for a model with a BatchNorm, is not the "
                   "same on all ranks of dp=2 x tp=1; expected the same"
                 : "no error");
    });
}

// Stages have different matrices, and a pattern may be of another stage.
TEST(TrainerOptions, MuonInAPipeline) {
  const auto losses = [](int stages) {
    std::vector<double> all;
    test::run_ranks(Ranks::threads, stages, [&](Rank& rank) {
      Built built(rank, {{"pp", stages}, {"dp", 1}, {"tp", 1}}, {.pipeline_axis = "pp", .seed = 3});
      Trainer trainer(built.model, built.compute, {.optimizer = Muon::Options{.adamw_for = {"output_head"}}});
      std::vector<double> own;
      for (int i = 0; i < 3; ++i) own.push_back(built.step(trainer, i).loss);
      if (rank.rank == 0) all = own;
    });
    return all;
  };
  EXPECT_EQ(losses(2), losses(1));
}

}  // namespace
}  // namespace weft::trainer_options_test
