// ScheduleFreeAdamW trains other values than those to evaluate: evaluation, loads without an optimizer,
// fine-tuning and exports take the values for evaluation.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/llama.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/linear.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::values_for_evaluation_test {
namespace {

using test::Rank;
using test::Ranks;

constexpr std::int64_t kSequence = 8, kVocab = 34;
using Values = std::map<std::string, std::vector<float>>;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 16, c.layers = 1, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab;
  c.max_seq = kSequence, c.init_std = 0.1;
  return c;
}

Values values_of(ParallelModel& model) {
  Values all;
  for (const Parameter* p : model.parameters()) {
    const Tensor whole = full(p->master());
    all[p->path()].assign(whole.f32().begin(), whole.f32().end());
  }
  return all;
}

ParallelModel built(const DeviceMesh& mesh, Compute& compute, DataForm data, std::uint64_t seed) {
  return build_parallel_model(small(), mesh, compute, {.data = data, .seed = seed, .frozen = {"norm"}});
}

class ValuesForEvaluation : public testing::TestWithParam<DataForm> {};
INSTANTIATE_TEST_SUITE_P(Data, ValuesForEvaluation, testing::Values(DataForm::ddp, DataForm::fsdp),
                         [](const auto& data) { return data.param == DataForm::ddp ? "ddp" : "fsdp"; });

TEST_P(ValuesForEvaluation, AreWhatOthersGet) {
  const test::TemporaryFolder folder;
  Values trained, evaluated;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    ParallelModel model = built(mesh, compute, GetParam(), 3);
    Trainer trainer(model, compute, {.optimizer = ScheduleFreeAdamW::Options{.beta1 = 0.8}});
    const std::vector<std::int64_t> tokens{3, 1, 4, 1, 5, 9, 2, 6}, labels{1, 4, 1, 5, 9, 2, 6, 5};
    const TokenBatch batch{tokens.data(), labels.data(), 1, kSequence, 0};
    for (int step = 0; step < 3; ++step) trainer.step({&batch, 1}, 0.02);
    const Values y = values_of(model);
    const double loss = trainer.evaluate({&batch, 1}).loss;
    EXPECT_EQ(values_of(model), y);  // evaluate() has put them back
    trainer.save(folder.path() / "run");
    const Optimizer::Swapped swapped(trainer.optimizer());
    EXPECT_EQ(trainer.evaluate({&batch, 1}).loss, loss);
    const Values x = values_of(model);
    if (rank.rank != 0) return;
    trained = y, evaluated = x;
  });
  EXPECT_NE(trained, evaluated);
  EXPECT_EQ(trained["norm.weight"], evaluated["norm.weight"]);  // frozen

  for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 3}, {"tp", 1}}})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), shape);
      ParallelModel model = built(mesh, compute, shape.size("dp") > 1 ? GetParam() : DataForm::ddp, 4);
      load_checkpoint(folder.path() / "run", model.mesh, *model.model, {});
      EXPECT_EQ(values_of(model), evaluated);
      ParallelModel tuned = built(mesh, compute, DataForm::ddp, 5);
      init_from(folder.path() / "run", tuned.mesh, *tuned.model);
      EXPECT_EQ(values_of(tuned), evaluated);
      Trainer resumed(tuned, compute, {.optimizer = ScheduleFreeAdamW::Options{.beta1 = 0.8}});
      resumed.load(folder.path() / "run");
      EXPECT_EQ(values_of(tuned), trained);
    });

  const CheckpointReader reader = CheckpointReader::open(folder.path() / "run");
  EXPECT_TRUE(has_values_for_evaluation(reader));
  Context context;
  Compute compute(context, 1);
  for (const auto& [path, values] : evaluated)
    EXPECT_THAT(value_for_evaluation(reader, compute, path).f32(), testing::ElementsAreArray(values)) << path;
  export_llama(folder.path() / "run", folder.path() / "llama", small());
  const SafetensorsFile llama = SafetensorsFile::open(folder.path() / "llama" / "model.safetensors");
  EXPECT_THAT(llama.read(context, "lm_head.weight").f32(),
              testing::ElementsAreArray(evaluated["output_head.proj.weight"]));
}

// Two layers, whose passes nobody runs.
std::unique_ptr<Sequential> layers(const std::string& first, std::int64_t rows, const std::string& second,
                                   std::int64_t more) {
  auto made = std::make_unique<Sequential>();
  made->append(first, std::make_unique<Linear>(4, rows));
  made->append(second, std::make_unique<Linear>(4, more));
  return made;
}

// Fine-tuning under other names and shapes: `joint` (6, 4) is read as rows of `c` (2, 4) and `d` (4, 4).
TEST(EvaluationValues, AreReadUnderOtherNames) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const auto from = layers("joint", 6, "other", 1), to = layers("c", 2, "d", 4);
    for (Module* model : {static_cast<Module*>(from.get()), static_cast<Module*>(to.get())}) {
      replicate(*model, mesh);
      materialise(*model, compute);
      initialise(*model, 3);
    }
    ScheduleFreeAdamW optimizer(compute, from->parameters(), {.beta1 = 0.8});
    for (int step = 0; step < 3; ++step) {
      for (Parameter* p : from->parameters()) p->accumulate(p->master());
      optimizer.step(0.05);
      optimizer.zero_gradients();
    }
    save_checkpoint(folder.path(), mesh, 1, *from, TrainingState(&optimizer));
    const auto trained = from->parameter("joint.weight")->master().clone(rank.context);
    const Optimizer::Swapped swapped(optimizer);
    const auto joint = from->parameter("joint.weight")->master().f32();
    const InitOptions options{.left_out = {"other"}, .remap = [](std::string_view name, const Shape&) {
                                return name == "param.joint.weight"
                                           ? std::vector<RemappedTensor>{{"param.c.weight", {2, 4}},
                                                                         {"param.d.weight", {4, 4}, 2}}
                                           : std::vector<RemappedTensor>{};
                              }};
    init_from(folder.path(), mesh, *to, options);
    EXPECT_THAT(to->parameter("c.weight")->master().f32(), testing::ElementsAreArray(joint.first(8)));
    EXPECT_THAT(to->parameter("d.weight")->master().f32(), testing::ElementsAreArray(joint.subspan(8)));
    EXPECT_NE(trained.f32()[0], joint[0]);
  });
}

TEST(EvaluationValues, NeedTheBetaOfTheirCheckpoint) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}});
    const Tensor values(rank.context, {2}), rates(rank.context, {2}, DType::f64),
        steps(rank.context, {1}, DType::i64);
    for (const Tensor* t : {&values, &rates, &steps})
      std::memset(t->data(), 1, static_cast<std::size_t>(t->bytes()));
    const std::vector<NamedView> all{{"param.w", values.view(), nullptr},
                                     {"optimizer.z.w", values.view(), nullptr},
                                     {"optimizer.rates.w", rates.view(), nullptr},
                                     {"optimizer.step.w", steps.view(), nullptr}};
    save_checkpoint(folder.path(), mesh, 4, all);
  });
  Context context;
  Compute compute(context, 1);
  const CheckpointReader reader = CheckpointReader::open(folder.path());
  EXPECT_EQ(test::error_text([&] { return value_for_evaluation(reader, compute, "w"); }),
            "bad_argument: load_checkpoint: " + (folder.path() / "step-00000004").string() +
                ": \"optimizer.rates.w\" has 2 numbers; expected 3: an older version has saved it, without "
                "the beta1 "
                "that gives the values for evaluation");
}

}  // namespace
}  // namespace weft::values_for_evaluation_test
