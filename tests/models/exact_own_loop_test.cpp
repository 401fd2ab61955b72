// Exact mode in programs with a loop or layers of their own: what would not be exact is refused.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/trainer.hpp"
#include "weft/models/transformer.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/linear.hpp"
#include "weft/train/gradients.hpp"

namespace weft::exact_own_loop_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kVocab = 32, kSequence = 8;

TransformerConfig tiny() {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 2, c.kv_heads = 2, c.head_size = 8, c.ffn_hidden = 24;
  c.vocab = kVocab, c.max_seq = kSequence;
  return c;
}

struct Rows {
  explicit Rows(std::int64_t rows) {
    for (std::int64_t i = 0; i < rows * kSequence; ++i)
      tokens.push_back(i * 7 % kVocab), labels.push_back((i * 7 + 3) % kVocab);
    batch = {tokens.data(), labels.data(), rows, kSequence, 0};
  }
  Rows(const Rows&) = delete;
  std::vector<std::int64_t> tokens, labels;
  TokenBatch batch;
};

struct Built {
  explicit Built(Rank& rank) : compute(rank.context, 1), mesh(rank.group(), {{"dp", rank.size}, {"tp", 1}}) {
    model = build_parallel_model(tiny(), mesh, compute, {.seed = 3, .exact = Exact::yes});
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel model;
};

TEST(ExactOwnLoop, NoSyncIsRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Built b(rank);
    EXPECT_EQ(
        error_text([&] { const NoSync off = b.model.no_sync(); }),
        "bad_argument: exact: no_sync() adds micro-batches before the ranks add theirs, which has other "
        "bits on other meshes; expected one pass in a step, or a Trainer");
  });
}

// The loop of docs/exact.md.
double own_step(Built& b, const Tensor& tokens, const Tensor& labels, Exact exact) {
  const std::int64_t global = tokens.size(0) * b.model.data.size();
  Frame frame(b.compute, {.seed = 3, .step = 0, .exact = exact});
  CrossEntropy loss;
  const Tensors y = b.model.model->forward({b.model.place(tokens, global)}, frame);
  loss.forward({y[0], b.model.place(labels, global), scalar(b.mesh, global * kSequence)}, frame);
  b.model.model->backward(loss.backward({}, frame), frame);
  b.model.finish();
  return clip_grad_norm(b.model.parameters(), 0.5, 2, NonFinite::error, &b.compute, exact);
}

TEST(ExactOwnLoop, ATrainingPassMustBeExact) {
  double norms[2] = {};
  for (const int ranks : {1, 2})
    test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
      Built b(rank);
      const std::int64_t rows = 4 / ranks;
      const Tensor tokens(rank.context, {rows, kSequence}, DType::i64),
          labels(rank.context, {rows, kSequence}, DType::i64);
      for (std::int64_t i = 0; i < tokens.count(); ++i) {
        tokens.as<std::int64_t>()[i] = (rank.rank * tokens.count() + i) * 5 % kVocab;
        labels.as<std::int64_t>()[i] = (rank.rank * tokens.count() + i) * 5 % kVocab / 2;
      }
      EXPECT_EQ(error_text([&] { own_step(b, tokens, labels, Exact::no); }),
                "bad_argument: exact: a training pass whose Frame is not exact, of a model that was built "
                "exact; expected Frame(compute, {.exact = Exact::yes})");
      const double norm = own_step(b, tokens, labels, Exact::yes);
      if (rank.rank == 0) norms[ranks - 1] = norm;
      Frame inference = Frame::inference(b.compute);
      b.model.model->forward({b.model.place(tokens, 4)}, inference);
    });
  EXPECT_GT(norms[0], 0);
  EXPECT_EQ(norms[0], norms[1]);
}

// A container of one's own may be exact, but not if it runs a layer twice.
struct Twice : Module {
  Twice() : inner(16, 16) { add("inner", inner); }
  bool has_exact_rule() const override { return true; }
  Tensors do_forward(Inputs x, Frame& f) override { return inner.forward(inner.forward(x, f), f); }
  Tensors do_backward(Inputs dy, Frame& f) override { return inner.backward(inner.backward(dy, f), f); }
  Linear inner;
};

TEST(ExactOwnLoop, AWeightIsUsedOnceInAPass) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    Recipe recipe;
    recipe.name = "twice";
    recipe.tokens = TokenSizes{kVocab, kSequence};
    recipe.build = [] {
      auto all = std::make_unique<Sequential>();
      all->append("embedding", std::make_unique<Embedding>(kVocab, 16));
      all->append("twice", std::make_unique<Twice>());
      all->append("head", std::make_unique<Linear>(16, kVocab));
      return all;
    };
    recipe.split = [](Module&, const DeviceMesh&, const BuildOptions&) {};
    recipe.loss = [] { return std::make_unique<CrossEntropy>(); };
    BuildOptions options;
    options.exact = Exact::yes;
    ParallelModel model = build_parallel_model(recipe, mesh, compute, options);
    const Rows rows(4);
    const auto step = [&](Trainer& trainer) {
      return error_text([&] { trainer.step({&rows.batch, 1}, 0.01); });
    };
    Trainer exact(model, compute, {});
    EXPECT_EQ(
        step(exact),
        "bad_argument: exact: \"twice.inner.weight\" is used twice in a pass, and the gradients of both "
        "uses are added before the ranks add theirs; there is no rule for that");
    options.exact = Exact::no;
    ParallelModel usual = build_parallel_model(recipe, mesh, compute, options);
    Trainer other(usual, compute, {});
    EXPECT_EQ(other.step({&rows.batch, 1}, 0.01).step, 0);
  });
}

}  // namespace
}  // namespace weft::exact_own_loop_test
