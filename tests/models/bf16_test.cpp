// A transformer with activations in bf16 trains like one in f32, on every kind of mesh; what its layers give
// and get is bf16.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/trainer.hpp"

namespace weft::bf16_model_test {
namespace {

using test::Rank;
using test::Ranks;

constexpr std::int64_t kVocab = 64, kSequence = 16, kRows = 4;
constexpr int kSteps = 25;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 32, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 64, c.vocab = kVocab;
  c.max_seq = kSequence;
  c.init_std = 0.1;
  return c;
}

// A text in which the next token follows from the one before.
std::int64_t token(std::int64_t sample, std::int64_t at) { return (sample * 7 + at * at % 13) % kVocab; }

struct Form {
  const char* name;
  MeshShape mesh;
  DType dtype = DType::bf16, activations = DType::bf16;
  DataForm data = DataForm::ddp;
  TransformerPlanOptions tensor = {};
};

// The dtypes of all tensors that modules below the root give and get, in both passes.
struct Seen {
  std::map<std::string, DType> outputs, gradients;
};
void watch(Module& root, Seen& seen) {
  root.visit([&](Module& m) {
    m.add_hook(Module::HookPoint::post_forward, [&](Module& of, Tensors& y, Frame&) {
       seen.outputs[of.path()] = y.at(0).dtype();
     }).detach();
    m.add_hook(Module::HookPoint::post_backward, [&](Module& of, Tensors& dx, Frame&) {
       if (!dx.empty()) seen.gradients[of.path()] = dx[0].dtype();
     }).detach();
  });
}

std::vector<double> losses_of(Rank& rank, const Form& form, Seen& seen) {
  Compute compute(rank.context, 1);
  const DeviceMesh mesh(rank.group(), form.mesh);
  ParallelModel built = build_parallel_model(small(), mesh, compute,
                                             {.data = form.data,
                                              .seed = 3,
                                              .dtype = form.dtype,
                                              .activations = form.activations,
                                              .tensor = form.tensor});
  watch(*built.model, seen);
  Trainer trainer(built, compute, {});
  const std::int64_t rows = kRows / built.data.size(), first = rows * built.data.rank();
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::int64_t> tokens, labels;
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back(token(r + step % 3, i));
        labels.push_back(token(r + step % 3, i + 1));
      }
    const TokenBatch batch{tokens.data(), labels.data(), rows, kSequence, 0};
    losses.push_back(trainer.step({&batch, 1}, 0.003).loss);
  }
  return losses;
}

TEST(Bf16Activations, TrainLikeF32) {
  std::vector<double> expected;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Seen seen;
    expected = losses_of(rank, {"f32", {{"dp", 1}, {"tp", 1}}, DType::f32, DType::f32}, seen);
    EXPECT_EQ(seen.outputs.at("layers.0"), DType::f32);
  });
  EXPECT_LT(expected.back(), 0.7 * expected.front()) << "nothing was learnt";
  const TransformerPlanOptions sequence{.sequence_parallel = true},
      vocabulary{.sequence_parallel = true, .vocab = VocabSplit::shard};
  const Form forms[] = {
      {"one rank", {{"dp", 1}, {"tp", 1}}},
      {"tp", {{"dp", 1}, {"tp", 2}}},
      {"sequence parallel", {{"dp", 1}, {"tp", 2}}, DType::bf16, DType::bf16, DataForm::ddp, sequence},
      {"vocabulary parallel", {{"dp", 1}, {"tp", 2}}, DType::bf16, DType::bf16, DataForm::ddp, vocabulary},
      {"shared key/value heads", {{"dp", 1}, {"tp", 4}}},
      {"ddp", {{"dp", 2}, {"tp", 1}}},
      {"fsdp", {{"dp", 2}, {"tp", 1}}, DType::bf16, DType::bf16, DataForm::fsdp},
      {"fsdp and tp", {{"dp", 2}, {"tp", 2}}, DType::bf16, DType::bf16, DataForm::fsdp, sequence},
  };
  for (const Form& form : forms)
    test::run_ranks(Ranks::threads, form.mesh.size(), [&](Rank& rank) {
      SCOPED_TRACE(form.name);
      Seen seen;
      const std::vector<double> losses = losses_of(rank, form, seen);
      for (std::size_t i = 0; i < losses.size(); ++i)
        EXPECT_NEAR(losses[i], expected[i], 0.01 * expected[i]) << "step " << i;
      EXPECT_NE(losses, expected);
      for (const auto& [path, dtype] : seen.outputs)
        EXPECT_EQ(dtype, path.empty() || path.starts_with("output_head") ? DType::f32 : DType::bf16) << path;
      for (const auto& [path, dtype] : seen.gradients) EXPECT_EQ(dtype, DType::bf16) << path;
      EXPECT_GT(seen.outputs.size(), 20u);
      EXPECT_GT(seen.gradients.size(), 20u);
    });
}

TEST(Bf16Activations, NeedWeightsInBf16) {
  Context context;
  Compute compute(context, 1);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 1}}, 0);
  const auto refused = [&](const BuildOptions& options) {
    return test::error_text(ErrorCode::bad_argument,
                            [&] { build_parallel_model(small(), mesh, compute, options); });
  };
  EXPECT_EQ(refused({.activations = DType::bf16}),
            "build_parallel_model: options.activations is bf16 and options.dtype f32; expected bf16 of both");
}

}  // namespace
}  // namespace weft::bf16_model_test
