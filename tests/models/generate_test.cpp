// Text from a model: tokens with and without a key/value cache, on each mesh, against a plain loop over whole
// passes.
#include "weft/models/generate.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "base/cpu/isa.hpp"
#include "support/run_ranks.hpp"
#include "weft/models/trainer.hpp"
#include "weft/nn/key_value_cache.hpp"

namespace weft::generate_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 32, c.layers = 2, c.heads = 8, c.kv_heads = 2, c.ffn_hidden = 48, c.vocab = 40, c.max_seq = 96;
  c.init_std = 0.3;
  return c;
}

struct Model {
  Model(Rank& rank, const MeshShape& shape, BuildOptions options = {})
      : compute(rank.context), mesh(rank.group(), shape), built(build(std::move(options))) {}
  ParallelModel build(BuildOptions options) {
    options.seed = 5;
    return build_parallel_model(small(), mesh, compute, options);
  }
  std::vector<TokenList> tokens(std::span<const TokenList> prompts, const GenerateOptions& options) {
    std::vector<TokenList> lists;
    for (Generated& g : generate(built, compute, prompts, options)) lists.push_back(std::move(g.tokens));
    return lists;
  }
  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
};

std::vector<TokenList> some_prompts() {
  return {{3, 1, 4, 1, 5, 9, 2}, {6}, {5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4}};
}

// The next token again and again, each from the logits of the whole sample.
TokenList by_hand(Model& model, TokenList sample, const GenerateOptions& options, std::size_t prompt) {
  const std::size_t length = sample.size();
  for (std::int64_t i = 0; i < options.new_tokens; ++i) {
    const auto count = static_cast<std::int64_t>(sample.size());
    const Tensor logits = compute_logits(model.built, model.compute, {sample.data(), nullptr, 1, count, 0});
    float two[2];
    RandomStream(options.seed, fmt::format("generate/{}", prompt)).uniform(2 * sample.size(), 2, two);
    sample.push_back(
        choose_token(logits.f32().subspan(static_cast<std::size_t>((count - 1) * 40), 40), options,
                     static_cast<double>(two[0]) + std::ldexp(static_cast<double>(two[1]), -24)));
  }
  return {sample.begin() + static_cast<std::ptrdiff_t>(length), sample.end()};
}

TEST(Generate, GivesTheTokensOfWholePassesWithAndWithoutCache) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Model model(rank, {{"dp", 1}, {"tp", 1}});
    const std::vector<TokenList> prompts = some_prompts();
    for (const double temperature : {0.0, 1.0}) {
      GenerateOptions options{
          .new_tokens = 20, .temperature = temperature, .top_k = 9, .top_p = 0.9, .seed = 7};
      std::vector<TokenList> expected;
      for (std::size_t p = 0; p < prompts.size(); ++p)
        expected.push_back(by_hand(model, prompts[p], options, p));
      EXPECT_EQ(model.tokens(prompts, options), expected) << temperature;
      options.cache = false;
      EXPECT_EQ(model.tokens(prompts, options), expected) << temperature;
    }
  });
}

TEST(KeyValueCache, PassesOverPartsHaveTheBitsOfOnePass) {
  if (cpu_isa() < CpuIsa::avx2)
    GTEST_SKIP() << "sums of attention in pieces have the bits of the whole with AVX2";
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool narrow : {false, true}) {
      if (narrow && dtype == DType::f32) continue;
      test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
        Model model(rank, {{"dp", 1}, {"tp", 2}},
                    {.dtype = dtype, .activations = narrow ? DType::bf16 : DType::f32});
        constexpr std::int64_t kRows = 2, kCount = 90;
        const Tensor all(rank.context, {kRows, kCount}, DType::i64);
        for (std::int64_t i = 0; i < kRows * kCount; ++i) all.as<std::int64_t>()[i] = i * i * 7 % 40;
        const auto pass = [&](std::int64_t first, std::int64_t count) {
          const Tensor part(rank.context, {kRows, count}, DType::i64);
          for (std::int64_t r = 0; r < kRows; ++r)
            std::copy_n(all.data_ptr<std::int64_t>() + r * kCount + first, count,
                        part.data_ptr<std::int64_t>() + r * count);
          Frame frame = Frame::inference(model.compute);
          return model.built.model->forward({model.built.place(part, kRows)}, frame)[0];
        };
        const Tensor whole = pass(0, kCount);
        KeyValueCache cache(*model.built.model, kCount);
        std::int64_t first = 0;
        for (const std::int64_t count : {5, 1, 1, 60, 1, 22}) {
          const Tensor part = pass(first, count);
          const std::int64_t vocab = part.shape().back();
          for (std::int64_t r = 0; r < kRows; ++r)
            ASSERT_EQ(std::memcmp(part.data_ptr<float>() + r * count * vocab,
                                  whole.data_ptr<float>() + (r * kCount + first) * vocab,
                                  static_cast<std::size_t>(count * vocab) * sizeof(float)),
                      0)
                << name(dtype) << narrow << ", positions " << first << " to " << first + count;
          first += count;
          ASSERT_EQ(cache.size(), first);
        }
        EXPECT_EQ(cache.bytes(), 2 * 2 * kRows * kCount * 4 * static_cast<std::int64_t>(sizeof(float)));
      });
    }
}

struct MeshCase {
  const char* name;
  MeshShape shape;
  BuildOptions options;
};
std::vector<MeshCase> mesh_cases() {
  BuildOptions sequence, vocabulary, divided;
  sequence.tensor.sequence_parallel = true;
  vocabulary.tensor.vocab = VocabSplit::shard;
  divided.data = DataForm::fsdp;
  return {{"tp", {{"dp", 1}, {"tp", 2}}, {}},        {"heads shared", {{"dp", 1}, {"tp", 4}}, {}},
          {"dp", {{"dp", 2}, {"tp", 1}}, {}},        {"more ranks than prompts", {{"dp", 4}, {"tp", 1}}, {}},
          {"sp", {{"dp", 1}, {"tp", 2}}, sequence},  {"vocab", {{"dp", 1}, {"tp", 2}}, vocabulary},
          {"fsdp", {{"dp", 2}, {"tp", 1}}, divided}, {"fsdp tp", {{"dp", 2}, {"tp", 2}}, divided}};
}

TEST(Generate, GivesTheTokensOfOneRankOnEachMesh) {
  const std::vector<TokenList> prompts = some_prompts();
  for (const Exact exact : {Exact::no, Exact::yes}) {
    GenerateOptions options{.new_tokens = 16, .temperature = exact == Exact::yes ? 1.0 : 0.0, .seed = 2};
    std::vector<TokenList> expected;
    test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
      expected = Model(rank, {{"dp", 1}, {"tp", 1}}, {.exact = exact}).tokens(prompts, options);
    });
    for (const MeshCase& c : mesh_cases())
      test::run_ranks(Ranks::threads, c.shape.size(), [&](Rank& rank) {
        BuildOptions build = c.options;
        build.exact = exact;
        EXPECT_EQ(Model(rank, c.shape, build).tokens(prompts, options), expected)
            << c.name << (exact == Exact::yes ? ", exact" : "");
      });
  }
}

TEST(Generate, StopsBehindAStopAndAtTheEndOfThePositions) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Model model(rank, {{"dp", 2}, {"tp", 1}});
    GenerateOptions options{.new_tokens = 1000, .temperature = 0};
    const std::vector<TokenList> prompts = some_prompts();
    const std::vector<TokenList> all = model.tokens(prompts, options);
    for (std::size_t p = 0; p < prompts.size(); ++p) EXPECT_EQ(prompts[p].size() + all[p].size(), 96U);
    options.stops = {{all[0][4], all[0][5]}, {all[2][2]}};
    std::map<std::int64_t, TokenList> seen;
    options.on_token = [&](std::int64_t prompt, std::int64_t token) { seen[prompt].push_back(token); };
    const std::vector<Generated> some = generate(model.built, model.compute, prompts, options);
    for (std::size_t p = 0; p < prompts.size(); ++p) {
      const TokenList& made = some[p].tokens;
      ASSERT_LE(made.size(), all[p].size());
      EXPECT_TRUE(std::equal(made.begin(), made.end(), all[p].begin())) << p;
      // by a search for the first end of a stop
      std::size_t end = all[p].size();
      for (const TokenList& stop : options.stops) {
        const auto at = std::search(all[p].begin(), all[p].end(), stop.begin(), stop.end());
        if (at != all[p].end())
          end = std::min(end, static_cast<std::size_t>(at - all[p].begin()) + stop.size());
      }
      EXPECT_EQ(made.size(), end) << p;
      EXPECT_EQ(some[p].stopped, end < all[p].size()) << p;
      if (seen.contains(static_cast<std::int64_t>(p))) {
        EXPECT_EQ(seen[static_cast<std::int64_t>(p)], made);
      }
    }
    EXPECT_EQ(seen.size(), rank.rank == 0 ? 2U : 1U);  // of three prompts the second rank has one

    // The same by a function.
    GenerateOptions by{.new_tokens = 1000, .temperature = 0};
    by.stop_when = [&](std::int64_t, std::span<const std::int64_t> made) {
      return std::ranges::any_of(options.stops, [&](const TokenList& stop) {
        return made.size() >= stop.size() && std::equal(stop.rbegin(), stop.rend(), made.rbegin());
      });
    };
    const std::vector<Generated> same = generate(model.built, model.compute, prompts, by);
    for (std::size_t p = 0; p < prompts.size(); ++p) {
      EXPECT_EQ(same[p].tokens, some[p].tokens);
      EXPECT_EQ(same[p].stopped, some[p].stopped);
    }
  });
}

TEST(Generate, TensorRanksStopTogether) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Model model(rank, {{"dp", 1}, {"tp", 2}});
    GenerateOptions options{.new_tokens = 8, .temperature = 0};
    options.stop_when = [&](std::int64_t, std::span<const std::int64_t> made) {
      return rank.rank == 1 && made.size() == 3;
    };
    EXPECT_THAT(error_of([&] { generate(model.built, model.compute, some_prompts(), options); }).what(),
                testing::HasSubstr("have chosen different tokens at position"));
  });
}

TEST(ChooseToken, DrawsByTheProbabilitiesThatAreKept) {
  const std::vector<float> logits{0.5F, 2.0F, -1.0F, 2.0F, 1.0F};  // the order is 1, 3, 4, 0, 2
  const auto shares = [&](const GenerateOptions& options) {
    std::vector<double> count(logits.size());
    constexpr int kDraws = 20'000;
    for (int i = 0; i < kDraws; ++i)
      count[static_cast<std::size_t>(choose_token(logits, options, (i + 0.5) / kDraws))] += 1.0 / kDraws;
    return count;
  };
  const auto expected = [&](double temperature, const std::vector<std::size_t>& kept) {
    std::vector<double> p(logits.size());
    double sum = 0;
    for (const std::size_t i : kept) sum += p[i] = std::exp(static_cast<double>(logits[i]) / temperature);
    for (double& x : p) x /= sum;
    return p;
  };
  const auto near = [&](const GenerateOptions& options, const std::vector<std::size_t>& kept) {
    EXPECT_THAT(shares(options),
                testing::Pointwise(testing::DoubleNear(1e-4), expected(options.temperature, kept)));
  };
  near({}, {0, 1, 2, 3, 4});
  near({.temperature = 0.3}, {0, 1, 2, 3, 4});
  near({.top_k = 3}, {1, 3, 4});
  near({.top_p = 0.75}, {1, 3});  // 0.371 and 0.371 are not 0.75; with 0.137 they are more
  near({.temperature = 2, .top_k = 4, .top_p = 0.7}, {1, 3, 4});
  EXPECT_EQ(choose_token(logits, {.temperature = 0}, 0.9), 1);  // of equal ones the lowest
  EXPECT_EQ(choose_token(logits, {.top_k = 1}, 0.9), 1);
  const std::vector<float> one{-std::numeric_limits<float>::infinity(), 3.0F};
  EXPECT_EQ(choose_token(one, {}, 0.999999), 1);
}

TEST(ChooseToken, RefusesWhatIsNoDistribution) {
  const std::vector<float> logits{1, 2};
  const auto text = [&](const GenerateOptions& options, double uniform = 0.5,
                        std::vector<float> of = {1, 2}) {
    return std::string(error_of([&] { choose_token(of, options, uniform); }).what());
  };
  EXPECT_THAT(text({.temperature = -1}),
              testing::HasSubstr("choose_token: temperature is -1; expected 0 or more"));
  EXPECT_THAT(text({.top_k = -1}), testing::HasSubstr("top_k is -1; expected 0 (all) or more"));
  EXPECT_THAT(text({.top_p = 0}), testing::HasSubstr("top_p is 0; expected more than 0, and 1 at most"));
  EXPECT_THAT(text({}, 1), testing::HasSubstr("uniform is 1; expected 0 or more, below 1"));
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  EXPECT_THAT(text({}, 0.5, {1, nan}), testing::HasSubstr("logit 1 is nan; expected a finite number"));
  EXPECT_THAT(text({}, 0.5, {inf}), testing::HasSubstr("logit 0 is inf; expected a finite number"));
  EXPECT_THAT(text({}, 0.5, {-inf}), testing::HasSubstr("no token has a probability above 0"));
  EXPECT_THAT(text({}, 0.5, {}), testing::HasSubstr("no token has a probability above 0"));
}

TEST(Generate, RefusesOnAllRanks) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Model model(rank, {{"dp", 2}, {"tp", 2}});
    const auto text = [&](std::vector<TokenList> prompts, const GenerateOptions& options) {
      return std::string(error_of([&] { generate(model.built, model.compute, prompts, options); }).what());
    };
    const TokenList good{1, 2};
    EXPECT_THAT(text({}, {}), testing::HasSubstr("generate: no prompt; expected 1 or more"));
    EXPECT_THAT(text({good, {}}, {}), testing::HasSubstr("prompt 1 is empty; expected 1 token or more"));
    EXPECT_THAT(text({{1, 40}}, {}), testing::HasSubstr("prompt 0[1] is 40; expected 0 to 39"));
    EXPECT_THAT(text({TokenList(96, 1)}, {}),
                testing::HasSubstr("prompt 0 has 96 tokens; expected at most 95, one below max_seq"));
    EXPECT_THAT(text({good}, {.new_tokens = 0}), testing::HasSubstr("new_tokens is 0; expected 1 or more"));
    EXPECT_THAT(text({good}, {.stops = {{}}}),
                testing::HasSubstr("stop 0 is empty; expected 1 token or more"));
    EXPECT_THAT(text({good}, {.temperature = -2}), testing::HasSubstr("generate: temperature is -2"));
    // one rank alone
    EXPECT_THAT(
        text({rank.rank == 2 ? TokenList{41} : good}, {}),
        testing::HasSubstr(rank.rank == 2 ? "prompt 0[0] is 41; expected 0 to 39"
                                          : "another rank was given prompts or options that do not fit; "
                                            "its own error says why"));
    EXPECT_THAT(
        text({rank.rank == 3 ? TokenList{2} : good}, {}),
        testing::HasSubstr("ranks were given different prompts or options; expected the same on all ranks"));
    EXPECT_THAT(text({good}, {.seed = rank.rank == 1 ? 5U : 4U}),
                testing::HasSubstr("ranks were given different prompts or options"));
    // a caller whose function throws on one data rank
    const bool throws = rank.rank < 2;
    GenerateOptions options{.new_tokens = 3};
    options.on_token = [&](std::int64_t, std::int64_t) {
      if (throws) throw Error(ErrorCode::bad_argument, "mine");
    };
    EXPECT_THAT(
        text({good, good}, options),
        testing::HasSubstr(throws ? "mine" : "another rank failed at position 2; its own error says why"));
    EXPECT_EQ(model.tokens({{good}}, {.new_tokens = 2})[0].size(), 2U);  // it goes on
    options.on_token = [&](std::int64_t, std::int64_t) {
      if (throws) throw std::runtime_error("mine");
    };
    if (throws)
      EXPECT_THROW(generate(model.built, model.compute, std::vector<TokenList>{good, good}, options),
                   std::runtime_error);
    else
      EXPECT_THAT(text({good, good}, options), testing::HasSubstr("another rank failed at position 2"));
    EXPECT_EQ(model.tokens({{good}}, {.new_tokens = std::numeric_limits<std::int64_t>::max()})[0].size(),
              94U);
  });
}

TEST(KeyValueCache, RefusesWhatItCannotKeep) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Model model(rank, {{"dp", 1}, {"tp", 1}});
    Module& transformer = *model.built.model;
    const auto text = [&](auto&& run) { return std::string(error_of(run).what()); };
    EXPECT_THAT(text([&] { KeyValueCache(transformer, 0); }),
                testing::HasSubstr("key/value cache: 0 positions; expected 1 or more"));
    EXPECT_THAT(text([&] { KeyValueCache(transformer, 97); }),
                testing::HasSubstr("97 positions; the rotary tables of \"layers.0.attention\" are for 96"));
    EXPECT_THAT(text([&] { KeyValueCache(transformer_of(model.built).norm, 4); }),
                testing::HasSubstr("the model has no Attention"));
    CrossAttention cross({.dim = 8, .heads = 2, .head_dim = 4});
    EXPECT_THAT(text([&] { KeyValueCache(cross, 4); }),
                testing::HasSubstr("reads other positions than those of an Attention"));
    KeyValueCache cache(transformer, 8);
    EXPECT_THAT(text([&] { KeyValueCache(transformer, 8); }),
                testing::HasSubstr("\"layers.0.attention\" has one already"));
    const auto pass = [&](Frame frame, std::int64_t rows, std::int64_t count) {
      transformer.forward({Tensor::zeros(rank.context, {rows, count}, DType::i64)}, frame);
    };
    EXPECT_THAT(
        text([&] { pass(Frame(model.compute, {.step = 0}), 1, 2); }),
        testing::HasSubstr("a key/value cache exists, and the pass keeps tensors for a backward pass; "
                           "expected Frame::inference"));
    pass(Frame::inference(model.compute), 2, 6);
    EXPECT_THAT(text([&] { pass(Frame::inference(model.compute), 2, 3); }),
                testing::HasSubstr("6 positions are known, and 3 more come; expected at most 8 in all"));
    EXPECT_THAT(text([&] { pass(Frame::inference(model.compute), 1, 1); }),
                testing::HasSubstr("1 samples; expected 2, as in the passes before"));
    cache.clear();
    pass(Frame::inference(model.compute), 3, 8);  // other samples after clear()
    EXPECT_EQ(cache.size(), 8);
    transformer_of(model.built).block(1).attention.remember(nullptr);
    cache.clear();
    pass(Frame::inference(model.compute), 3, 1);
    EXPECT_THAT(
        text([&] { cache.size(); }),
        testing::HasSubstr("\"layers.0.attention\" knows 1 positions, and \"layers.1.attention\" 0; after "
                           "a pass that throws, call clear()"));
  });
}

}  // namespace
}  // namespace weft::generate_test
