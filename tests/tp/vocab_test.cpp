// The vocabulary split over ranks, on plain vectors: the ranks compute the results of one rank.
#include "weft/tp/vocab.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/calls_made.hpp"
#include "support/counting_allocator.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/loss.hpp"
#include "weft/tp/linear.hpp"

namespace weft::vocab_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using Floats = std::vector<float>;
using Numbers = std::vector<std::int64_t>;

template <class T>
TensorView of(std::vector<T>& v, const Shape& shape) {
  return {reinterpret_cast<std::byte*>(v.data()), dtype_of<T>, {}, shape, row_major(shape)};
}

// Columns [first, first + size) of a matrix of `width` columns.
Floats columns(const Floats& m, std::int64_t width, const Chunk& part) {
  Floats out;
  for (auto row = m.begin(); row != m.end(); row += width)
    out.insert(out.end(), row + part.offset, row + part.offset + part.size);
  return out;
}

constexpr std::int64_t kTokens = 6;

// Vocabularies that the ranks divide and that they do not divide. With 3 entries some ranks have none.
constexpr std::int64_t kVocabs[] = {3, 8, 61};
constexpr int kRankCounts[] = {1, 2, 3, 4};

// --- cross-entropy

struct Case {
  explicit Case(std::int64_t vocab_in, double spread = 4) : vocab(vocab_in) {
    logits.resize(static_cast<std::size_t>(kTokens * vocab));
    RandomStream(3, "logits").normal(0, static_cast<std::int64_t>(logits.size()), logits.data());
    for (float& x : logits) x *= static_cast<float>(spread);
    for (std::int64_t t = 0; t < kTokens; ++t)
      labels.push_back(t == 2 ? CrossEntropy::kIgnore : (t * 5 + vocab - 1) % vocab);
  }
  // In double: loss, and the gradient with regard to each logit.
  double loss(std::int64_t valid, double smoothing, std::vector<double>* gradient = nullptr,
              double z_loss = 0) const {
    double total = 0;
    const auto v = static_cast<double>(vocab), n = static_cast<double>(valid);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const float* row = logits.data() + t * vocab;
      const bool counts = labels[static_cast<std::size_t>(t)] != CrossEntropy::kIgnore;
      const double largest = *std::max_element(row, row + vocab);
      double sum = 0, all = 0;
      for (std::int64_t j = 0; j < vocab; ++j) sum += std::exp(static_cast<double>(row[j]) - largest);
      for (std::int64_t j = 0; j < vocab; ++j) all += static_cast<double>(row[j]) - largest;
      for (std::int64_t j = 0; gradient != nullptr && j < vocab; ++j) {
        const double wanted =
            (j == labels[static_cast<std::size_t>(t)] ? 1 - smoothing : 0.0) + smoothing / v;
        const double p = std::exp(static_cast<double>(row[j]) - largest) / sum;
        gradient->push_back(counts ? (p + 2 * z_loss * (std::log(sum) + largest) * p - wanted) / n : 0.0);
      }
      if (counts)
        total += std::log(sum) -
                 (1 - smoothing) * (static_cast<double>(row[labels[static_cast<std::size_t>(t)]]) - largest) -
                 smoothing * all / v + z_loss * std::pow(std::log(sum) + largest, 2);
    }
    return total / n;
  }
  std::int64_t vocab;
  Floats logits;
  Numbers labels;
};

TEST(VocabParallel, CrossEntropyAndItsGradientAreThoseOfOneRank) {
  for (const std::int64_t vocab : kVocabs)
    for (const auto& [smoothing, z_loss] :
         {std::pair{0.0, 0.0}, {0.1, 0.0}, {1.0, 0.0}, {0.0, 1e-2}, {0.1, 1e-2}}) {
      Case whole(vocab);
      std::vector<double> gradient;
      const double expected = whole.loss(5, smoothing, &gradient, z_loss);
      for (const int ranks : kRankCounts)
        test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
          const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
          Compute compute(rank.context);
          const Chunk part = vocab_part(mesh, vocab);
          Floats logits = columns(whole.logits, vocab, part), dlogits(logits.size(), -1);
          Numbers labels = whole.labels;
          const Shape of_labels{2, 3}, of_logits{2, 3, part.size};
          const VocabLossOptions options{
              .vocab = vocab, .valid = 5, .label_smoothing = smoothing, .z_loss = z_loss};
          const auto loss = [&](const VocabLossOptions& o, const TensorView& d) {
            return vocab_parallel_cross_entropy(compute, mesh, of(logits, of_logits), of(labels, of_labels),
                                                o, d);
          };
          EXPECT_NEAR(loss(options, of(dlogits, of_logits)), expected, 1e-6 * expected);
          EXPECT_EQ(loss(options, {}), loss(options, {}));
          if (ranks > 1) {  // a comparison, then one all-gather of four numbers for each token, and no logit
            EXPECT_EQ(test::calls_made(mesh.group()), 6u);
            EXPECT_EQ(test::elements_of_last_call(mesh.group()), ranks * 4 * kTokens);
          }
          for (std::int64_t t = 0; t < kTokens; ++t)
            for (std::int64_t j = 0; j < part.size; ++j)
              ASSERT_NEAR(dlogits[static_cast<std::size_t>(t * part.size + j)],
                          gradient[static_cast<std::size_t>(t * vocab + part.offset + j)], 2e-7)
                  << t << ", " << part.offset + j;
          // In the place of the logits, and times the gradient of the loss.
          VocabLossOptions twice = options;
          twice.scale = 2;
          loss(twice, of(logits, of_logits));
          for (float& x : dlogits) x *= 2;
          EXPECT_EQ(logits, dlogits);
        });
    }
}

// The module computes the same by layouts, with the tokens cut over dp in either of their dimensions.
TEST(VocabParallel, TokensMayBeCutInAnyDimension) {
  constexpr std::int64_t kVocab = 7;
  const Case whole(kVocab);
  std::vector<double> gradient;
  const double expected = whole.loss(5, 0.1, &gradient, 1e-2);
  for (const int dim : {0, 1})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
      Compute compute(rank.context);
      Tensor logits(rank.context, {2, 3, kVocab}), labels(rank.context, {2, 3}, DType::i64);
      std::ranges::copy(whole.logits, logits.f32().begin());
      std::ranges::copy(whole.labels, labels.as<std::int64_t>().begin());
      labels = distribute(labels, make_layout(mesh, {{"dp", Shard{dim}}}, labels.shape()));
      logits = distribute(logits, make_layout(mesh, {{"dp", Shard{dim}}, {"tp", Shard{2}}}, logits.shape()));
      CrossEntropy loss(0.1, 1e-2);
      Frame frame(compute);
      const Tensor l = loss.forward({logits, labels, global_valid(rank.context, labels)}, frame)[0];
      EXPECT_NEAR(full(l).as<double>()[0], expected, 1e-6 * expected) << dim;
      const Tensor dlogits = full(loss.backward({}, frame)[0]);
      for (std::size_t i = 0; i < gradient.size(); ++i)
        ASSERT_NEAR(dlogits.f32()[i], gradient[i], 2e-7) << dim << ", " << i;
    });
}

// In one number the log of the sum of exponentials has few digits left where logits are large.
TEST(VocabParallel, LargeLogitsKeepTheirDigits) {
  constexpr std::int64_t kVocab = 61;
  for (const float size : {100.0f, 1e5f})
    for (const double smoothing : {0.0, 0.1}) {
      Case whole(kVocab);
      for (float& x : whole.logits) x += size;
      std::vector<double> gradient;
      const double expected = whole.loss(5, smoothing, &gradient);
      test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
        SCOPED_TRACE(testing::Message() << size << ", smoothing " << smoothing);
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        Compute compute(rank.context);
        const Chunk part = vocab_part(mesh, kVocab);
        const Shape shape{kTokens, part.size};
        Floats logits = columns(whole.logits, kVocab, part), dlogits(logits.size());
        Numbers labels = whole.labels;
        const VocabLossOptions options{.vocab = kVocab, .valid = 5, .label_smoothing = smoothing};
        EXPECT_NEAR(vocab_parallel_cross_entropy(compute, mesh, of(logits, shape), of(labels, {kTokens}),
                                                 options, of(dlogits, shape)),
                    expected, 2e-7 * expected);
        Tensor of_module(rank.context, {kTokens, kVocab}), of_labels(rank.context, {kTokens}, DType::i64);
        std::ranges::copy(whole.logits, of_module.f32().begin());
        std::ranges::copy(whole.labels, of_labels.as<std::int64_t>().begin());
        of_labels = distribute(of_labels, replicated_layout(mesh, of_labels.shape()));
        of_module = distribute(of_module, make_layout(mesh, {{"tp", Shard{1}}}, of_module.shape()));
        CrossEntropy loss(smoothing);
        Frame frame(compute);
        const Tensor l = loss.forward({of_module, of_labels, scalar(mesh, 5)}, frame)[0];
        EXPECT_NEAR(full(l).as<double>()[0], expected, 2e-7 * expected);
        const Tensor of_whole = full(loss.backward({}, frame)[0]);
        for (std::int64_t t = 0; t < kTokens; ++t)
          for (std::int64_t j = 0; j < part.size; ++j) {
            const auto i = static_cast<std::size_t>(t * kVocab + part.offset + j);
            const double slack = 1e-6 * std::abs(gradient[i]) + 1e-9;
            ASSERT_NEAR(dlogits[static_cast<std::size_t>(t * part.size + j)], gradient[i], slack) << i;
            ASSERT_NEAR(of_whole.f32()[i], gradient[i], slack) << i;
          }
      });
    }
}

// All logits are equal. The loss is log(vocab), or log(vocab / ranks) if ranks ignore each other.
TEST(VocabParallel, TheLossOfEqualLogitsIsTheLogOfTheWholeVocabulary) {
  for (const int ranks : kRankCounts)
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
      Compute compute(rank.context);
      for (const std::int64_t vocab : kVocabs) {
        const Chunk part = vocab_part(mesh, vocab);
        Floats logits(static_cast<std::size_t>(kTokens * part.size), 1000.0f);
        Numbers labels(kTokens, vocab - 1);
        for (const double smoothing : {0.0, 0.5})
          EXPECT_NEAR(vocab_parallel_cross_entropy(
                          compute, mesh, of(logits, {kTokens, part.size}), of(labels, {kTokens}),
                          {.vocab = vocab, .valid = kTokens, .label_smoothing = smoothing}),
                      std::log(static_cast<double>(vocab)), 1e-6);
      }
    });
}

TEST(VocabParallel, Bf16LogitsAndGradients) {
  const std::int64_t vocab = 61;
  Case whole(vocab);
  for (float& x : whole.logits) x = static_cast<float>(bf16(x));
  std::vector<double> gradient;
  const double expected = whole.loss(5, 0.1, &gradient);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    const Chunk part = vocab_part(mesh, vocab);
    std::vector<bf16> logits;
    for (const float x : columns(whole.logits, vocab, part)) logits.emplace_back(x);
    Numbers labels = whole.labels;
    const Shape shape{kTokens, part.size};
    EXPECT_NEAR(
        vocab_parallel_cross_entropy(compute, mesh, of(logits, shape), of(labels, {kTokens}),
                                     {.vocab = vocab, .valid = 5, .label_smoothing = 0.1}, of(logits, shape)),
        expected, 1e-6 * expected);
    for (std::int64_t t = 0; t < kTokens; ++t)
      for (std::int64_t j = 0; j < part.size; ++j) {
        const double want = gradient[static_cast<std::size_t>(t * vocab + part.offset + j)];
        ASSERT_NEAR(static_cast<float>(logits[static_cast<std::size_t>(t * part.size + j)]), want,
                    std::abs(want) * 0x1p-8 + 1e-7);
      }
  });
}

// --- the head's product and the loss, by chunks of tokens

constexpr std::int64_t kDim = 5;

// A head and its input; the logits of the Case are their product.
struct Head {
  explicit Head(std::int64_t vocab) : x(kTokens * kDim), w(static_cast<std::size_t>(vocab * kDim)) {
    RandomStream(5, "x").normal(0, static_cast<std::int64_t>(x.size()), x.data());
    RandomStream(5, "w").normal(0, static_cast<std::int64_t>(w.size()), w.data());
  }
  Floats part_of_w(const Chunk& part) const {
    return {w.begin() + part.offset * kDim, w.begin() + (part.offset + part.size) * kDim};
  }
  Floats x, w;
};

// The loss and the gradients, by three functions on all logits or by the one that makes them in chunks.
struct HeadLoss {
  double loss = 0;
  Floats dx, dw;
};
HeadLoss with_all_logits(Compute& compute, const DeviceMesh& mesh, Head head, Numbers labels,
                         const VocabLossOptions& options) {
  const Chunk part = vocab_part(mesh, options.vocab);
  Floats w = head.part_of_w(part), logits(static_cast<std::size_t>(kTokens * part.size));
  HeadLoss got{0, Floats(head.x.size()), Floats(w.size())};
  const TensorView of_x = of(head.x, {2, 3, kDim}), of_w = of(w, {part.size, kDim}),
                   of_logits = of(logits, {2, 3, part.size});
  column_linear_forward(compute, of_x, of_w, {}, of_logits);
  got.loss = vocab_parallel_cross_entropy(compute, mesh, of_logits, of(labels, {2, 3}), options, of_logits);
  column_linear_backward(compute, mesh, of_logits, of_x, of_w,
                         {.dx = of(got.dx, of_x.shape), .dw = of(got.dw, of_w.shape)});
  return got;
}
HeadLoss in_chunks(Compute& compute, const DeviceMesh& mesh, Head head, Numbers labels,
                   const VocabLossOptions& options, std::int64_t chunk, float before = 0) {
  const Chunk part = vocab_part(mesh, options.vocab);
  Floats w = head.part_of_w(part);
  HeadLoss got{0, Floats(head.x.size(), -1), Floats(w.size(), before)};
  const Shape of_x{2, 3, kDim}, of_w{part.size, kDim};
  got.loss = vocab_parallel_linear_cross_entropy(
      compute, mesh, of(head.x, of_x), of(w, of_w), of(labels, {2, 3}), options,
      {.dx = of(got.dx, of_x), .dw = of(got.dw, of_w), .accumulate = before != 0}, chunk);
  return got;
}

TEST(VocabParallel, TheLossInChunksIsTheLossOfAllLogits) {
  for (const std::int64_t vocab : kVocabs) {
    const Head head(vocab);
    const Case whole(vocab);  // for its labels
    for (const int ranks : kRankCounts)
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        Compute compute(rank.context);
        const VocabLossOptions options{
            .vocab = vocab, .valid = 5, .label_smoothing = 0.1, .scale = 2, .z_loss = 1e-2};
        const HeadLoss all = with_all_logits(compute, mesh, head, whole.labels, options);
        for (const std::int64_t chunk : {1, 2, 4, 6, 100}) {
          SCOPED_TRACE(testing::Message() << "vocab " << vocab << ", chunk " << chunk);
          const HeadLoss got = in_chunks(compute, mesh, head, whole.labels, options, chunk);
          EXPECT_EQ(got.dx, all.dx);
          EXPECT_NEAR(got.loss, all.loss, chunk < kTokens ? 1e-14 * all.loss : 0.0);
          const HeadLoss added = in_chunks(compute, mesh, head, whole.labels, options, chunk, 1);
          for (std::size_t i = 0; i < got.dw.size(); ++i) {
            ASSERT_NEAR(got.dw[i], all.dw[i], chunk < kTokens ? 1e-6 : 0.0) << i;
            ASSERT_NEAR(added.dw[i], 1 + all.dw[i], 1e-6) << i;
          }
        }
        // Without gradients, only the loss.
        Floats x = head.x, w = head.part_of_w(vocab_part(mesh, vocab));
        Numbers labels = whole.labels;
        EXPECT_NEAR(vocab_parallel_linear_cross_entropy(compute, mesh, of(x, {kTokens, kDim}),
                                                        of(w, {vocab_part(mesh, vocab).size, kDim}),
                                                        of(labels, {kTokens}), options, {}, 4),
                    all.loss, 1e-14 * all.loss);
      });
  }
}

// Against plain loops in f64.
TEST(VocabParallel, TheLossInChunksIsTheFormula) {
  constexpr std::int64_t kVocab = 61;
  const Head head(kVocab);
  Case whole(kVocab);
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t j = 0; j < kVocab; ++j) {
      double sum = 0;
      for (std::int64_t i = 0; i < kDim; ++i)
        sum += static_cast<double>(head.x[static_cast<std::size_t>(t * kDim + i)]) *
               static_cast<double>(head.w[static_cast<std::size_t>(j * kDim + i)]);
      whole.logits[static_cast<std::size_t>(t * kVocab + j)] = static_cast<float>(sum);
    }
  std::vector<double> gradient, dx(head.x.size()), dw(head.w.size());
  const double expected = whole.loss(5, 0.1, &gradient, 1e-2);
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t j = 0; j < kVocab; ++j)
      for (std::int64_t i = 0; i < kDim; ++i) {
        const auto of_x = static_cast<std::size_t>(t * kDim + i),
                   of_w = static_cast<std::size_t>(j * kDim + i);
        const double d = gradient[static_cast<std::size_t>(t * kVocab + j)];
        dx[of_x] += d * static_cast<double>(head.w[of_w]);
        dw[of_w] += d * static_cast<double>(head.x[of_x]);
      }
  for (const int ranks : kRankCounts)
    test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
      Compute compute(rank.context);
      const VocabLossOptions options{.vocab = kVocab, .valid = 5, .label_smoothing = 0.1, .z_loss = 1e-2};
      const HeadLoss got = in_chunks(compute, mesh, head, whole.labels, options, 4);
      EXPECT_NEAR(got.loss, expected, 1e-6 * expected);
      for (std::size_t i = 0; i < dx.size(); ++i) ASSERT_NEAR(got.dx[i], dx[i], 1e-6) << i;
      const auto first = static_cast<std::size_t>(vocab_part(mesh, kVocab).offset * kDim);
      for (std::size_t i = 0; i < got.dw.size(); ++i) ASSERT_NEAR(got.dw[i], dw[first + i], 1e-6) << i;
    });
}

// x and w in bf16: dw is rounded once, not once for each chunk, so it is that of all tokens.
TEST(VocabParallel, TheLossInChunksOfBf16) {
  constexpr std::int64_t kVocab = 61;
  const Head head(kVocab);
  const Case whole(kVocab);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
    Compute compute(rank.context);
    const Chunk part = vocab_part(mesh, kVocab);
    const Floats part_of_w = head.part_of_w(part);
    std::vector<bf16> x(head.x.begin(), head.x.end()), w(part_of_w.begin(), part_of_w.end());
    Numbers labels = whole.labels;
    const VocabLossOptions options{.vocab = kVocab, .valid = 5};
    const auto with = [&](std::int64_t chunk, std::vector<bf16>& dx, std::vector<bf16>& dw) {
      return vocab_parallel_linear_cross_entropy(
          compute, mesh, of(x, {kTokens, kDim}), of(w, {part.size, kDim}), of(labels, {kTokens}), options,
          {.dx = of(dx, {kTokens, kDim}), .dw = of(dw, {part.size, kDim})}, chunk);
    };
    std::vector<bf16> dx(x.size()), dw(w.size()), dx_of_all(x.size()), dw_of_all(w.size());
    const double loss = with(2, dx, dw), loss_of_all = with(kTokens, dx_of_all, dw_of_all);
    EXPECT_NEAR(loss, loss_of_all, 1e-14 * loss);
    // By three functions, with logits in f32 and their gradient in bf16.
    Floats logits(static_cast<std::size_t>(kTokens * part.size));
    std::vector<bf16> dlogits(logits.size()), dx_plain(x.size()), dw_plain(w.size());
    const Shape shape{kTokens, part.size};
    column_linear_forward(compute, of(x, {kTokens, kDim}), of(w, {part.size, kDim}), {}, of(logits, shape));
    EXPECT_EQ(vocab_parallel_cross_entropy(compute, mesh, of(logits, shape), of(labels, {kTokens}), options,
                                           of(dlogits, shape)),
              loss_of_all);
    column_linear_backward(compute, mesh, of(dlogits, shape), of(x, {kTokens, kDim}),
                           of(w, {part.size, kDim}),
                           {.dx = of(dx_plain, {kTokens, kDim}), .dw = of(dw_plain, {part.size, kDim})});
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(dx[i].bits, dx_plain[i].bits) << i;
      EXPECT_EQ(dx_of_all[i].bits, dx_plain[i].bits) << i;
    }
    for (std::size_t i = 0; i < w.size(); ++i) {
      EXPECT_EQ(dw_of_all[i].bits, dw_plain[i].bits) << i;
      const auto want = static_cast<float>(dw_plain[i]);
      EXPECT_NEAR(static_cast<float>(dw[i]), want, std::abs(want) * 0x1p-7 + 1e-7) << i;
    }
  });
}

// The largest sum of bytes that a rank holds besides its arguments.
TEST(VocabParallel, TheLossInChunksHasTheLogitsOfOneChunk) {
  constexpr std::int64_t kMany = 2048, kVocab = 512, kChunk = 64;
  for (const int ranks : {1, 2}) {
    test::CountingAllocator memory;
    test::RankOptions rank_options;
    rank_options.context.allocator = memory.functions();
    test::run_ranks(
        Ranks::threads, ranks,
        [&](Rank& rank) {
          const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
          Compute compute(rank.context);
          const std::int64_t part = vocab_part(mesh, kVocab).size;
          Floats x(kMany * kDim, 0.5f), w(static_cast<std::size_t>(part * kDim), 0.25f), dx(x.size()),
              dw(w.size());
          Numbers labels(kMany, 3);
          const TensorView of_x = of(x, {kMany, kDim}), of_w = of(w, {part, kDim}),
                           of_dx = of(dx, of_x.shape), of_dw = of(dw, of_w.shape);
          const VocabLossOptions options{.vocab = kVocab, .valid = kMany};
          const auto peak = [&](const auto& call) {
            rank.group().barrier().wait();
            const std::size_t before = memory.bytes();
            if (rank.rank == 0) memory.take_peak();
            rank.group().barrier().wait();
            call();
            rank.group().barrier().wait();
            std::int64_t most = 0;
            if (rank.rank == 0) most = static_cast<std::int64_t>(memory.take_peak() - before) / rank.size;
            rank.group().barrier().wait();
            return most;
          };
          const auto in_chunks = [&] {
            vocab_parallel_linear_cross_entropy(compute, mesh, of_x, of_w, of(labels, {kMany}), options,
                                                {.dx = of_dx, .dw = of_dw}, kChunk);
          };
          in_chunks();  // the kernels take the memory that they keep
          const std::int64_t chunked = peak(in_chunks);
          const std::int64_t plain = peak([&] {
            const Tensor logits = compute.make({kMany, part}), dlogits = compute.make({kMany, part});
            column_linear_forward(compute, of_x, of_w, {}, logits.view());
            vocab_parallel_cross_entropy(compute, mesh, logits.view(), of(labels, {kMany}), options,
                                         dlogits.view());
            column_linear_backward(compute, mesh, dlogits.view(), of_x, of_w, {.dx = of_dx, .dw = of_dw});
          });
          const std::int64_t of_logits = kMany * part * 4, of_chunk = kChunk * part * 4;
          if (rank.rank != 0) return;
          EXPECT_GE(plain, 2 * of_logits);
          EXPECT_GE(chunked, of_chunk);
          // Four f64 a token, where labels are checked; and what a chunk has besides its logits.
          EXPECT_LE(chunked, of_chunk + kMany * 32 + 64 * 1024);
        },
        rank_options);
  }
}

TEST(VocabParallel, WhatIsWrongWithALossInChunksIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    const std::int64_t vocab = 8, part = 4;
    const bool odd = rank.rank == 1;
    Floats x(kTokens * kDim), w(static_cast<std::size_t>(part * kDim)), dx(x.size()), dw(w.size());
    const auto text = [&](Numbers labels, std::int64_t chunk, const VocabLossOptions& options,
                          const LinearLossGradients& g = {}) {
      const Error e = error_of([&] {
        vocab_parallel_linear_cross_entropy(compute, mesh, of(x, {kTokens, kDim}), of(w, {part, kDim}),
                                            of(labels, {kTokens}), options, g, chunk);
      });
      return std::string(name(e.code())) + ": " + e.what();
    };
    const std::string function = "vocab_parallel_linear_cross_entropy: ",
                      argument = "bad_argument: " + function;
    const Numbers good(kTokens, 1);
    const VocabLossOptions options{.vocab = vocab, .valid = kTokens};
    EXPECT_EQ(text(good, 0, options), argument + "chunk is 0; expected 1 token or more");
    EXPECT_EQ(text(good, 2, {.vocab = vocab, .valid = kTokens, .z_loss = -1}),
              argument + "z_loss is -1; expected a finite number of 0 or more");
    EXPECT_EQ(text(good, 2, options, {.dx = of(dx, {kDim, kTokens})}),
              argument + "dx is (5, 6); expected (6, 5), from x (6, 5)");
    EXPECT_EQ(text(good, 2, options, {.dx = of(x, {kTokens, kDim})}),
              argument + "dx overlaps x; expected memory of its own");
    EXPECT_EQ(text(good, 2, {.vocab = 11, .valid = kTokens}),
              argument + (odd ? "w is (4, 5); expected (5, 5), entries 6 to 10 of 11"
                              : "w is (4, 5); expected (6, 5), entries 0 to 5 of 11"));
    EXPECT_EQ(text(good, odd ? 2 : 3, options),
              "mismatch: " + function + "argument 6 is chunk 3 on tp rank 0, but chunk 2 on tp rank 1");
    EXPECT_EQ(text(good, 2, options,
                   odd ? LinearLossGradients{.dx = of(dx, {kTokens, kDim})} : LinearLossGradients{}),
              "mismatch: " + function + "argument 7 is no dx on tp rank 0, but a dx on tp rank 1");
    Numbers outside = good;
    outside[4] = 8;  // in the last chunk; and it is found before anything is sent
    EXPECT_EQ(text(outside, 2, options),
              "bad_argument: cross_entropy: token 4 has target 8; expected 0 <= target < 8 (vocab) or -100");
    rank.group().barrier().wait();  // the group is as it was
  });
}

// --- embedding

TEST(VocabParallel, EmbeddingIsThatOfOneRank) {
  for (const std::int64_t vocab : kVocabs)
    for (const int ranks : kRankCounts)
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        Compute compute(rank.context);
        Floats table(static_cast<std::size_t>(vocab * kDim)), dy(kTokens * kDim);
        for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i) + 0.5f;
        for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(i * i % 7);
        Numbers tokens;
        for (std::int64_t t = 0; t < kTokens; ++t) tokens.push_back((t * t + vocab - 1) % vocab);
        const Chunk part = vocab_part(mesh, vocab);
        const Shape of_tokens{3, 2}, of_y{3, 2, kDim}, of_w{part.size, kDim};
        Floats w(table.begin() + part.offset * kDim, table.begin() + (part.offset + part.size) * kDim),
            y(dy.size(), -1), own(dy.size(), -1), dw(w.size(), -1);
        vocab_parallel_embedding_forward(compute, mesh, vocab, of(tokens, of_tokens), of(w, of_w),
                                         of(y, of_y));
        vocab_parallel_embedding_forward(compute, mesh, vocab, of(tokens, of_tokens), of(w, of_w),
                                         of(own, of_y), false);
        vocab_parallel_embedding_backward(compute, mesh, vocab, of(tokens, of_tokens), of(dy, of_y),
                                          of(dw, of_w));
        Floats dtable(table.size());
        for (std::size_t t = 0; t < tokens.size(); ++t)
          for (std::size_t i = 0; i < kDim; ++i) {
            const auto row = static_cast<std::size_t>(tokens[t]);
            const bool here = tokens[t] >= part.offset && tokens[t] < part.offset + part.size;
            EXPECT_EQ(y[t * kDim + i], table[row * kDim + i]);
            EXPECT_EQ(own[t * kDim + i], here ? table[row * kDim + i] : 0.0f);
            dtable[row * kDim + i] += dy[t * kDim + i];
          }
        const Floats expected(dtable.begin() + part.offset * kDim,
                              dtable.begin() + (part.offset + part.size) * kDim);
        EXPECT_EQ(dw, expected);
        vocab_parallel_embedding_backward(compute, mesh, vocab, of(tokens, of_tokens), of(dy, of_y),
                                          of(dw, of_w), true);
        for (std::size_t i = 0; i < dw.size(); ++i) EXPECT_EQ(dw[i], 2 * expected[i]);
        // The table and the results in bf16.
        std::vector<bf16> narrow_w(w.begin(), w.end()), narrow_y(y.size()), narrow_dw(w.size());
        vocab_parallel_embedding_forward(compute, mesh, vocab, of(tokens, of_tokens), of(narrow_w, of_w),
                                         of(narrow_y, of_y));
        vocab_parallel_embedding_backward(compute, mesh, vocab, of(tokens, of_tokens), of(dy, of_y),
                                          of(narrow_dw, of_w));
        for (std::size_t i = 0; i < y.size(); ++i)
          EXPECT_EQ(static_cast<float>(narrow_y[i]), static_cast<float>(bf16(y[i])));
        for (std::size_t i = 0; i < w.size(); ++i) EXPECT_EQ(static_cast<float>(narrow_dw[i]), expected[i]);
      });
}

// --- what is wrong

TEST(VocabParallel, TokensAndLabelsOutsideAreNamedOnEveryRank) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 3}});
    Compute compute(rank.context);
    const Chunk part = vocab_part(mesh, 8);
    Numbers numbers{0, 7, 8, 1};
    Floats logits(static_cast<std::size_t>(4 * part.size)), w(static_cast<std::size_t>(part.size * 2)), y(8);
    const auto text = [](const auto& call) {
      const Error e = error_of(call);
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      return std::string(e.what());
    };
    EXPECT_EQ(text([&] {
                vocab_parallel_cross_entropy(compute, mesh, of(logits, {4, part.size}), of(numbers, {4}),
                                             {.vocab = 8, .valid = 4});
              }),
              "cross_entropy: token 2 has target 8; expected 0 <= target < 8 (vocab) or -100");
    const std::string embedding = "embedding: token 2 has id 8; expected 0 <= id < 8 (vocab)";
    EXPECT_EQ(text([&] {
                vocab_parallel_embedding_forward(compute, mesh, 8, of(numbers, {4}), of(w, {part.size, 2}),
                                                 of(y, {4, 2}));
              }),
              embedding);
    EXPECT_EQ(text([&] {
                vocab_parallel_embedding_backward(compute, mesh, 8, of(numbers, {4}), of(y, {4, 2}),
                                                  of(w, {part.size, 2}));
              }),
              embedding);
    rank.group().barrier().wait();  // the group is as it was
  });
}

// Without the comparison each rank would continue with its own loss and gradients.
TEST(VocabParallel, WhatOneRankGivesOtherwiseIsAnErrorOfAll) {
  test::run_ranks(Ranks::processes, 3, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 3}});
    Compute compute(rank.context);
    const Chunk part = vocab_part(mesh, 8);
    Floats logits(static_cast<std::size_t>(4 * part.size));
    const bool odd = rank.rank == 1;
    const auto loss = [&](Numbers labels, const VocabLossOptions& options, std::int64_t rows = 4) {
      const Error e = error_of([&] {
        vocab_parallel_cross_entropy(compute, mesh, of(logits, {rows, part.size}), of(labels, {4}), options);
      });
      return std::string(name(e.code())) + ": " + e.what();
    };
    const Numbers good{0, 7, 2, 1};
    EXPECT_EQ(loss(good, {.vocab = 8, .valid = odd ? 3 : 4}),
              "mismatch: vocab_parallel_cross_entropy: argument 1 is valid 4 on tp rank 0, but valid 3 on tp "
              "rank 1");
    EXPECT_EQ(loss(good, {.vocab = 8, .valid = 4, .label_smoothing = odd ? 0.2 : 0.1}),
              "mismatch: vocab_parallel_cross_entropy: argument 2 is label_smoothing 0.1 on tp rank 0, but "
              "label_smoothing 0.2 on tp rank 1");
    EXPECT_EQ(loss(good, {.vocab = 8, .valid = 4, .scale = odd ? 2.0 : 1.0}),
              "mismatch: vocab_parallel_cross_entropy: argument 3 is scale 1 on tp rank 0, but scale 2 on tp "
              "rank 1");
    EXPECT_EQ(
        loss(good, {.vocab = 8, .valid = 4, .z_loss = odd ? 1e-4 : 0.0}),
        "mismatch: vocab_parallel_cross_entropy: argument 5 is z_loss 0 on tp rank 0, but z_loss 0.0001 "
        "on tp rank 1");
    const std::string labels = loss(odd ? Numbers{0, 7, 2, 3} : good, {.vocab = 8, .valid = 4});
    EXPECT_EQ(labels.find("mismatch: vocab_parallel_cross_entropy: argument 4 is 4 labels with digest "), 0u)
        << labels;
    const std::string outside =
                          "cross_entropy: token 1 has target 9; expected 0 <= target < 8 (vocab) or -100",
                      told = "vocab_parallel_cross_entropy: tp rank 1 failed: ";
    EXPECT_EQ(loss(odd ? Numbers{0, 9, 2, 1} : good, {.vocab = 8, .valid = 4}),
              "bad_argument: " + (odd ? "" : told) + outside);
    if (part.size > 0) {
      EXPECT_EQ(loss(good, {.vocab = 8, .valid = 4}, odd ? 3 : 4).find("bad_argument: " + (odd ? "" : told)),
                0u);
    }
    Floats w(static_cast<std::size_t>(part.size * 2)), y(8);
    const auto embed = [&](Numbers tokens) {
      const Error e = error_of([&] {
        vocab_parallel_embedding_forward(compute, mesh, 8, of(tokens, {4}), of(w, {part.size, 2}),
                                         of(y, {4, 2}));
      });
      return std::string(name(e.code())) + ": " + e.what();
    };
    EXPECT_EQ(embed(odd ? Numbers{0, 7, 2, 3} : good)
                  .find("mismatch: vocab_parallel_embedding_forward: argument 1 is 4 tokens with digest "),
              0u);
    EXPECT_EQ(embed(odd ? Numbers{0, 9, 2, 1} : good),
              std::string("bad_argument: ") +
                  (odd ? "" : "vocab_parallel_embedding_forward: tp rank 1 failed: ") +
                  "embedding: token 1 has id 9; expected 0 <= id < 8 (vocab)");
    Numbers again = good;
    const double l = vocab_parallel_cross_entropy(compute, mesh, of(logits, {4, part.size}), of(again, {4}),
                                                  {.vocab = 8, .valid = 4});
    EXPECT_NEAR(l, std::log(8.0), 1e-6);  // the group is as it was
  });
}

class VocabArguments : public ::testing::Test {
 protected:
  std::string text(const std::function<void()>& call) {
    const Error e = error_of(call);
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return e.what();
  }
  std::string loss(const TensorView& logits, const TensorView& labels, const VocabLossOptions& options,
                   const TensorView& dlogits = {}) {
    return text([&] { vocab_parallel_cross_entropy(compute, mesh, logits, labels, options, dlogits); });
  }
  std::string forward(const TensorView& tokens, const TensorView& w, const TensorView& y,
                      std::int64_t vocab = 5) {
    return text([&] { vocab_parallel_embedding_forward(compute, mesh, vocab, tokens, w, y); });
  }
  Context context;
  Compute compute{context};
  DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 2}}, 1);  // its part: 3 and 4 of 5
  Floats scores = Floats(6), table = Floats(8), rows = Floats(12), more = Floats(12);
  Numbers numbers = Numbers(3);
};

TEST_F(VocabArguments, OfTheLossAreNamed) {
  const VocabLossOptions good{.vocab = 5, .valid = 3};
  const TensorView x = of(scores, {3, 2}), l = of(numbers, {3});
  EXPECT_EQ(
      loss(of(scores, {2, 3}), l, good),
      "vocab_parallel_cross_entropy: logits is (2, 3); expected (3, 2), from labels (3) and entries 3 to "
      "4 of 5");
  EXPECT_EQ(loss(l, l, good), "vocab_parallel_cross_entropy: logits is i64; expected f32 or bf16");
  EXPECT_EQ(loss(x, of(scores, {3}), good), "vocab_parallel_cross_entropy: labels is f32; expected i64");
  EXPECT_EQ(loss(x, l, good, of(more, {2, 3})),
            "vocab_parallel_cross_entropy: dlogits is (2, 3); expected (3, 2), from logits (3, 2)");
  TensorView shifted = of(scores, {1, 2});
  shifted.data += 4;
  EXPECT_EQ(loss(of(scores, {1, 2}), of(numbers, {1}), good, shifted),
            "vocab_parallel_cross_entropy: dlogits overlaps logits; expected memory of its own");
  EXPECT_EQ(
      loss(x, l, {.vocab = 5}),
      "vocab_parallel_cross_entropy: valid is 0; expected the number of valid labels of the whole batch, "
      "more than 0");
  EXPECT_EQ(loss(x, l, {.vocab = -5, .valid = 3}),
            "vocab_parallel_cross_entropy: vocab is -5; expected 0 or more");
  EXPECT_EQ(loss(x, l, {.vocab = 5, .valid = 3, .label_smoothing = 1.5}),
            "vocab_parallel_cross_entropy: label_smoothing is 1.5; expected 0 to 1");
  EXPECT_EQ(loss(x, l, {.vocab = 5, .valid = 3, .scale = INFINITY}),
            "vocab_parallel_cross_entropy: scale is inf; expected a finite number");
  EXPECT_EQ(text([&] { CrossEntropy(-0.1); }), "cross entropy: label_smoothing is -0.1; expected 0 to 1");
}

TEST_F(VocabArguments, OfTheEmbeddingAreNamed) {
  const TensorView t = of(numbers, {3}), w = of(table, {2, 4}), y = of(rows, {3, 4});
  EXPECT_EQ(forward(of(scores, {3}), w, y), "vocab_parallel_embedding_forward: tokens is f32; expected i64");
  EXPECT_EQ(forward(t, of(table, {3, 2}), y),
            "vocab_parallel_embedding_forward: w is (3, 2); expected (2, 2), entries 3 to 4 of 5");
  EXPECT_EQ(forward(t, of(table, {8}), y),
            "vocab_parallel_embedding_forward: w is (8); expected (part, dim)");
  EXPECT_EQ(forward(t, w, of(rows, {4, 3})),
            "vocab_parallel_embedding_forward: y is (4, 3); expected (3, 4), from tokens (3) and w (2, 4)");
  EXPECT_EQ(forward(t, of(rows, {2, 4}), y),
            "vocab_parallel_embedding_forward: y overlaps w; expected memory of its own");
  EXPECT_EQ(
      text([&] {
        vocab_parallel_embedding_backward(compute, mesh, 5, t, of(rows, {4, 3}), w);
      }),
      "vocab_parallel_embedding_backward: dy is (4, 3); expected (3, 4), from tokens (3) and dw (2, 4)");
  EXPECT_EQ(text([&] { vocab_part({}, 5); }),
            "vocab_part: axes is an empty DeviceMesh, made by default or moved from");
}

}  // namespace
}  // namespace weft::vocab_test
