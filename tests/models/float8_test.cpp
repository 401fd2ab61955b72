// Transformers with float8 layers, as build_parallel_model makes them and Trainer trains them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/run_ranks.hpp"
#include "weft/models/trainer.hpp"

namespace weft::float8_transformer_test {
namespace {

using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;

constexpr std::int64_t kRows = 8, kSequence = 16, kVocab = 32;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 32, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 48, c.vocab = kVocab;
  c.max_seq = kSequence, c.init_std = 0.1;
  return c;
}

// Losses of some steps on batches of which one continues the other.
std::vector<double> losses(Rank& rank, const MeshShape& shape, const BuildOptions& options, int steps = 30) {
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  ParallelModel model = build_parallel_model(small(), mesh, compute, options);
  Trainer trainer(model, compute, {.optimizer = AdamW::Options{}, .seed = 3});
  const std::int64_t rows = kRows / shape.size("dp"), first = rows * mesh.coordinate("dp");
  std::vector<double> all;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::int64_t> tokens, labels;
    const auto token = [&](std::int64_t r, std::int64_t i) {
      return (step % 3 * 5 + r * 7 + i * i) % kVocab;
    };
    for (std::int64_t r = first; r < first + rows; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back(token(r, i));
        labels.push_back(token(r, i + 1));
      }
    const TokenBatch batch{tokens.data(), labels.data(), rows, kSequence, kRows};
    all.push_back(trainer.step({&batch, 1}, 0.01).loss);
  }
  return all;
}

constexpr Float8Recipe kRecipes[] = {Float8Recipe::tensorwise, Float8Recipe::rowwise,
                                     Float8Recipe::rowwise_gw_hp};

TEST(Float8Transformer, ConvertsAllButTheHead) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    const ParallelModel model =
        build_parallel_model(small(), mesh, compute, {.float8 = Float8Recipe::tensorwise});
    EXPECT_EQ(model.float8->report().text(),
              "float8 tensorwise: 14 of 15 linear layers\n"
              "  \"output_head.proj\" (32, 32) stays: \"output_head\" is left out unless `only` names the "
              "layer");
    EXPECT_EQ(build_parallel_model(small(), mesh, compute).float8, nullptr);
  });
}

// The mean loss of the last steps is near that without float8, however ranks hold parameters and activations.
TEST(Float8Transformer, LearnsOnEveryMesh) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const auto last = [](const std::vector<double>& all) {
      double sum = 0;
      for (std::size_t i = all.size() - 5; i < all.size(); ++i) sum += all[i] / 5;
      return sum;
    };
    const MeshShape shape{{"dp", 2}, {"tp", 2}};
    const std::vector<double> plain = losses(rank, shape, {.seed = 5});
    EXPECT_LT(last(plain), 0.5 * plain[0]);
    for (const Float8Recipe recipe : kRecipes)
      for (const DataForm form : {DataForm::ddp, DataForm::fsdp})
        for (const bool sequence : {false, true}) {
          BuildOptions options{.data = form, .seed = 5, .float8 = recipe};
          options.tensor.sequence_parallel = sequence;
          EXPECT_NEAR(last(losses(rank, shape, options)), last(plain), 0.1 * last(plain))
              << name(recipe) << (form == DataForm::fsdp ? " fsdp" : " ddp") << sequence;
        }
  });
}

// With scales of the whole, meshes differ by the order of sums alone.
TEST(Float8Transformer, ScalesOfTheWholeGiveTheLossesOfOneRank) {
  for (const Float8Recipe recipe : kRecipes) {
    std::vector<double> one;
    for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 1}}, MeshShape{{"dp", 2}, {"tp", 1}},
                                   MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 2}}})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        const BuildOptions options{
            .seed = 5, .float8 = recipe, .float8_options = {.scales = Float8Scales::whole}};
        const std::vector<double> got = losses(rank, shape, options, 3);
        if (shape.size() == 1) one = got;
        for (std::size_t i = 0; i < one.size(); ++i)
          EXPECT_NEAR(got[i], one[i], 1e-3 * one[i]) << name(recipe) << " " << to_string(shape);
      });
  }
}

}  // namespace
}  // namespace weft::float8_transformer_test
