// Transformers with float8 layers, as build_parallel_model makes them and Trainer trains them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

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

// This rank's rows of a batch.
struct TheBatch {
  explicit TheBatch(const DeviceMesh& mesh) {
    const std::int64_t count = kRows / mesh["dp"].size() * kSequence;
    for (std::int64_t i = 0; i < count; ++i) {
      tokens.push_back((i * 7 + mesh.coordinate("dp")) % kVocab);
      labels.push_back(i * 5 % kVocab);
    }
    rows = {tokens.data(), labels.data(), count / kSequence, kSequence, kRows};
  }
  std::vector<std::int64_t> tokens, labels;
  TokenBatch rows;
};

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

// The mean of the last five losses: a single loss depends on the rounding of all steps before.
double last(const std::vector<double>& all) {
  double sum = 0;
  for (std::size_t i = all.size() - 5; i < all.size(); ++i) sum += all[i] / 5;
  return sum;
}

// The mean loss of the last steps is near that without float8, however ranks hold parameters and activations.
TEST(Float8Transformer, LearnsOnEveryMesh) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
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

TEST(Float8Transformer, LearnsWithActivationsInBf16) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    for (const DataForm form : {DataForm::ddp, DataForm::fsdp}) {
      const MeshShape shape{{"dp", 2}, {"tp", 2}};
      const BuildOptions half{.data = form, .seed = 5, .dtype = DType::bf16, .activations = DType::bf16};
      const double plain = last(losses(rank, shape, half));
      for (const Float8Recipe recipe : kRecipes) {
        BuildOptions options = half;
        options.float8 = recipe;
        const double with = last(losses(rank, shape, options));
        EXPECT_NEAR(with, plain, 0.2 * plain) << name(recipe);
      }
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

// A transformer whose gradients overflow at a large loss scale: the trainer halves it until they are finite.
TEST(Float8Transformer, LossScalingSkipsSteps) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const std::optional<Float8Recipe> recipe :
         {std::optional<Float8Recipe>(), std::optional(Float8Recipe::rowwise)})
      for (const DataForm form : {DataForm::ddp, DataForm::fsdp}) {
        Compute compute(rank.context);
        const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
        ParallelModel model =
            build_parallel_model(small(), mesh, compute, {.data = form, .seed = 5, .float8 = recipe});
        for (Parameter* p : model.parameters())
          if (p->global_shape().rank() == 2)
            for (float& w : p->write_master().f32()) w *= 30;
        Trainer trainer(model, compute,
                        {.seed = 3, .loss_scale = LossScaler::Options{.scale = 0x1p127, .backoff = 0x1p-64}});
        const TheBatch batch(mesh);
        EXPECT_TRUE(trainer.step({&batch.rows, 1}, 0.01).skipped);
        EXPECT_FALSE(trainer.step({&batch.rows, 1}, 0.01).skipped);
        if (recipe) {
          EXPECT_EQ(model.float8->linears()->options().not_finite, Float8NotFinite::error);
        }
      }
  });
}

// The same without loss scaling: NonFinite::skip skips the step, and by default the text names the tensor.
TEST(Float8Transformer, NonFiniteSkipSkipsSteps) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const NonFinite reaction : {NonFinite::skip, NonFinite::error}) {
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
      ParallelModel model =
          build_parallel_model(small(), mesh, compute, {.seed = 5, .float8 = Float8Recipe::rowwise});
      Trainer trainer(model, compute, {.non_finite = reaction});
      const HookHandle spoil =
          model.model->add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors& dy, Frame&) {
            if (rank.rank == 1) dy[0].f32()[0] = std::numeric_limits<float>::quiet_NaN();
          });
      const TheBatch batch(mesh);
      const auto step = [&] { return trainer.step({&batch.rows, 1}, 0.01).skipped; };
      if (reaction == NonFinite::skip)
        EXPECT_TRUE(step());
      else
        EXPECT_EQ(test::error_text(step),
                  "bad_argument: float8: \"layers.1.mlp.down_proj\": dy has an element that is not finite");
    }
  });
}

// The trainer names the option that differs, before the first pass.
TEST(Float8Transformer, RanksMustHaveTheSameOptions) {
  using Change = std::function<void(BuildOptions&)>;
  const std::pair<const char*, Change> cases[] = {
      {"BuildOptions::float8", [](BuildOptions& o) { o.float8.reset(); }},
      {"BuildOptions::float8", [](BuildOptions& o) { o.float8 = Float8Recipe::tensorwise; }},
      {"BuildOptions::float8_options.filter",
       [](BuildOptions& o) { o.float8_options.filter.except = {"layers.0"}; }},
      {"BuildOptions::float8_options.scales",
       [](BuildOptions& o) { o.float8_options.scales = Float8Scales::whole; }},
      {"BuildOptions::float8_options.not_finite",
       [](BuildOptions& o) { o.float8_options.not_finite = Float8NotFinite::propagate; }},
  };
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    for (const auto& [what, change] : cases) {
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
      BuildOptions options{.seed = 5, .float8 = Float8Recipe::rowwise};
      if (rank.rank == 1) change(options);
      ParallelModel model = build_parallel_model(small(), mesh, compute, options);
      Trainer trainer(model, compute, {});
      const TheBatch batch(mesh);
      EXPECT_EQ(test::error_text([&] {
                  trainer.step({&batch.rows, 1}, 0.01);
                }),
                fmt::format("bad_argument: trainer: {} is not the same on all ranks of dp=2 x tp=1; expected "
                            "the same",
                            what));
    }
  });
}

// Assignment destroys what was put around the old model before it destroys that model.
TEST(Float8Transformer, AssignmentOfAModelDestroysTheOldOneInOrder) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 1}});
    struct Probe : Transformer {
      Probe(const std::shared_ptr<Float8Linears>*& of, std::size_t& at_end)
          : Transformer(small()), linears(of), layers(at_end) {}
      ~Probe() override { layers = (*linears)->layers().size(); }
      const std::shared_ptr<Float8Linears>*& linears;
      std::size_t& layers;
    };
    const std::shared_ptr<Float8Linears>* linears = nullptr;
    std::size_t layers = 99;
    ParallelModel model;
    model.model = std::make_unique<Probe>(linears, layers);
    model.float8 = apply_float8(*model.model, Float8Recipe::rowwise);
    const std::shared_ptr<Float8Linears> kept = model.float8->linears();
    linears = &kept;
    EXPECT_EQ(kept->layers().size(), 14U);
    model = build_parallel_model(small(), mesh, compute, {.float8 = Float8Recipe::rowwise});
    EXPECT_EQ(layers, 0U);  // the Float8Model had gone before
    EXPECT_EQ(model.float8->report().converted(), 14);
  });
}

}  // namespace
}  // namespace weft::float8_transformer_test
