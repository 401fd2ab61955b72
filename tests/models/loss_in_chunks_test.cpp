// A loss that is computed for some tokens at a time, on every mesh: the losses, gradients and evaluations of
// a model that computes it at once, and less memory.
#include "weft/nn/loss_in_chunks.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "support/counting_allocator.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/trainer.hpp"

namespace weft::loss_in_chunks_test {
namespace {

using test::Rank;
using test::Ranks;

constexpr std::int64_t kRows = 5, kSequence = 12, kVocab = 52;

TransformerConfig small(bool tied = false) {
  TransformerConfig c;
  c.dim = 24, c.layers = 1, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 40, c.vocab = kVocab;
  c.max_seq = kSequence, c.init_std = 0.2, c.tied = tied;
  return c;
}

struct Case {
  std::string name;
  int dp = 1, tp = 1;
  BuildOptions build = {};
  bool tied = false, scaled = false;
  int micro_batches = 1;
};

struct Numbers {
  std::vector<double> losses, held_out;
  std::map<std::string, std::vector<float>> gradients;  // of the first step
};

Numbers train(const Case& c, std::int64_t chunk) {
  Numbers numbers;
  std::mutex mutex;
  test::run_ranks(Ranks::threads, c.dp * c.tp, [&](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", c.dp}, {"tp", c.tp}});
    BuildOptions options = c.build;
    options.seed = 5;
    options.loss_chunk = chunk;
    ParallelModel model = build_parallel_model(small(c.tied), mesh, compute, options);
    Trainer::Options training{.max_norm = 1};
    training.label_smoothing = 0.1;
    training.z_loss = 1e-3;
    if (c.scaled) training.loss_scale = LossScaler::Options{.scale = 128};
    Trainer trainer(model, compute, training);
    const Chunk here = chunk_of(kRows, model.data.size(), model.data.rank());
    std::vector<std::int64_t> tokens, labels;
    for (std::int64_t r = here.offset; r < here.offset + here.size; ++r)
      for (std::int64_t i = 0; i < kSequence; ++i) {
        tokens.push_back((r * 7 + i * i) % kVocab);
        labels.push_back((r + i) % 4 == 0 ? CrossEntropy::kIgnore : (r * 7 + (i + 1) * (i + 1)) % kVocab);
      }
    const std::vector<TokenBatch> batches(static_cast<std::size_t>(c.micro_batches),
                                          {tokens.data(), labels.data(), here.size, kSequence, kRows});
    Numbers own;
    for (int step = 0; step < 4; ++step) {
      own.losses.push_back(trainer.backward(batches).loss);
      if (step == 0)
        for (Parameter* p : model.parameters()) {
          const Tensor all = full(p->gradient());
          own.gradients[p->path()].assign(all.f32().begin(), all.f32().end());
        }
      trainer.update(0.01);
      own.held_out.push_back(trainer.evaluate(batches).loss);
    }
    const std::lock_guard lock(mutex);
    numbers = own;
  });
  return numbers;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance * std::abs(b[i])) << i;
}

Case on(std::string name, int dp, int tp, const std::function<void(Case&)>& change = nullptr) {
  Case c{std::move(name), dp, tp};
  if (change) change(c);
  return c;
}

// A chunk of 7 tokens is fewer than a row has; of 30, not a divisor; of 1000, more than there are.
TEST(LossInChunks, TrainsAsWithoutChunks) {
  const auto shard = [](Case& c) { c.build.tensor.vocab = VocabSplit::shard; };
  const auto sequence = [](Case& c) { c.build.tensor.sequence_parallel = true; };
  const std::vector<Case> cases{
      on("one rank", 1, 1),
      on("scaled", 1, 1, [](Case& c) { c.scaled = true; }),
      on("micro-batches", 2, 1, [](Case& c) { c.micro_batches = 2; }),
      on("data, rows 3 and 2", 2, 1),
      on("tensor", 1, 2),
      on("vocabulary", 1, 2, shard),
      on("sequence", 1, 2, sequence),
      on("sequence and vocabulary", 1, 2, [&](Case& c) { shard(c), sequence(c); }),
      on("tied", 1, 2, [](Case& c) { c.tied = true; }),
      on("tied vocabulary", 2, 2, [&](Case& c) { shard(c), c.tied = true; }),
      on("sharded", 2, 1, [](Case& c) { c.build.data = DataForm::fsdp; }),
      on("bf16", 1, 2, [](Case& c) { c.build.dtype = c.build.activations = DType::bf16; }),
      on("ac", 1, 1, [](Case& c) { c.build.ac = {.mode = AcMode::full}; }),
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const Numbers at_once = train(c, 0);
    for (const std::int64_t chunk : {7, 30, 1000}) {
      SCOPED_TRACE(chunk);
      const Numbers chunked = train(c, chunk);
      const double tolerance = c.build.dtype == DType::bf16 ? 2e-3 : 2e-6;
      // A sum in f64; over a tensor axis the logits are split in place of gathered.
      EXPECT_NEAR(chunked.losses[0], at_once.losses[0], (c.tp > 1 ? 1e-8 : 1e-12) * at_once.losses[0]);
      expect_near(chunked.losses, at_once.losses, tolerance);
      expect_near(chunked.held_out, at_once.held_out, tolerance);
      for (const auto& [path, gradient] : at_once.gradients) {
        double error = 0, size = 0;
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          const double d = double{chunked.gradients.at(path)[i]} - double{gradient[i]};
          error += d * d, size += double{gradient[i]} * double{gradient[i]};
        }
        EXPECT_LE(error, 1e-12 * size) << path;
      }
    }
  }
}

// Products of a row do not depend on the other rows: all gradients but the head's own have the same bits.
TEST(LossInChunks, OtherGradientsHaveTheSameBits) {
  const Case c = on("one rank", 1, 1);
  const Numbers at_once = train(c, 0), chunked = train(c, 10);
  for (const auto& [path, gradient] : at_once.gradients) {
    if (path == "output_head.proj.weight") continue;
    EXPECT_EQ(chunked.gradients.at(path), gradient) << path;
  }
}

// The logits of 16 x 64 tokens of 4,000 words are 16 MB, and so is their gradient.
TEST(LossInChunks, HoldsTheLogitsOfAChunkAlone) {
  const auto peak = [](std::int64_t chunk) {
    test::CountingAllocator memory;
    test::RankOptions options;
    options.context.allocator = memory.functions();
    test::run_ranks(
        Ranks::threads, 1,
        [&](Rank& rank) {
          Compute compute(rank.context, 1);
          const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 1}});
          TransformerConfig config = small();
          config.vocab = 4000, config.max_seq = 64;
          ParallelModel model = build_parallel_model(config, mesh, compute, {.loss_chunk = chunk});
          Trainer trainer(model, compute, {});
          const std::vector<std::int64_t> tokens(16 * 64, 3);
          const TokenBatch batch{tokens.data(), tokens.data(), 16, 64, 0};
          trainer.step({&batch, 1}, 0.01);
        },
        options);
    return static_cast<std::int64_t>(memory.take_peak());
  };
  const std::int64_t logits = 16 * 64 * 4000 * 4;
  EXPECT_LT(peak(64), peak(0) - 2 * logits + logits / 4);
}

// Without a loss that is given, the model computes logits.
TEST(LossInChunks, PredictionsAreLogits) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    const auto logits = [&](std::int64_t chunk) {
      ParallelModel model = build_parallel_model(small(), mesh, compute, {.seed = 5, .loss_chunk = chunk});
      const std::vector<std::int64_t> tokens(kSequence, 9);
      const Tensor all = compute_logits(model, compute, {tokens.data(), nullptr, 1, kSequence, 0});
      return std::vector<float>(all.f32().begin(), all.f32().end());
    };
    const std::vector<float> a = logits(0), b = logits(4);
    EXPECT_EQ(a, b);
    EXPECT_EQ(a.size(), static_cast<std::size_t>(kSequence * kVocab));
  });
}

TEST(LossInChunks, WhatIsRefused) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 1}, {"pp", 1}});
    const auto refused = [&](const Recipe& recipe, BuildOptions options) {
      options.loss_chunk = options.loss_chunk == 0 ? 8 : options.loss_chunk;
      return test::error_text([&] { build_parallel_model(recipe, mesh, compute, options); });
    };
    const Recipe transformer = transformer_recipe(small());
    const std::string begin = "bad_argument: build_parallel_model: loss_chunk is ";
    EXPECT_EQ(refused(transformer, {.loss_chunk = -2}),
              begin + "-2: expected 0 (all tokens at once) or more");
    EXPECT_EQ(refused(transformer, {.exact = Exact::yes}),
              begin + "8: exact mode has no rule for it; expected 0");
    EXPECT_EQ(refused(transformer, {.pipeline_axis = "pp"}),
              begin + "8: the head of a pipeline is a stage; expected 0");
    Recipe other = transformer;
    other.head = "head";
    EXPECT_EQ(refused(other, {}), begin + "8: the model has no \"head\", which is Recipe::head");
    other.head.clear();
    EXPECT_EQ(refused(other, {}),
              begin + "8: recipe \"transformer\" has no head or no loss; expected both, or 0");
    Recipe with_passes = transformer;
    with_passes.build = [] {
      auto model = std::make_unique<Transformer>(small());
      model->output_head.proj.set_passes(std::make_shared<LossInChunks>(1));
      return model;
    };
    EXPECT_EQ(refused(with_passes, {}),
              begin +
                  "8: \"output_head.proj\" has passes of its own, such as those of a float8 layer; expected "
                  "a plain layer");
    EXPECT_EQ(test::error_text([] { LossInChunks(0); }),
              "bad_argument: loss in chunks: tokens is 0; expected 1 or more");

    const auto chunked = std::make_shared<LossInChunks>(4);
    CrossEntropy loss;
    EXPECT_EQ(test::error_text([&] { (void)chunked->give(loss, {}); }),
              "bad_argument: loss in chunks: inputs is empty; expected the number of counted elements, last");
    Linear head(3, 5, false);
    replicate(head, mesh);
    materialise(head, compute);
    initialise(head, 1);
    head.set_passes(chunked);
    const auto zeros = [&](const Shape& shape, DType dtype = DType::f32) {
      const Tensor t = compute.make(shape, dtype);
      std::fill_n(reinterpret_cast<unsigned char*>(t.data()), t.bytes(), 0);
      return t;
    };
    const LossInChunks::Given given =
        chunked->give(loss, {zeros({2, 6}, DType::i64), scalar(rank.context, 12)});
    EXPECT_EQ(test::error_text([&] { (void)chunked->give(loss, {scalar(rank.context, 1)}); }),
              "bad_argument: loss in chunks: a loss is given already; expected one at a time");
    Frame frame(compute);
    EXPECT_EQ(test::error_text([&] { head.forward({zeros({3})}, frame); }),
              "bad_argument: \"\": x is (3); expected (rows, positions, …) for a loss in chunks");
    EXPECT_EQ(test::error_text([&] {
                head.forward({zeros({2, 5, 3})}, frame);
              }),
              "bad_argument: loss in chunks: inputs[0] is (2, 6); expected (2, 5, …), as \"\": x");
  });
}

}  // namespace
}  // namespace weft::loss_in_chunks_test
