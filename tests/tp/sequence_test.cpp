// Sequence parallel and vocabulary parallel modules give what the same modules give on one rank; where a
// reduction is forgotten they give an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"
#include "weft/tp/parallelize.hpp"

namespace weft::sequence_test {
namespace {

using test::error_of;
using test::expect_near;
using test::random_tensor;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kBatch = 4, kDim = 8;
// Four ranks divide 8 tokens. With 5 tokens, the first rank has two. With 3 tokens, the last rank has none.
constexpr std::int64_t kSequences[] = {8, 5, 3};
const MeshShape kMeshes[] = {
    {{"dp", 1}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}, {{"dp", 1}, {"tp", 4}}};

// norm → up → GELU → down → dropout → norm, all that a block has: x and y are cut along the sequence.
std::unique_ptr<Sequential> block() {
  auto all = std::make_unique<Sequential>();
  all->append("norm", std::make_unique<LayerNorm>(kDim));
  all->append("up", std::make_unique<Linear>(kDim, 24, true, Normal{0.5}));
  all->append("gelu", std::make_unique<GELU>());
  all->append("down", std::make_unique<Linear>(24, kDim, true, Normal{0.5}));
  all->append("dropout", std::make_unique<Dropout>(0.25));
  all->append("last_norm", std::make_unique<RMSNorm>(kDim));
  for (const char* path : {"norm.bias", "up.bias", "down.bias"}) all->parameter(path)->set_init(Normal{1});
  return all;
}
const Plan kBlockPlan{{"norm", Style::sequence},
                      {"up", Style::column.on_sequence()},
                      {"down", Style::row.on_sequence()},
                      {"dropout", Style::sequence},
                      {"last_norm", Style::sequence}};

std::unique_ptr<Sequential> attention() {
  auto all = std::make_unique<Sequential>();
  all->append("norm", std::make_unique<RMSNorm>(kDim));
  all->append("attention",
              std::make_unique<Attention>(AttentionConfig{kDim, 4, 4, 2, Normal{0.5}, Normal{0.5}},
                                          RopeTables::make(8, 2, 100.0)));
  return all;
}
const Plan kAttentionPlan{{"norm", Style::sequence},
                          {"attention", Style::enter.on_sequence()},
                          {"attention.q_proj", Style::column.on_sequence()},
                          {"attention.k_proj", Style::column.on_sequence()},
                          {"attention.v_proj", Style::column.on_sequence()},
                          {"attention.o_proj", Style::row.on_sequence()}};

void expect_as_serial(const std::function<std::unique_ptr<Sequential>()>& make, const Plan& plan,
                      const std::vector<std::string>& partial) {
  for (const MeshShape& shape : kMeshes)
    for (const std::int64_t length : kSequences)
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        SCOPED_TRACE(to_string(shape) + ", sequence " + std::to_string(length));
        Compute compute(rank.context);
        const Shape global{kBatch, length, kDim};
        const Tensor x = random_tensor(rank.context, global, "x"),
                     dy = random_tensor(rank.context, global, "dy");
        const Pass pass{.seed = 9, .step = 3, .micro_batch = 1};

        const auto serial = make();
        materialise(*serial, compute);
        initialise(*serial, 3);
        Frame serial_frame(compute, pass);
        const Tensor y = serial->forward(x, serial_frame)[0];
        const Tensor dx = serial->backward(dy, serial_frame)[0];

        const DeviceMesh mesh(rank.group(), shape);
        const auto parallel = make();
        parallelize(*parallel, mesh["tp"], plan);
        replicate(*parallel, mesh);
        materialise(*parallel, compute);
        initialise(*parallel, 3);
        Frame frame(compute, pass);
        const LayoutRef cut = make_layout(mesh, {{"dp", Shard{0}}, {"tp", Shard{1}}}, global);
        const Tensor parallel_y = parallel->forward(distribute(x, cut), frame)[0];
        EXPECT_EQ(parallel_y.layout(), cut);
        expect_near(full(parallel_y), y, "y");
        const Tensor parallel_dx = parallel->backward(distribute(dy, cut), frame)[0];
        EXPECT_EQ(parallel_dx.layout(), cut);
        expect_near(full(parallel_dx), dx, "dx");
        for (const std::string& path : partial) {
          if (shape.size("tp") == 1) continue;
          EXPECT_EQ(parallel->parameter(path)->gradient_layout()->on("tp"), Placement(Partial{})) << path;
        }
        for (Parameter* p : serial->parameters()) {
          const Tensor& dw = parallel->parameter(p->path())->gradient();
          expect_near(full(dw), p->gradient(), "gradient of " + p->path());
        }
      });
}

// On every mesh the same elements are dropped, because the random numbers depend on the index in the global
// tensor.
TEST(SequenceParallel, NormsDropoutAndARowBiasAreThoseOfOneRank) {
  expect_as_serial(block, kBlockPlan, {"norm.weight", "norm.bias", "down.bias", "last_norm.weight"});
}

TEST(SequenceParallel, AttentionSeesTheWholeSequence) {
  expect_as_serial(attention, kAttentionPlan, {"norm.weight"});
}

// --- embedding, and the loss

Tensor numbers(Context& context, const Shape& shape, std::int64_t below, std::int64_t step) {
  Tensor t(context, shape, DType::i64);
  for (std::int64_t i = 0; i < t.count(); ++i)
    t.as<std::int64_t>()[static_cast<std::size_t>(i)] = (i * step + 3) % below;
  return t;
}

// One rank keeps 5 tokens of 3, 2 of which it shows; the length of the whole stays 5 (of 3: 2 + 1).
TEST(SequenceParallel, EmbeddingKeepsItsGlobalLength) {
  for (const bool vocabulary : {false, true})
    for (const int ranks : {1, 2, 4})
      for (const std::int64_t length : kSequences)
        test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
          Compute compute(rank.context);
          const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", rank.size}});
          Embedding embedding(61, kDim, Normal{1});
          parallelize(embedding, mesh["tp"],
                      {{"", vocabulary ? Style::row.on_sequence() : Style::cut_sequence}});
          replicate(embedding, mesh);
          materialise(embedding, compute);
          initialise(embedding, 3);
          Frame frame(compute);
          const Shape of_tokens{2, length}, of_y{2, length, kDim};
          const Tensor tokens = numbers(rank.context, of_tokens, 61, 17);
          const Tensor y =
              embedding.forward(tokens.with_layout(replicated_layout(mesh, of_tokens)), frame)[0];
          EXPECT_EQ(y.layout()->global, of_y);
          if (ranks > 1) {
            EXPECT_EQ(y.layout()->on("tp"), Placement(Shard{1}));
            EXPECT_EQ(y.size(1), chunk_of(length, ranks, rank.rank).size);
          }
          const Tensor table = full(embedding.weight->master()), all = full(y);
          for (std::int64_t i = 0; i < tokens.count() * kDim; ++i)
            ASSERT_EQ(all.f32()[static_cast<std::size_t>(i)],
                      table.f32()[static_cast<std::size_t>(
                          tokens.as<std::int64_t>()[static_cast<std::size_t>(i / kDim)] * kDim + i % kDim)]);
          // The gradient of the table covers the whole sequence, on every rank.
          const Tensor dy = random_tensor(rank.context, of_y, "dy");
          embedding.backward(distribute(dy, y.layout()), frame);
          EXPECT_EQ(embedding.weight->gradient_layout()->on("tp"), embedding.weight->layout()->on("tp"));
          std::vector<float> expected(static_cast<std::size_t>(61 * kDim));
          for (std::int64_t i = 0; i < tokens.count() * kDim; ++i)
            expected[static_cast<std::size_t>(
                tokens.as<std::int64_t>()[static_cast<std::size_t>(i / kDim)] * kDim + i % kDim)] +=
                dy.f32()[static_cast<std::size_t>(i)];
          const Tensor dw = full(embedding.weight->gradient());
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), dw.f32().begin(), dw.f32().end()));
        });
}

// embedding → norm → head → loss over the vocabulary, tied or not, with smoothing and labels that do not
// count.
struct Speaker : Module {
  explicit Speaker(std::int64_t vocab, bool tied)
      : embedding(vocab, kDim, Normal{1}), norm(kDim), head(kDim, vocab, false, Normal{1}) {
    add("embedding", embedding);
    add("norm", norm);
    add("head", head);
    if (tied) head.tie_weight(embedding.weight);
  }
  Embedding embedding;
  RMSNorm norm;
  Linear head;

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    return head.forward(norm.forward(embedding.forward(x, f), f), f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return embedding.backward(norm.backward(head.backward(dy, f), f), f);
  }
};

Plan speaker_plan(bool sequence) {
  if (!sequence) return {{"embedding", Style::row}, {"head", Style::vocabulary}};
  return {{"embedding", Style::row.on_sequence()},
          {"norm", Style::sequence},
          {"head", Style::vocabulary.on_sequence()}};
}

void expect_speaker(Rank& rank, const MeshShape& shape, std::int64_t vocab, double smoothing, bool tied,
                    bool sequence) {
  Compute compute(rank.context);
  const Shape of_tokens{4, 5};
  const Tensor tokens = numbers(rank.context, of_tokens, vocab, 7),
               labels = numbers(rank.context, of_tokens, vocab, 11);
  labels.as<std::int64_t>()[3] = labels.as<std::int64_t>()[11] = CrossEntropy::kIgnore;

  Speaker serial(vocab, tied), parallel(vocab, tied);
  materialise(serial, compute);
  initialise(serial, 3);
  CrossEntropy loss(smoothing);
  Frame frame(compute);
  const Tensor dloss(rank.context, {1}, DType::f64);
  dloss.as<double>()[0] = 0.5;
  const Tensor expected = loss.forward(
      {serial.forward(tokens, frame)[0], labels, scalar(rank.context, count_valid(labels))}, frame)[0];
  serial.backward(loss.backward({dloss}, frame), frame);

  const DeviceMesh mesh(rank.group(), shape);
  parallelize(parallel, mesh["tp"], speaker_plan(sequence));
  replicate(parallel, mesh);
  materialise(parallel, compute);
  initialise(parallel, 3);
  const auto part = [&](const Tensor& t) {
    return distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape()));
  };
  const Tensor logits = parallel.forward(part(tokens), frame)[0];
  if (shape.size("tp") > 1) {
    EXPECT_EQ(logits.layout()->on("tp"), Placement(Shard{2}));
    EXPECT_EQ(logits.size(2), chunk_of(vocab, shape.size("tp"), mesh["tp"].rank()).size);
  }
  const Tensor here = part(labels);
  const Tensor got = loss.forward({logits, here, global_valid(rank.context, here)}, frame)[0];
  EXPECT_EQ(got.layout()->on("tp"), Placement(Replicate{}));
  EXPECT_NEAR(full(got).as<double>()[0], expected.as<double>()[0], 2e-6 * expected.as<double>()[0]);
  parallel.backward(loss.backward({dloss}, frame), frame);
  for (Parameter* p : serial.parameters())
    expect_near(full(parallel.parameter(p->path())->gradient()), p->gradient(), "gradient of " + p->path());
}

TEST(VocabularyParallel, LossAndGradientsWithSmoothingAreThoseOfOneRank) {
  for (const MeshShape& shape : kMeshes)
    for (const std::int64_t vocab : {16, 13, 3})
      for (const double smoothing : {0.0, 0.1})
        test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
          for (const bool tied : {false, true})
            for (const bool sequence : {false, true}) {
              SCOPED_TRACE(to_string(shape) + ", vocabulary " + std::to_string(vocab) +
                           (smoothing > 0 ? ", smoothed" : "") + (tied ? ", tied" : "") +
                           (sequence ? ", sequence parallel" : ""));
              expect_speaker(rank, shape, vocab, smoothing, tied, sequence);
            }
        });
}

// Axes of several sub-meshes share the vocabulary like one axis with the same number of ranks.
TEST(VocabularyParallel, AListOfAxesIsAsOneAxis) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh one(rank.group(), {{"tp", 4}});
    const Tensor tokens = numbers(rank.context, {2, 3}, 13, 7);
    double losses[2];
    Tensor gradients[2];
    for (const bool apart : {false, true}) {
      const DeviceMesh mesh = apart ? one.unflatten("tp", {{"kv", 2}, {"rep", 2}}) : one;
      Speaker speaker(13, true);
      parallelize(speaker, mesh["tp"], speaker_plan(true));
      replicate(speaker, mesh);
      materialise(speaker, compute);
      initialise(speaker, 3);
      CrossEntropy loss(0.1);
      Frame frame(compute);
      const Tensor stated = tokens.with_layout(replicated_layout(mesh, tokens.shape()));
      const Tensor got = loss.forward({speaker.forward(stated, frame)[0], stated, scalar(mesh, 6)}, frame)[0];
      losses[apart ? 1 : 0] = full(got).as<double>()[0];
      speaker.backward(loss.backward({}, frame), frame);
      gradients[apart ? 1 : 0] = full(speaker.embedding.weight->gradient()).clone(rank.context);
    }
    EXPECT_EQ(losses[0], losses[1]);  // the same parts of the vocabulary, in the same order
    expect_near(gradients[1], gradients[0], "gradient");
  });
}

// --- a forgotten reduction is a layout error, not a number

class Forgotten : public ::testing::Test {
 protected:
  // Expects that a pass of the module under `plan` throws this text on each of two ranks.
  static void expect_text(const std::function<std::unique_ptr<Module>()>& make, const Plan& plan,
                          const Placement& of_x, const std::string& expected) {
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", 2}});
      Compute compute(rank.context);
      const auto module = make();
      parallelize(*module, mesh, plan);
      replicate(*module, mesh);
      materialise(*module, compute);
      initialise(*module, 3);
      Frame frame(compute);
      const Shape global{2, 4, kDim};
      const Tensor x = random_tensor(rank.context, global, "x");
      const Error e = error_of([&] {
        const Tensor y = module->forward(distribute(x, make_layout(mesh, {of_x}, global)), frame)[0];
        module->backward(y, frame);
      });
      EXPECT_EQ(e.code(), ErrorCode::layout);
      EXPECT_EQ(std::string(e.what()), expected);
    });
  }
  // up → down → norm, and x + of it
  struct Residual : Module {
    Residual() : up(kDim, 16), down(16, kDim), norm(kDim) {
      add("up", up);
      add("down", down);
      add("norm", norm);
    }
    Linear up, down;
    RMSNorm norm;

   private:
    Tensors do_forward(Inputs x, Frame& f) override {
      const Tensors y = down.forward(up.forward(norm.forward(x, f), f), f);
      return {add_tensors(x[0], y[0], f.compute(), TensorName(path(), "x + y"))};
    }
    Tensors do_backward(Inputs dy, Frame& f) override {
      const Tensors dx = norm.backward(up.backward(down.backward(dy, f), f), f);
      return {add_tensors(dy[0], dx[0], f.compute(), TensorName(path(), "dx"))};
    }
  };
  static std::unique_ptr<Module> residual() { return std::make_unique<Residual>(); }
};

TEST_F(Forgotten, ReductionBehindARowLayer) {
  Style row = Style::row;
  row.after.reset();
  expect_text(
      [] {
        auto all = std::make_unique<Sequential>();
        all->append("up", std::make_unique<Linear>(kDim, 16));
        all->append("down", std::make_unique<Linear>(16, kDim));
        all->append("norm", std::make_unique<RMSNorm>(kDim));
        return all;
      },
      {{"up", Style::column}, {"down", row}}, Replicate{},
      "\"norm\": x is Partial(sum) on tp=2; a norm needs values, not contributions to them: a boundary must "
      "reduce it first");
}

TEST_F(Forgotten, GatherBeforeAColumnLayer) {
  Style column = Style::column.on_sequence();
  column.before.reset();
  expect_text(residual, {{"norm", Style::sequence}, {"up", column}, {"down", Style::row.on_sequence()}},
              Shard{1}, "\"up\": x is Shard(1) on tp=2; expected Replicate, since the weight is Shard(0)");
}

TEST_F(Forgotten, ScatterBehindARowLayer) {
  expect_text(
      residual, {{"norm", Style::sequence}, {"up", Style::column.on_sequence()}, {"down", Style::row}},
      Shard{1}, "\"\": x + y: the second term is Replicate on tp=2; expected Shard(1) (as the first)");
}

TEST_F(Forgotten, CutBeforeANorm) {
  expect_text(
      residual,
      {{"norm", Style::sequence}, {"up", Style::column.on_sequence()}, {"down", Style::row.on_sequence()}},
      Replicate{}, "\"norm\": y is Replicate on tp=2; expected Shard(1)");
}

// In backward: dx of a column layer is each rank's contribution.
TEST_F(Forgotten, ReductionOfAColumnLayersGradient) {
  Style column = Style::column;
  column.before.reset();
  expect_text(residual, {{"up", column}, {"down", Style::row}}, Replicate{},
              "\"norm\": dy is Partial(sum) on tp=2; expected Replicate (as y)");
}

TEST_F(Forgotten, ARowLayerGivenWholeFeatures) {
  expect_text(residual, {{"down", Style::row}}, Replicate{},
              "\"down\": x is Replicate on tp=2; expected Shard(2), since the weight is Shard(1)");
}

TEST_F(Forgotten, ReductionBehindAnEmbeddingOverTheVocabulary) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    Style row = Style::row;
    row.after.reset();
    Speaker speaker(13, false);
    parallelize(speaker, mesh, {{"embedding", row}});
    replicate(speaker, mesh);
    materialise(speaker, compute);
    initialise(speaker, 1);
    Frame frame(compute);
    const Tensor tokens = numbers(rank.context, {2, 4}, 13, 7);
    const auto text = [&](const Placement& placement) {
      const Error e = error_of([&] {
        speaker.forward(distribute(tokens, make_layout(mesh, {placement}, {2, 4})), frame);
      });
      EXPECT_EQ(e.code(), ErrorCode::layout);
      return std::string(e.what());
    };
    EXPECT_EQ(
        text(Replicate{}),
        "\"norm\": x is Partial(sum) on tp=2; a norm needs values, not contributions to them: a boundary "
        "must reduce it first");
    EXPECT_EQ(
        text(Shard{1}),
        "\"embedding\": tokens is Shard(1) on tp=2; expected Replicate, since the weight is Shard(0): each "
        "rank looks up its rows for all tokens");
  });
}

TEST_F(Forgotten, LabelsOfRanksThatShareTheClassesAreTheSame) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    Frame frame(compute);
    const LayoutRef of_logits = make_layout(mesh, {Shard{2}}, {2, 4, 13});
    const Tensor logits = as_layout(Tensor::zeros(rank.context, of_logits->local_shape()), of_logits);
    const Tensor labels = numbers(rank.context, {2, 4}, 13, 7);
    // Another rank's placement that gives the same shape: contributions.
    const LayoutRef partial = make_layout(mesh, {Partial{}}, {2, 4});
    const Error e = error_of([&] {
      CrossEntropy().forward({logits, labels.with_layout(partial), scalar(mesh, 8)}, frame);
    });
    EXPECT_EQ(
        std::string(e.what()),
        "cross entropy: labels is Partial(sum) on tp=2; expected Replicate (as logits; all ranks that share "
        "the classes of a token)");
  });
}

}  // namespace
}  // namespace weft::sequence_test
