// ScheduleFreeAdamW trains other values than those to evaluate: evaluation, loads without an optimizer,
// fine-tuning and exports take the values for evaluation.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/llama.hpp"
#include "weft/models/trainer.hpp"
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

}  // namespace
}  // namespace weft::values_for_evaluation_test
