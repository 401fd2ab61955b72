// The transformer over a mesh gives the results of one rank: values, passes, losses over many steps.
#include "weft/models/build.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "support/run_ranks.hpp"
#include "weft/dp/sampler.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/replicas.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/gradients.hpp"

namespace weft::build_test {
namespace {

using test::Rank;
using test::Ranks;

// dp 4 cuts the six samples of a batch unevenly.
const MeshShape kMeshes[] = {{{"dp", 2}, {"tp", 1}}, {{"dp", 3}, {"tp", 1}}, {{"dp", 4}, {"tp", 1}},
                             {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}, {{"dp", 1}, {"tp", 4}}};

constexpr std::int64_t kBatch = 6, kSequence = 8;

TransformerConfig small(bool tied) {
  TransformerConfig c;
  c.dim = 32, c.layers = 2, c.heads = 8, c.kv_heads = 4, c.ffn_hidden = 48, c.vocab = 64, c.max_seq = 16;
  c.tied = tied;
  c.init_std = 0.1;
  return c;
}

// A text in which the next token follows from the one before: something to learn. Sample s: (sequence + 1).
std::int64_t token(std::int64_t s, std::int64_t at) { return (s * 7 + at * at % 13 + at * (s % 3)) % 64; }

struct Batch {
  Tensor tokens, labels;  // (samples, sequence)
};
Batch batch_of(Context& context, const std::vector<std::int64_t>& samples) {
  const auto rows = static_cast<std::int64_t>(samples.size());
  Batch b{Tensor(context, {rows, kSequence}, DType::i64), Tensor(context, {rows, kSequence}, DType::i64)};
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < kSequence; ++i) {
      const auto at = static_cast<std::size_t>(r * kSequence + i);
      const std::int64_t s = samples[static_cast<std::size_t>(r)];
      b.tokens.as<std::int64_t>()[at] = token(s, i);
      // Some labels do not count, so that ranks have different numbers of valid ones.
      b.labels.as<std::int64_t>()[at] = (s + i) % 5 == 0 ? CrossEntropy::kIgnore : token(s, i + 1);
    }
  return b;
}

// The results of one rank in one pass, brought together from all ranks.
struct Whole {
  double loss = 0;
  Tensor logits;
  std::map<std::string, Tensor> gradients, values;
};

// One training step's passes over a mesh; the gradients are reduced but not clipped.
struct Trainer {
  Trainer(Rank& rank, const MeshShape& shape, const TransformerConfig& config, DType dtype = DType::f32,
          const TransformerPlanOptions& tensor = {})
      : compute(rank.context),
        mesh(rank.group(), shape),
        built(build_parallel_model(
            config, mesh, compute,
            {.seed = 17, .dtype = dtype, .reducer = {.bucket_bytes = 4096}, .tensor = tensor})),
        sampler(built.data, 1000, kBatch, 5) {}

  /// Gives the loss and keeps the logits.
  double pass(std::int64_t step) {
    const Batch b = batch_of(compute.context(), sampler.local_batch(step));
    const Batch all = batch_of(compute.context(), sampler.global_batch(step));
    const Tensor tokens = built.place(b.tokens, kBatch), labels = built.place(b.labels, kBatch);
    logits = built.model->forward(tokens, frame)[0];
    const Tensor loss =
        cross_entropy.forward({logits, labels, scalar(built.mesh, count_valid(all.labels))}, frame)[0];
    built.model->backward(cross_entropy.backward({}, frame), frame);
    EXPECT_TRUE(frame.empty());
    built.reducer->finish();
    sync_replicated_gradients(built.parameters(), built.tensor);
    return full(loss).as<double>()[0];
  }

  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  Sampler sampler;
  Frame frame{compute};
  CrossEntropy cross_entropy;
  Tensor logits;
};

Whole whole_of(Rank& rank, const MeshShape& shape, const TransformerConfig& config) {
  Trainer trainer(rank, shape, config);
  Whole whole;
  for (Parameter* p : trainer.built.parameters())
    whole.values[p->path()] = full(p->master()).clone(rank.context);
  whole.loss = trainer.pass(0);
  whole.logits = full(trainer.logits).with_layout(nullptr);
  for (Parameter* p : trainer.built.parameters())
    whole.gradients[p->path()] = full(p->gradient()).clone(rank.context);
  return whole;
}

double furthest(const Tensor& got, const Tensor& expected) {
  EXPECT_EQ(got.shape(), expected.shape());
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < expected.f32().size(); ++i) {
    worst =
        std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(expected.f32()[i])));
    largest = std::max(largest, std::abs(static_cast<double>(expected.f32()[i])));
  }
  EXPECT_GT(largest, 0);
  return worst / largest;
}

class Build : public ::testing::TestWithParam<bool> {};

// The f32 sums of a pass are cut in up to four parts, which are rounded in another order; through two blocks
// this stays within some tens of units in the last place of each tensor's largest element.
constexpr double kTolerance = 64 * 0x1p-23;

TEST_P(Build, PassesAndFirstValuesAreThoseOfOneRank) {
  const TransformerConfig config = small(GetParam());
  Context context;  // of the reference
  Whole serial;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Whole w = whole_of(rank, {{"dp", 1}, {"tp", 1}}, config);
    serial.loss = w.loss, serial.logits = w.logits.clone(context);
    for (const auto& [path, t] : w.values) serial.values[path] = t.clone(context);
    for (const auto& [path, t] : w.gradients) serial.gradients[path] = t.clone(context);
  });
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      const Whole parallel = whole_of(rank, shape, config);
      EXPECT_NEAR(parallel.loss, serial.loss, 1e-6 * serial.loss);
      EXPECT_LE(furthest(parallel.logits, serial.logits), kTolerance);
      ASSERT_EQ(parallel.values.size(), serial.values.size());
      for (const auto& [path, expected] : serial.values) {
        const Tensor& got = parallel.values.at(path);
        EXPECT_TRUE(
            std::equal(got.f32().begin(), got.f32().end(), expected.f32().begin(), expected.f32().end()))
            << path << " begins with other values";
      }
      for (const auto& [path, expected] : serial.gradients)
        EXPECT_LE(furthest(parallel.gradients.at(path), expected), kTolerance) << path;
    });
}

TEST_P(Build, LossesOfTwentyStepsAreThoseOfOneRank) {
  const TransformerConfig config = small(GetParam());
  constexpr int kSteps = 20;
  std::vector<double> serial;
  const auto train = [&](Rank& rank, const MeshShape& shape) {
    Trainer trainer(rank, shape, config);
    const std::vector<Parameter*> parameters = trainer.built.parameters();
    AdamW adamw(trainer.compute, parameters, {});
    std::vector<double> losses;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      adamw.zero_gradients();
      losses.push_back(trainer.pass(step));
      clip_grad_norm(parameters, 1.0);
      adamw.step(1e-3);
    }
    return losses;
  };
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) { serial = train(rank, {{"dp", 1}, {"tp", 1}}); });
  EXPECT_LT(serial.back(), serial.front() - 0.1) << "nothing was learnt";
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      const std::vector<double> losses = train(rank, shape);
      for (std::size_t i = 0; i < kSteps; ++i)
        EXPECT_NEAR(losses[i], serial[i], 1e-5 * serial[i]) << to_string(shape) << ", step " << i;
    });
}

INSTANTIATE_TEST_SUITE_P(, Build, ::testing::Values(false, true),
                         [](const auto& instance) { return instance.param ? "Tied" : "Untied"; });

// --- between the layers cut along the sequence, and the vocabulary split ---

constexpr TransformerPlanOptions kAllSplit{.sequence_parallel = true, .vocab = VocabSplit::shard};

// Three ranks divide neither the sequence nor the vocabulary.
TransformerConfig uneven(bool tied) {
  TransformerConfig c = small(tied);
  c.dim = 24, c.heads = 6, c.kv_heads = 3, c.ffn_hidden = 36;
  return c;
}

std::vector<double> losses_of(Trainer& trainer, std::int64_t steps) {
  const std::vector<Parameter*> parameters = trainer.built.parameters();
  AdamW adamw(trainer.compute, parameters, {});
  std::vector<double> losses;
  for (std::int64_t step = 0; step < steps; ++step) {
    adamw.zero_gradients();
    losses.push_back(trainer.pass(step));
    clip_grad_norm(parameters, 1.0);
    adamw.step(1e-3);
  }
  return losses;
}

TEST_P(Build, LossesOfEverySplitAreThoseOfOneRank) {
  const TransformerConfig config = uneven(GetParam());
  constexpr std::int64_t kSteps = 8;
  std::vector<double> serial;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Trainer trainer(rank, {{"dp", 1}, {"tp", 1}}, config);
    serial = losses_of(trainer, kSteps);
  });
  for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 3}}, MeshShape{{"dp", 2}, {"tp", 3}}})
    for (const TransformerPlanOptions& split :
         {TransformerPlanOptions{.vocab = VocabSplit::shard}, kAllSplit})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        Trainer trainer(rank, shape, config, DType::f32, split);
        const std::vector<double> losses = losses_of(trainer, kSteps);
        for (std::size_t i = 0; i < kSteps; ++i)
          EXPECT_NEAR(losses[i], serial[i], 1e-5 * serial[i]) << to_string(shape) << ", step " << i;
      });
}

// One key/value head: its axis has one rank, and the vocabulary is split over that one and another.
TEST_P(Build, OneKeyValueHeadGoesWithASplitVocabulary) {
  TransformerConfig config = uneven(GetParam());
  config.kv_heads = 1;
  constexpr std::int64_t kSteps = 3;
  std::vector<double> serial;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Trainer trainer(rank, {{"dp", 1}, {"tp", 1}}, config);
    serial = losses_of(trainer, kSteps);
  });
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 3}}, MeshShape{{"dp", 2}, {"tp", 2}}})
    for (const TransformerPlanOptions& split :
         {TransformerPlanOptions{.vocab = VocabSplit::shard}, kAllSplit})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        Trainer trainer(rank, shape, config, DType::f32, split);
        const std::vector<double> losses = losses_of(trainer, kSteps);
        for (std::size_t i = 0; i < kSteps; ++i)
          EXPECT_NEAR(losses[i], serial[i], 1e-5 * serial[i]) << to_string(shape) << ", step " << i;
      });
}

// Replicas have the same bits on all ranks after 200 steps: each synced gradient is one sum, on all of them.
// By the default plan each rank computes the gradients of what is replicated on its own.
TEST_P(Build, ReplicasAreEqualAfterTwoHundredSteps) {
  TransformerConfig config = small(GetParam());
  config.dim = 16, config.layers = 1, config.heads = config.kv_heads = 2, config.ffn_hidden = 24;
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  for (const bool all_split : {true, false}) {
    config.vocab = all_split ? 65 : 64;  // two ranks do not divide the one, and must divide the other
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      Trainer trainer(rank, shape, config, DType::f32, all_split ? kAllSplit : TransformerPlanOptions{});
      const std::vector<double> losses = losses_of(trainer, 200);
      EXPECT_LT(losses.back(), losses.front() - 0.5) << "nothing was learnt";
      std::vector<NamedView> all;
      int replicated = 0;
      for (const Parameter* p : trainer.built.parameters()) {
        all.push_back({p->path(), p->master(), p->layout()});
        replicated += is_replicate(p->layout()->on("tp")) ? 1 : 0;
      }
      EXPECT_EQ(replicated, all_split ? 3 : 4) << "the norms; and the embedding";
      check_replicas(all, trainer.mesh);
      // The check would fail if a replica had drifted.
      if (rank.rank == 3) transformer_of(trainer.built).norm.weight->write_master().f32()[5] += 1e-6f;
      std::string text;
      try {
        check_replicas(all, trainer.built.tensor);
      } catch (const Error& e) {
        text = e.what();
      }
      EXPECT_EQ(text.starts_with("check_replicas: \"norm.weight\" is Replicate on tp=2"),
                trainer.built.data.rank() == 1)
          << text;
    });
  }
}

// The same of key/value heads that ranks share: their weights' gradients are one sum, too.
TEST_P(Build, SharedHeadsAreEqualAfterTwoHundredSteps) {
  TransformerConfig config = small(GetParam());
  config.dim = 16, config.layers = 1, config.heads = 4, config.kv_heads = 2, config.ffn_hidden = 24;
  std::vector<double> serial;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Trainer trainer(rank, {{"dp", 1}, {"tp", 1}}, config);
    serial = losses_of(trainer, 5);
  });
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Trainer trainer(rank, {{"dp", 1}, {"tp", 4}}, config, DType::f32, kAllSplit);
    const std::vector<double> losses = losses_of(trainer, 200);
    for (std::size_t i = 0; i < serial.size(); ++i) EXPECT_NEAR(losses[i], serial[i], 1e-5 * serial[i]);
    std::vector<NamedView> all;
    for (const Parameter* p : trainer.built.parameters())
      all.push_back({p->path(), p->master(), p->layout()});
    check_replicas(all, trainer.built.mesh);
    const DeviceMesh rep = trainer.built.mesh["tp_rep"];
    if (rank.rank == 1)
      transformer_of(trainer.built).block(0).attention.v_proj.weight->write_master().f32()[0] += 1e-6f;
    const Error e = test::error_of([&] { check_replicas(all, rep); });
    EXPECT_TRUE(std::string(e.what()).starts_with(
        rank.rank < 2 ? "check_replicas: \"layers.0.attention.v_proj.weight\"" : "no error"))
        << e.what();
  });
}

// --- how often ranks talk ---

std::map<std::string, int> calls_of(const ProcessGroup& group) {
  std::map<std::string, int> count;
  const nlohmann::json trace = nlohmann::json::parse(group.trace_json());
  for (const nlohmann::json& call : trace.at("calls")) ++count[call.at("op")];
  return count;
}

std::int64_t elements_of_last_call(const ProcessGroup& group) {
  return nlohmann::json::parse(group.trace_json()).at("calls").back().at("count").get<std::int64_t>();
}

TEST(BuildTraffic, TwoAllReducesAPassPerBlock) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Trainer trainer(rank, {{"dp", 1}, {"tp", 2}}, small(false));
    ProcessGroup& group = trainer.built.tensor.group();
    const auto blocks = static_cast<int>(transformer_of(trainer.built).config().layers);
    const Batch b = batch_of(rank.context, trainer.sampler.global_batch(0));
    const Tensor tokens = trainer.built.place(b.tokens, kBatch),
                 labels = trainer.built.place(b.labels, kBatch);
    EXPECT_EQ(calls_of(group), (std::map<std::string, int>{})) << "building a model is arithmetic";
    const Tensor logits = trainer.built.model->forward(tokens, trainer.frame)[0];
    // Forward: two per block, and the head's logits are gathered.
    EXPECT_EQ(calls_of(group), (std::map<std::string, int>{{"all_reduce", 2 * blocks}, {"all_gather", 1}}));
    trainer.cross_entropy.forward({logits, labels, scalar(rank.context, count_valid(b.labels))},
                                  trainer.frame);
    const Tensors dlogits = trainer.cross_entropy.backward({}, trainer.frame);
    trainer.built.model->backward(dlogits, trainer.frame);
    // Backward: two per block, and one for what enters the head.
    EXPECT_EQ(calls_of(group),
              (std::map<std::string, int>{{"all_reduce", 4 * blocks + 1}, {"all_gather", 1}}));
  });
}

// The same number of bytes in two halves: an all-reduce is a reduce-scatter and an all-gather.
TEST(BuildTraffic, SequenceParallelGathersAndScattersAndLogitsStayWhereTheyAre) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Trainer trainer(rank, {{"dp", 1}, {"tp", 2}}, small(false), DType::f32, kAllSplit);
    ProcessGroup& group = trainer.built.tensor.group();
    const auto blocks = static_cast<int>(transformer_of(trainer.built).config().layers);
    const Batch b = batch_of(rank.context, trainer.sampler.global_batch(0));
    const Tensor tokens = trainer.built.place(b.tokens, kBatch),
                 labels = trainer.built.place(b.labels, kBatch);
    const Tensor logits = trainer.built.model->forward(tokens, trainer.frame)[0];
    // Two of each per block; the embedding is scattered, and the head gathers.
    EXPECT_EQ(calls_of(group), (std::map<std::string, int>{{"reduce_scatter", 2 * blocks + 1},
                                                           {"all_gather", 2 * blocks + 1}}));
    trainer.cross_entropy.forward({logits, labels, scalar(rank.context, count_valid(b.labels))},
                                  trainer.frame);
    const Tensors dlogits = trainer.cross_entropy.backward({}, trainer.frame);
    // The loss: four numbers for each token, whatever the vocabulary.
    EXPECT_EQ(calls_of(group), (std::map<std::string, int>{{"reduce_scatter", 2 * blocks + 1},
                                                           {"all_gather", 2 * blocks + 2}}));
    EXPECT_EQ(elements_of_last_call(group), 2 * 4 * kBatch * kSequence);
    trainer.built.model->backward(dlogits, trainer.frame);
    EXPECT_EQ(calls_of(group), (std::map<std::string, int>{{"reduce_scatter", 4 * blocks + 2},
                                                           {"all_gather", 4 * blocks + 3}}));
  });
}

TEST(BuildTraffic, GradientsAreReducedWhileBackwardGoesOn) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Trainer trainer(rank, {{"dp", 2}, {"tp", 1}}, small(false));
    trainer.pass(0);
    EXPECT_GT(trainer.built.reducer->bucket_bytes().size(), 2u);
    EXPECT_EQ(trainer.built.reducer->posted_early(), 0);
    for (Parameter* p : trainer.built.parameters()) p->zero_gradient();
    trainer.pass(1);
    EXPECT_EQ(trainer.built.reducer->posted_early(),
              static_cast<std::int64_t>(trainer.built.reducer->bucket_bytes().size()));
  });
}

// --- what does not fit ---

TEST(BuildErrors, ArithmeticIsInTheText) {
  Context context;
  Compute compute(context);
  const auto text = [&](const MeshShape& shape, const TransformerConfig& config) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(context, shape, 0);
    return std::string(test::error_of([&] { build_parallel_model(config, mesh, compute); }).what());
  };
  TransformerConfig config = small(false);
  EXPECT_EQ(text({{"dp", 1}, {"tp", 3}}, config),
            "parallelize: \"layers.0.attention\" has 8 heads; they do not divide into tp=3 (8 = 3 x 2 + 2)");
  config.heads = 6, config.dim = 24, config.kv_heads = 2;
  EXPECT_EQ(
      text({{"dp", 1}, {"tp", 3}}, config),
      "build_parallel_model: tp=3 does not divide into 2 kv heads (3 = 2 x 1 + 1); expected as many ranks "
      "for each of them");
  config = small(false);
  config.kv_heads = 2;
  const DeviceMesh two =
      DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 8}}, 0).unflatten("tp", {{"a", 4}, {"b", 2}});
  EXPECT_STREQ(
      test::error_of([&] { build_parallel_model(config, two, compute); }).what(),
      "build_parallel_model: 2 kv heads over a=4 x b=2; expected the first axes to have as many ranks: "
      "unflatten() it so");
  config = small(false);
  config.vocab = 65;
  EXPECT_EQ(text({{"dp", 1}, {"tp", 2}}, config),
            "parallelize: \"output_head.proj\" has 65 output features; they do not divide into tp=2 (65 = 2 "
            "x 32 + 1)");
  config.tied = true;  // then the head is whole
  build_parallel_model(config, DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 2}}, 0), compute);
  config.tied = false;  // nor does a vocabulary that is split have to divide
  build_parallel_model(config, DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 2}}, 0), compute,
                       {.tensor = kAllSplit});
  EXPECT_EQ(text({{"dp", 1}, {"pp", 2}}, config), "mesh: no axis \"tp\" in dp=1 x pp=2");
}

// Fewer key/value heads than ranks: which ranks have which, for each way to divide the axis.
TEST(BuildOptions, RanksShareKeyAndValueHeads) {
  Context context;
  Compute compute(context);
  for (const std::int64_t heads : {1, 2, 4}) {
    TransformerConfig config = small(false);
    config.kv_heads = heads;
    for (int rank = 0; rank < 4; ++rank) {
      const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 4}}, rank);
      const ParallelModel built = build_parallel_model(config, mesh, compute);
      EXPECT_EQ(built.tensor.size(), 4);
      const Attention& attention = transformer_of(built).block(0).attention;
      for (const Linear* l : {&attention.k_proj, &attention.v_proj}) {
        const Box part = l->weight->layout()->parts(rank).at(0);
        EXPECT_EQ(part.shape[0], attention.config().head_dim) << "one head";
        EXPECT_EQ(part.offset[0], rank * heads / 4 * attention.config().head_dim);
      }
      EXPECT_EQ(attention.q_proj.weight->local_shape()[0] * 4, attention.q_proj.weight->global_shape()[0]);
      EXPECT_EQ(to_string(built.mesh.shape()),
                heads == 4 ? "dp=1 x tp=4" : fmt::format("dp=1 x tp_kv={} x tp_rep={}", heads, 4 / heads));
      if (heads == 4) continue;
      const DeviceMesh divided = mesh.unflatten("tp", {{"a", static_cast<int>(heads)}, {"b", -1}});
      const ParallelModel same = build_parallel_model(config, divided, compute);
      EXPECT_EQ(same.mesh, divided);
      EXPECT_EQ(transformer_of(same).block(1).attention.k_proj.weight->layout()->parts(rank),
                transformer_of(built).block(1).attention.k_proj.weight->layout()->parts(rank));
    }
  }
}

TEST(BuildErrors, PlaceChecksTheRows) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 1}}, 1);
  const ParallelModel built = build_parallel_model(small(false), mesh, compute);
  const Tensor rows(context, {3, 4}, DType::i64);
  EXPECT_EQ(built.place(rows, 6).layout(), make_layout(mesh, {{"dp", Shard{0}}}, {6, 4}));
  EXPECT_EQ(test::error_of([&] { built.place(rows, 7 + 1); }).code(), ErrorCode::layout);
}

TEST(BuildOptions, FrozenParametersTakeNoGradient) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 1}}, 1);
  BuildOptions options;
  options.frozen = {"layers.0"};
  const ParallelModel built = build_parallel_model(small(false), mesh, compute, options);
  int frozen = 0;
  for (const Parameter* p : built.parameters()) {
    EXPECT_EQ(p->trainable(), !p->path().starts_with("layers.0.")) << p->path();
    frozen += p->trainable() ? 0 : 1;
  }
  EXPECT_GT(frozen, 0);
  options.frozen = {"layers.7"};
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] { build_parallel_model(small(false), mesh, compute, options); }),
            "build_parallel_model: frozen: nothing matches \"layers.7\"");
  options.frozen = {};
  options.data_axis = options.tensor_axis = "tp";
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] { build_parallel_model(small(false), mesh, compute, options); }),
            "build_parallel_model: data_axis \"tp\" and tensor_axis \"tp\" share an axis of " +
                to_string(mesh.shape()) + "; expected two apart");
}

TEST(BuildOptions, OptionsThatNothingReadsAreNamed) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 1}});
    Compute compute(rank.context, 1);
    const auto refused = [&](const std::string& text, auto&& set) {
      BuildOptions options;
      set(options);
      EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                                 [&] { build_parallel_model(small(false), mesh, compute, options); }),
                "build_parallel_model: options." + text);
    };
    const std::string no_recipe = "; it needs options.float8, which names no recipe",
                      no_fsdp = "; it needs options.data fsdp, and that is ddp",
                      no_ddp = "; it needs options.data ddp, and that is fsdp",
                      no_pipeline = "; it needs options.pipeline_axis, which is empty",
                      no_ac = "; it needs options.ac.mode full or selective, and that is none";
    refused("float8_options.scales is whole" + no_recipe,
            [](auto& o) { o.float8_options.scales = Float8Scales::whole; });
    refused("float8_options.not_finite is propagate" + no_recipe,
            [](auto& o) { o.float8_options.not_finite = Float8NotFinite::propagate; });
    refused("float8_options.filter.only is set" + no_recipe,
            [](auto& o) { o.float8_options.filter.only = {"layers.*"}; });
    refused("float8_options.filter.least_elements is 7" + no_recipe,
            [](auto& o) { o.float8_options.filter.least_elements = 7; });
    refused("sharding.precision.reduce is bf16" + no_fsdp,
            [](auto& o) { o.sharding.precision.reduce = DType::bf16; });
    refused("sharding.precision.param is bf16" + no_fsdp,
            [](auto& o) { o.sharding.precision.param = DType::bf16; });
    refused("sharding.blocks is set" + no_fsdp, [](auto& o) { o.sharding.blocks = {"layers.*"}; });
    refused("sharding.reshard_after_forward is false" + no_fsdp,
            [](auto& o) { o.sharding.reshard_after_forward = false; });
    refused("sharding.reshard_after_forward is 2" + no_fsdp,
            [](auto& o) { o.sharding.reshard_after_forward = 2; });
    refused("sharding.unused is zeros" + no_fsdp, [](auto& o) { o.sharding.unused = Unused::zeros; });
    refused("reducer.bucket_bytes is 64" + no_ddp,
            [](auto& o) { o.data = DataForm::fsdp, o.reducer.bucket_bytes = 64; });
    refused("reducer.unused is zeros" + no_ddp,
            [](auto& o) { o.data = DataForm::fsdp, o.reducer.unused = Unused::zeros; });
    refused("pipeline.kind is gpipe" + no_pipeline, [](auto& o) { o.pipeline.kind = PipelineKind::gpipe; });
    refused("pipeline.stages_per_rank is 2" + no_pipeline, [](auto& o) { o.pipeline.stages_per_rank = 2; });
    refused("pipeline.weights is set" + no_pipeline, [](auto& o) { o.pipeline.weights = {1}; });
    refused("pipeline.keep_weights is false" + no_pipeline, [](auto& o) { o.pipeline.keep_weights = false; });
    refused("domain.dims is set; it needs options.domain_axes, which is empty", [](auto& o) {
      o.domain.dims = {3, 2};
    });
    refused("domain.data is set; expected none, since options.data_axis names the axes of samples",
            [&](auto& o) { o.domain.data = mesh["dp"]; });
    refused("ac.modules is set" + no_ac, [](auto& o) { o.ac.modules = {"layers.*"}; });
    refused("ac.compare_outputs is true" + no_ac, [](auto& o) { o.ac.compare_outputs = true; });
  });
}

// The same weights, rounded: two ranks that share a model in bf16 stay near one rank in f32.
TEST(BuildOptions, Bf16WeightsStayNearF32) {
  const TransformerConfig config = small(false);
  double expected = 0;
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Trainer one(rank, {{"dp", 1}, {"tp", 1}}, config);
    expected = one.pass(0);
  });
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Trainer two(rank, {{"dp", 1}, {"tp", 2}}, config, DType::bf16);
    EXPECT_EQ(two.built.parameters()[0]->weight().dtype(), DType::bf16);
    const double loss = two.pass(0);
    EXPECT_NEAR(loss, expected, 0.02 * expected);
    EXPECT_NE(loss, expected);
  });
}

}  // namespace
}  // namespace weft::build_test
