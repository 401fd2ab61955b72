// Documents that are packed into sequences: each has the results that it has as a sequence of its own, in
// both passes, on every mesh.
#include "weft/nn/packed_documents.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "nn/support.hpp"
#include "support/run_ranks.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/key_value_cache.hpp"

namespace weft::packed_documents_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;
using Numbers = std::vector<std::int64_t>;

// Ids of documents of these lengths, in rows of `sequence` tokens.
Tensor ids_of(Context& context, std::int64_t rows, std::int64_t sequence, const Numbers& lengths) {
  Tensor ids(context, {rows, sequence}, DType::i64);
  auto at = ids.as<std::int64_t>().begin();
  for (std::size_t d = 0; d < lengths.size(); ++d)
    at = std::fill_n(at, lengths[d], static_cast<std::int64_t>(d % 2));
  EXPECT_EQ(at, ids.as<std::int64_t>().end());
  return ids;
}

TEST(PackedDocuments, RunsAreDocumentsOfOneLength) {
  Context context;
  const Tensor ids = test::tokens_of(context, {3, 6}, {7, 7, 7, 2, 2, 2, 1, 1, 2, 2, 1, 1, 5, 5, 5, 5, 5, 5});
  const auto documents = PackedDocuments::of(context, ids, "ids");
  EXPECT_EQ(documents->rows(), 3);
  EXPECT_EQ(documents->sequence(), 6);
  std::vector<Numbers> runs;
  for (const PackedDocuments::Run& r : documents->runs()) runs.push_back({r.first, r.count, r.length});
  EXPECT_EQ(runs, (std::vector<Numbers>{{0, 2, 3}, {6, 3, 2}, {12, 1, 6}}));
  EXPECT_EQ(error_text([&] {
              PackedDocuments::of(context, Tensor(context, {3, 6}), "ids");
            }),
            "bad_argument: ids: f32 (3, 6); expected i64 (rows, sequence)");
}

// ---- one layer ----

// An Attention whose pass has documents.
class InDocuments : public Module {
 public:
  InDocuments(const AttentionConfig& config, std::int64_t positions)
      : attention(config, RopeTables::make(positions, config.head_dim, 100.0)) {
    add("attention", attention);
  }
  Attention attention;
  std::shared_ptr<const PackedDocuments> documents;

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    f.set_documents(documents);
    return attention.forward(x, f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override { return attention.backward(dy, f); }
};

AttentionConfig small() {
  return {.dim = 8, .heads = 4, .kv_heads = 2, .head_dim = 4, .init = Normal{0.4}, .out_init = Normal{0.4}};
}

std::vector<double> projected(const Linear& layer, const std::vector<double>& x) {
  const auto in = static_cast<std::size_t>(layer.weight->global_shape()[1]),
             out = static_cast<std::size_t>(layer.weight->global_shape()[0]);
  std::vector<double> y;
  for (std::size_t t = 0; t < x.size() / in; ++t)
    for (std::size_t o = 0; o < out; ++o) {
      double sum = 0;
      for (std::size_t i = 0; i < in; ++i)
        sum += x[t * in + i] * static_cast<double>(layer.weight->master().f32()[o * in + i]);
      y.push_back(sum);
    }
  return y;
}

// Rotates the features of each head by its position in the document.
void rotate(std::vector<double>& x, std::size_t heads, std::size_t size, const Numbers& position) {
  for (std::size_t t = 0; t < position.size(); ++t)
    for (std::size_t h = 0; h < heads; ++h)
      for (std::size_t i = 0; i < size / 2; ++i) {
        const double angle = static_cast<double>(position[t]) *
                             std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(size));
        double &a = x[(t * heads + h) * size + i], &b = x[(t * heads + h) * size + i + size / 2];
        const double first = a;
        a = first * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + first * std::sin(angle);
      }
}

// Plain loops in f64 over all pairs of tokens; those of two documents are left out.
TEST(PackedDocuments, AttentionEqualsLoopsWithAMask) {
  test::Bench bench;
  InDocuments module(small(), 70);
  materialise(module, bench.compute);
  initialise(module, 3);
  const Numbers lengths{1, 2, 67, 5, 65};
  const Tensor x = test::random_tensor(bench.context, {2, 70, 8}, "x");
  module.documents = PackedDocuments::of(bench.context, ids_of(bench.context, 2, 70, lengths), "ids");
  Numbers document, position;
  for (std::size_t d = 0; d < lengths.size(); ++d)
    for (std::int64_t i = 0; i < lengths[d]; ++i) {
      document.push_back(static_cast<std::int64_t>(d));
      position.push_back(i);
    }
  const Attention& layer = module.attention;
  const std::size_t heads = 4, kv_heads = 2, size = 4;
  std::vector<double> q = projected(layer.q_proj, test::doubles(x)),
                      k = projected(layer.k_proj, test::doubles(x));
  const std::vector<double> v = projected(layer.v_proj, test::doubles(x));
  rotate(q, heads, size, position);
  rotate(k, kv_heads, size, position);
  std::vector<double> out(q.size());
  for (std::size_t h = 0; h < heads; ++h)
    for (std::size_t i = 0; i < document.size(); ++i) {
      std::vector<double> weights(i + 1);
      double sum = 0;
      for (std::size_t j = 0; j <= i; ++j) {
        if (document[i] != document[j]) continue;
        double score = 0;
        for (std::size_t d = 0; d < size; ++d)
          score += q[(i * heads + h) * size + d] * k[(j * kv_heads + h / 2) * size + d];
        sum += weights[j] = std::exp(score / std::sqrt(static_cast<double>(size)));
      }
      for (std::size_t j = 0; j <= i; ++j)
        for (std::size_t d = 0; d < size; ++d)
          out[(i * heads + h) * size + d] += weights[j] / sum * v[(j * kv_heads + h / 2) * size + d];
    }
  Frame frame = Frame::inference(bench.compute);
  test::expect_near(module.forward(x, frame)[0], projected(layer.o_proj, out), 2e-6, "y");
}

TEST(PackedDocuments, GradientsMatchDifferences) {
  for (const Exact exact : {Exact::no, Exact::yes}) {
    test::Bench bench;
    InDocuments module(small(), 16);
    materialise(module, bench.compute);
    initialise(module, 3);
    module.documents =
        PackedDocuments::of(bench.context, ids_of(bench.context, 2, 8, {3, 1, 4, 5, 3}), "ids");
    const Tensor x = test::random_tensor(bench.context, {2, 8, 8}, "x");
    if (exact == Exact::no) {
      test::expect_gradients_match_differences(module, x, bench.compute);
      continue;
    }
    // Exact mode adds in another order.
    std::vector<std::vector<double>> gradients;
    const Tensor dy = test::random_tensor(bench.context, {2, 8, 8}, "dy");
    for (const Exact mode : {Exact::no, Exact::yes}) {
      for (Parameter* p : module.parameters()) p->zero_gradient();
      Frame frame(bench.compute, {.exact = mode});
      module.forward(x, frame);
      const Tensor dx = module.backward(dy, frame)[0];
      std::size_t at = 0;
      const auto check = [&](const Tensor& t, const std::string& what) {
        if (mode == Exact::no)
          gradients.push_back(test::doubles(t));
        else
          test::expect_near(t, gradients[at++], 1e-5, what);
      };
      check(dx, "dx");
      for (Parameter* p : module.parameters()) check(p->gradient(), p->path());
    }
  }
}

// ---- one model ----

constexpr std::int64_t kVocab = 24;

TransformerConfig config_of(std::int64_t max_seq) {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab;
  c.max_seq = max_seq, c.init_std = 0.2;
  return c;
}

Tensor some_tokens(Context& context, std::int64_t rows, std::int64_t sequence) {
  Tensor tokens(context, {rows, sequence}, DType::i64);
  for (std::int64_t i = 0; i < tokens.count(); ++i)
    tokens.as<std::int64_t>()[static_cast<std::size_t>(i)] = (7 * i * i + 3 * i) % kVocab;
  return tokens;
}

bool same_bits(const Tensor& a, const std::byte* b) {
  return std::memcmp(a.data(), b, static_cast<std::size_t>(a.bytes())) == 0;
}

// The documents fill blocks of queries, and more and less than one, and blocks of keys.
TEST(PackedDocuments, ADocumentHasTheBitsThatItHasAlone) {
  const Numbers lengths{1, 2, 61, 64, 65, 300, 19, 493, 19};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name(dtype));
    test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 1}});
      ParallelModel model = build_parallel_model(config_of(512), mesh, compute,
                                                 {.seed = 4, .dtype = dtype, .activations = dtype});
      const Tensor tokens = some_tokens(rank.context, 2, 512), ids = ids_of(rank.context, 2, 512, lengths);
      const std::int64_t* const at = tokens.data_ptr<std::int64_t>();
      const Tensor packed = compute_logits(
          model, compute,
          {.tokens = at, .rows = 2, .sequence = 512, .documents = ids.data_ptr<std::int64_t>()});
      std::int64_t first = 0;
      for (const std::int64_t length : lengths) {
        const Tensor alone =
            compute_logits(model, compute, {.tokens = at + first, .rows = 1, .sequence = length});
        EXPECT_TRUE(same_bits(alone, packed.data() + first * kVocab * 4)) << length << " from " << first;
        first += length;
      }
      const Tensor whole = compute_logits(model, compute, {.tokens = at, .rows = 2, .sequence = 512});
      EXPECT_TRUE(same_bits(whole.slice_flat(0, {1, 1, kVocab}), packed.data()));
      EXPECT_FALSE(same_bits(whole, packed.data()));
    });
  }
}

// ---- training ----

constexpr std::int64_t kRows = 8, kSequence = 16;

struct Case {
  std::string name;
  int dp = 1, tp = 1, pp = 1;
  BuildOptions build = {};
  int micro_batches = 1;
  bool experts = false;
};

struct Outcome {
  std::vector<double> losses, held_out;
  std::map<std::string, std::vector<float>> gradients;  // of the first step
};

// All documents have eight tokens. `packed`: two of them are a row, otherwise each is a row.
Outcome train(const Case& c, bool packed) {
  Outcome outcome;
  std::mutex mutex;
  test::run_ranks(Ranks::threads, c.dp * c.tp * c.pp, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"pp", c.pp}, {"dp", c.dp}, {"tp", c.tp}});
    BuildOptions options = c.build;
    options.seed = 5;
    if (c.pp > 1) options.pipeline_axis = "pp";
    MoETransformerConfig moe{.experts = 4};
    moe.transformer = config_of(kSequence);
    moe.router.top_k = 2;
    const Recipe recipe = c.experts ? moe_recipe(moe) : transformer_recipe(config_of(kSequence));
    ParallelModel model = build_parallel_model(recipe, mesh, compute, options);
    Trainer trainer(model, compute, {.max_norm = 1});
    const std::int64_t length = packed ? kSequence : kSequence / 2,
                       all = kRows * kSequence / length / c.micro_batches;
    const Chunk here = chunk_of(all, model.data.size(), model.data.rank());
    std::vector<Numbers> tokens, labels, documents;
    for (std::int64_t m = 0; m < c.micro_batches; ++m) {
      tokens.emplace_back(), labels.emplace_back(), documents.emplace_back();
      for (std::int64_t i = (m * all + here.offset) * length;
           i < (m * all + here.offset + here.size) * length; ++i) {
        tokens.back().push_back((5 * i * i + i / 7) % kVocab);
        labels.back().push_back(i % 8 == 7 ? CrossEntropy::kIgnore
                                           : (5 * (i + 1) * (i + 1) + (i + 1) / 7) % kVocab);
        documents.back().push_back(i / 8);
      }
    }
    std::vector<TokenBatch> batches;
    for (std::size_t m = 0; m < tokens.size(); ++m)
      batches.push_back({tokens[m].data(), labels[m].data(), here.size, length, all,
                         packed ? documents[m].data() : nullptr});
    Outcome own;
    for (int step = 0; step < 3; ++step) {
      own.losses.push_back(trainer.backward(batches).loss);
      if (step == 0)
        for (const Parameter* p : model.parameters()) {
          const Tensor whole = full(p->gradient());
          own.gradients[p->path()].assign(whole.f32().begin(), whole.f32().end());
        }
      trainer.update(0.01);
      own.held_out.push_back(trainer.evaluate(batches).loss);
    }
    const std::lock_guard lock(mutex);
    own.gradients.merge(outcome.gradients);  // of other stages
    outcome = own;
  });
  return outcome;
}

void expect_equal(const Outcome& got, const Outcome& want, double tolerance) {
  for (std::size_t i = 0; i < want.losses.size(); ++i) {
    EXPECT_NEAR(got.losses.at(i), want.losses[i], tolerance) << "step " << i;
    EXPECT_NEAR(got.held_out.at(i), want.held_out[i], tolerance) << "evaluation " << i;
  }
  EXPECT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [path, values] : want.gradients) {
    ASSERT_EQ(got.gradients.count(path), 1u) << path;
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(got.gradients.at(path).at(i), values[i], tolerance) << path << " [" << i << "]";
  }
}

Case on(std::string name, int dp, int tp, int pp = 1, const std::function<void(Case&)>& change = nullptr) {
  Case c{std::move(name), dp, tp, pp};
  if (change) change(c);
  return c;
}

TEST(PackedDocuments, TrainAsRowsOfTheirOwnOnEveryMesh) {
  const Outcome alone = train({}, false);
  const std::vector<Case> cases{
      on("one rank", 1, 1),
      on("data", 2, 1),
      on("sharded", 2, 1, 1, [](Case& c) { c.build.data = DataForm::fsdp; }),
      on("tensor, shared heads", 1, 4),
      on("sequence parallel", 1, 2, 1, [](Case& c) { c.build.tensor.sequence_parallel = true; }),
      on("micro-batches", 1, 2, 1, [](Case& c) { c.micro_batches = 4; }),
      on("blocks run again", 1, 1, 1, [](Case& c) { c.build.ac = {.mode = AcMode::full}; }),
      on("attention runs again", 1, 2, 1, [](Case& c) { c.build.ac = {.mode = AcMode::selective}; }),
      on("loss in chunks", 1, 2, 1, [](Case& c) { c.build.loss_chunk = 5; }),
      on("pipeline", 1, 1, 2, [](Case& c) { c.micro_batches = 4; }),
      on("pipeline that runs again", 2, 1, 2,
         [](Case& c) {
           c.micro_batches = 2;
           c.build.ac = {.mode = AcMode::full};
         }),
      on("zero bubble", 1, 2, 2,
         [](Case& c) {
           c.micro_batches = 2;
           c.build.pipeline.kind = PipelineKind::zero_bubble;
         }),
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    expect_equal(train(c, true), alone, 2e-5);
  }
}

TEST(PackedDocuments, TrainAsRowsOfTheirOwnWithExperts) {
  const auto experts = [](Case& c) { c.experts = true; };
  const Outcome alone = train(on("", 1, 1, 1, experts), false);
  for (const Case& c : {on("one rank", 1, 1, 1, experts), on("tensor", 1, 2, 1, experts)}) {
    SCOPED_TRACE(c.name);
    expect_equal(train(c, true), alone, 2e-5);
  }
}

TEST(PackedDocuments, ExactModeHasTheBitsOfOneRank) {
  const auto exact = [](Case& c) { c.build.exact = Exact::yes; };
  const Outcome alone = train(on("", 1, 1, 1, exact), true);
  expect_equal(alone, train({}, false), 2e-5);
  for (const Case& c :
       {on("data", 2, 1, 1, exact), on("tensor, shared heads", 1, 4, 1, exact), on("both", 2, 2, 1, exact)}) {
    SCOPED_TRACE(c.name);
    expect_equal(train(c, true), alone, 0);
  }
}

// ---- what is refused ----

TEST(PackedDocuments, OfAnotherBatchAreRefused) {
  test::Bench bench;
  InDocuments module(small(), 8);
  materialise(module, bench.compute);
  initialise(module, 3);
  module.documents = PackedDocuments::of(bench.context, ids_of(bench.context, 2, 4, {4, 4}), "ids");
  Frame frame(bench.compute);
  EXPECT_EQ(error_text([&] {
              module.forward(Tensor(bench.context, {1, 8, 8}), frame);
            }),
            "bad_argument: \"attention\": the pass has documents of (2, 4) tokens; expected (1, 8), as x");
}

TEST(PackedDocuments, AKeyValueCacheIsRefused) {
  test::Bench bench;
  Transformer model(config_of(8));
  materialise(model, bench.compute);
  initialise(model, 3);
  const KeyValueCache cache(model, 8);
  Frame frame = Frame::inference(bench.compute);
  EXPECT_EQ(error_text([&] {
              model.forward({some_tokens(bench.context, 1, 8), ids_of(bench.context, 1, 8, {3, 5})}, frame);
            }),
            "unsupported: \"layers.0.attention\": a key/value cache exists, and the pass has documents; "
            "expected sequences of one document");
}

TEST(PackedDocuments, CrossAttentionIsRefused) {
  test::Bench bench;
  CrossAttention layer({.dim = 4, .heads = 2, .head_dim = 2});
  materialise(layer, bench.compute);
  initialise(layer, 3);
  Frame frame(bench.compute);
  frame.set_documents(PackedDocuments::of(bench.context, ids_of(bench.context, 1, 4, {4}), "ids"));
  const Tensor x(bench.context, {1, 4, 4});
  EXPECT_THAT(error_text([&] {
                layer.forward({x, x}, frame);
              }),
              HasSubstr("the pass has documents, whose contexts cross-attention does not know"));
}

// A model reuses its Frame: the documents of a pass do not stay for the next one.
TEST(PackedDocuments, BelongToOnePass) {
  test::Bench bench;
  Transformer model(config_of(8));
  materialise(model, bench.compute);
  initialise(model, 3);
  const Tensor tokens = some_tokens(bench.context, 1, 8), ids = ids_of(bench.context, 1, 8, {3, 5});
  Frame frame = Frame::inference(bench.compute), fresh = Frame::inference(bench.compute);
  const Tensor whole = model.forward(tokens, fresh)[0], packed = model.forward({tokens, ids}, frame)[0];
  EXPECT_FALSE(same_bits(whole, packed.data()));
  EXPECT_TRUE(same_bits(whole, model.forward(tokens, frame)[0].data()));
  const auto outer = PackedDocuments::of(bench.context, ids, "ids");
  frame.set_documents(outer);  // of a module around the model
  EXPECT_TRUE(same_bits(whole, model.forward(tokens, frame)[0].data()));
  EXPECT_EQ(frame.documents(), outer);
  EXPECT_EQ(error_text([&] {
              model.forward({tokens, whole}, frame);
            }),
            "bad_argument: transformer: documents: f32 (1, 8, 24); expected i64 (rows, sequence)");
}

TEST(PackedDocuments, ASequenceThatIsCutIsRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"sp", 2}});
    InDocuments module(small(), 8);
    const DomainManager manager = apply_domain_parallel(module.attention, mesh, {.dims = {1}});
    replicate(module.attention, mesh);
    materialise(module, compute);
    initialise(module, 3);
    Frame frame(compute);
    frame.set_documents(PackedDocuments::of(rank.context, ids_of(rank.context, 1, 8, {3, 5}), "ids"));
    const Tensor x = distribute(Tensor(rank.context, {1, 8, 8}), manager.layout({1, 8, 8}));
    EXPECT_THAT(error_text([&] { module.attention.forward(x, frame); }),
                HasSubstr("the pass has documents, and the sequence is cut over ranks"));
  });
}

TEST(PackedDocuments, TensorRanksMustHaveTheSame) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    ParallelModel model = build_parallel_model(config_of(8), mesh, compute);
    Trainer trainer(model, compute, {});
    const Numbers tokens(8, 1), labels(8, 2), documents{0, 0, 0, 0, 1, 1, 1, rank.rank};
    const TokenBatch batch{tokens.data(), labels.data(), 1, 8, 0, documents.data()};
    EXPECT_THAT(error_text([&] { trainer.step(std::span(&batch, 1), 0.1); }),
                HasSubstr("the ranks of tp=2 were given different batches"));
  });
}

// Documents of another form, or on one data rank alone, end the step of all ranks at once.
TEST(PackedDocuments, DataRanksMustHaveThemAlike) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    ParallelModel model = build_parallel_model(config_of(8), mesh, compute, {.data = DataForm::fsdp});
    Trainer trainer(model, compute, {});
    const auto error_with = [&](const Tensor& documents) {
      Tensor tokens(rank.context, {1, 8}, DType::i64), labels(rank.context, {1, 8}, DType::i64);
      std::ranges::fill(tokens.as<std::int64_t>(), 1), std::ranges::fill(labels.as<std::int64_t>(), 2);
      Batch batch{.inputs = {tokens}, .targets = {labels}};
      if (documents) batch.inputs.push_back(documents);
      return error_text([&] { trainer.step(std::span<const Batch>(&batch, 1), 0.1); });
    };
    const Tensor good = ids_of(rank.context, 1, 8, {3, 5});
    EXPECT_THAT(error_with(rank.rank == 1 ? Tensor() : good),
                HasSubstr("the number of batches with documents is not the same on all ranks"));
    for (const Tensor& bad :
         {Tensor(rank.context, {1, 7}, DType::i64), Tensor(rank.context, {1, 8}, DType::i32)})
      EXPECT_THAT(error_with(rank.rank == 1 ? bad : good),
                  rank.rank == 1
                      ? HasSubstr("inputs[1], the documents, is " + std::string(name(bad.dtype())) + " " +
                                  to_string(bad.shape()) + "; expected i64 (1, 8), as inputs[0]")
                      : HasSubstr("its own error says why"));
    EXPECT_EQ(error_with(good), "no error");
  });
}

}  // namespace
}  // namespace weft::packed_documents_test
