// Rows travel to their experts and back, whatever is routed, and all ranks make the same calls.
#include "weft/ep/dispatch.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "support/calls_made.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft::dispatch_test {
namespace {

using test::Rank;
using test::Ranks;
using Numbers = std::vector<std::int64_t>;

// A random routing, the same on all ranks: tokens of each rank, and the choices of all tokens.
struct Routing {
  Numbers tokens, first_experts;
  int top_k;
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
};

Routing random_routing(std::mt19937& random, int ranks) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Routing r;
  r.first_experts = {0};
  for (int i = 0; i < ranks; ++i) r.first_experts.push_back(r.first_experts.back() + 1 + below(3));
  const auto experts = static_cast<int>(r.first_experts.back());
  r.top_k = 1 + below(std::min(experts, 4));
  const int kind =
      below(6);  // any; one expert is liked by all; some are liked by none; tokens on one rank alone
  for (int i = 0; i < ranks; ++i) r.tokens.push_back(kind == 3 && i != 1 % ranks ? 0 : below(7));
  if (kind == 4) std::ranges::fill(r.tokens, 0);
  std::vector<std::int32_t> all(static_cast<std::size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t t = 0; t < std::accumulate(r.tokens.begin(), r.tokens.end(), std::int64_t{0}); ++t) {
    if (kind != 1)
      std::shuffle(all.begin(), kind == 2 && r.top_k < experts ? all.end() - 1 : all.end(), random);
    for (int k = 0; k < r.top_k; ++k) {
      const std::int32_t e = all[static_cast<std::size_t>(k)];
      r.experts.push_back(kind == 5 && below(2) == 0 ? ~e : e);
      r.weights.push_back(static_cast<float>(below(5)) - 2);
    }
  }
  return r;
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Whole numbers, exact in f32.
float element(std::int64_t token, std::int64_t column) { return static_cast<float>(token * 10 + column); }

// Rows of random routings travel to their experts and back. `width`: of a row; `memory`: of what is sent.
void routings_travel(Rank& rank, int ranks, int times, std::int64_t kWidth, Memory memory) {
  Compute compute(rank.context);
  std::mt19937 random(17);
  for (int i = 0; i < times; ++i) {
    SCOPED_TRACE("routing " + std::to_string(i));
    const Routing r = random_routing(random, ranks);
    const auto me = static_cast<std::size_t>(rank.rank);
    const std::int64_t first =
                           std::accumulate(r.tokens.begin(), r.tokens.begin() + rank.rank, std::int64_t{0}),
                       own = r.tokens[me];
    Tensor experts(rank.context, {own, r.top_k}, DType::i32), weights(rank.context, {own, r.top_k}),
        x(rank.context, {own, kWidth}, DType::f32, memory);
    std::copy_n(r.experts.begin() + first * r.top_k, own * r.top_k, experts.as<std::int32_t>().begin());
    std::copy_n(r.weights.begin() + first * r.top_k, own * r.top_k, weights.f32().begin());
    for (std::int64_t t = 0; t < own; ++t)
      for (std::int64_t c = 0; c < kWidth; ++c)
        x.f32()[static_cast<std::size_t>(t * kWidth + c)] = element(first + t, c);
    const ExpertChoices choices = gather_choices(compute, rank.group(), experts, weights);
    ASSERT_TRUE(std::ranges::equal(choices.experts.as<std::int32_t>(), r.experts));
    ASSERT_EQ(choices.tokens, r.tokens);
    const TokenRoutes routes(choices, rank.rank, r.top_k, r.first_experts);

    // By expert, then by token, as on one rank.
    const Tensor came = routes.start_dispatch(compute, &rank.group(), x).finish();
    const Tensor rows(rank.context, came.shape(), DType::f32, memory);
    std::ranges::copy(came.f32(), rows.f32().begin());
    std::size_t row = 0;
    for (std::int64_t e = r.first_experts[me]; e < r.first_experts[me + 1]; ++e) {
      ASSERT_EQ(routes.offsets()[static_cast<std::size_t>(e - r.first_experts[me])],
                static_cast<std::int64_t>(row));
      for (std::size_t at = 0; at < r.experts.size(); ++at) {
        if (r.experts[at] != e) continue;
        for (std::int64_t c = 0; c < kWidth; ++c)
          ASSERT_EQ(rows.f32()[row * kWidth + static_cast<std::size_t>(c)],
                    element(static_cast<std::int64_t>(at) / r.top_k, c));
        ASSERT_EQ(routes.row_weights()[row], r.weights[at]);
        ++row;
      }
    }
    ASSERT_EQ(rows.size(0), static_cast<std::int64_t>(row));

    // Expert e adds e; what comes back is the sum of weight · (x + e).
    for (std::size_t e = 0; e + 1 < routes.offsets().size(); ++e)
      for (std::int64_t at = routes.offsets()[e] * kWidth; at < routes.offsets()[e + 1] * kWidth; ++at)
        rows.f32()[static_cast<std::size_t>(at)] +=
            static_cast<float>(r.first_experts[me] + static_cast<std::int64_t>(e));
    const Tensor results = routes.start_combine(compute, &rank.group(), rows).finish();
    const Tensor y(rank.context, {own, kWidth}), dweights(rank.context, {own, r.top_k});
    routes.weighted_sum(results, weights.view(), y);
    routes.row_products(results, x, dweights);
    for (std::int64_t t = 0; t < own; ++t) {
      for (std::int64_t c = 0; c < kWidth; ++c) {
        float expected = 0;
        for (std::int64_t at = (first + t) * r.top_k; at < (first + t + 1) * r.top_k; ++at)
          if (const auto e = r.experts[static_cast<std::size_t>(at)]; e >= 0)
            expected +=
                r.weights[static_cast<std::size_t>(at)] * (element(first + t, c) + static_cast<float>(e));
        ASSERT_EQ(y.f32()[static_cast<std::size_t>(t * kWidth + c)], expected);
      }
      for (int k = 0; k < r.top_k; ++k) {
        const std::int32_t e = r.experts[static_cast<std::size_t>((first + t) * r.top_k + k)];
        double expected = 0;
        for (std::int64_t c = 0; e >= 0 && c < kWidth; ++c)
          expected += static_cast<double>(element(first + t, c)) *
                      static_cast<double>(element(first + t, c) + static_cast<float>(e));
        ASSERT_EQ(dweights.f32()[static_cast<std::size_t>(t * r.top_k + k)], static_cast<float>(expected));
      }
    }
  }
}

TEST(Dispatch, AThousandRandomRoutings) {
  for (const int ranks : {1, 2, 3, 4})
    test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
      routings_travel(rank, ranks, 250, 3, Memory::local);
      if (ranks > 1) {
        // The recorder: this rank has made four calls for each routing, whatever was routed.
        EXPECT_EQ(test::calls_made(rank.group()), 1000);
        const std::string trace = rank.group().trace_json();
        EXPECT_EQ(occurrences(trace, "\"all_gather\""), 250);
        EXPECT_EQ(occurrences(trace, "\"all_gather_v\""), 250);
        EXPECT_EQ(occurrences(trace, "\"exchange\""), 500);
      }
      routings_travel(rank, ranks, 750, 3, Memory::local);
    });
}

// Rows of 2.4 KB: read in place from shared memory, packed from other memory; over gloo they are messages.
TEST(Dispatch, LongRowsOfEitherMemoryTravel) {
  for (const int ranks : {2, 3})
    test::run_ranks(Ranks::processes, ranks, [&](Rank& rank) {
      for (const Memory memory : {Memory::shared, Memory::local})
        routings_travel(rank, ranks, 60, 600, memory);
      rank.meet("over");
    });
}
#if WEFT_HAVE_GLOO
TEST(Dispatch, RowsTravelOverGloo) {
  test::RankOptions options;
  options.backend = "gloo";
  test::run_ranks(
      Ranks::threads, 3,
      [&](Rank& rank) {
        routings_travel(rank, 3, 40, 3, Memory::local);
        routings_travel(rank, 3, 10, 3000, Memory::shared);
      },
      options);
}
#endif

TEST(Dispatch, ATokenIsSentOnceToEachRank) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    // Each rank has one token, which chose three experts of the other rank and one of its own.
    const Tensor experts(rank.context, {1, 4}, DType::i32), weights(rank.context, {1, 4});
    for (std::size_t k = 0; k < 4; ++k) {
      experts.as<std::int32_t>()[k] =
          static_cast<std::int32_t>(k < 3 ? (1 - rank.rank) * 4 + static_cast<int>(k) : rank.rank * 4 + 3);
      weights.f32()[k] = 1;
    }
    const ExpertChoices choices = gather_choices(compute, rank.group(), experts, weights);
    const TokenRoutes routes(choices, rank.rank, 4, Numbers{0, 4, 8});
    EXPECT_EQ(routes.sent_rows(), 1);
    EXPECT_EQ(routes.received_rows(), 1);
    EXPECT_EQ(routes.rows(), 4);
  });
}

// Rows of eight bits are the values of the codes of each row, divided by its scale.
TEST(Dispatch, Float8RowsHoldWhatTheyRoundTo) {
  Context context;
  Compute compute(context);
  const Tensor x(context, {3, 20});
  std::mt19937 random(3);
  for (std::size_t i = 0; i < 60; ++i)
    x.f32()[i] = (static_cast<float>(random() % 2001) - 1000) * (i < 20 ? 1e-5f : i < 40 ? 0.0f : 1e4f);
  const Tensor rows = to_float8_rows(compute, x);
  EXPECT_EQ(rows.shape(), (Shape{3, 24}));
  const Tensor y = from_float8_rows(compute, rows, DType::f32),
               in_bf16 = from_float8_rows(compute, rows, DType::bf16);
  for (std::size_t i = 0; i < 60; ++i) {
    const std::size_t row = i / 20;
    float largest = 0;
    for (std::size_t c = 0; c < 20; ++c) largest = std::max(largest, std::abs(x.f32()[row * 20 + c]));
    // e4m3 has four significant bits, down to 2^-9 of the scaled values, whose largest is from 224 to 448.
    EXPECT_LE(std::abs(y.f32()[i] - x.f32()[i]),
              std::max(std::abs(x.f32()[i]) / 16, largest * 0x1p-10f / 224))
        << i;
    EXPECT_EQ(static_cast<float>(in_bf16.as<bf16>()[i]), y.f32()[i]);
  }
  // Values that were rounded once stay.
  EXPECT_TRUE(
      std::ranges::equal(from_float8_rows(compute, to_float8_rows(compute, y), DType::f32).f32(), y.f32()));
  EXPECT_EQ(to_float8_rows(compute, Tensor(context, {0, 20})).shape(), (Shape{0, 24}));
  test::expect_error(ErrorCode::bad_argument,
                     "from_float8_rows: rows is f32 (3, 20); expected u8 (rows, width + 4)",
                     [&] { return from_float8_rows(compute, x, DType::f32); });
}

TEST(Dispatch, RefusesByName) {
  Context context;
  const auto routes = [&](std::vector<std::int32_t> experts) {
    const auto count = static_cast<std::int64_t>(experts.size());
    const Tensor chosen(context, {count}, DType::i32), weights(context, {count});
    std::ranges::copy(experts, chosen.as<std::int32_t>().begin());
    const Numbers first{0, 4};
    return TokenRoutes({chosen, weights, {count / 2}}, 0, 2, first).rows();
  };
  EXPECT_EQ(routes({0, 3, 2, ~1}), 3);
  test::expect_error(ErrorCode::bad_argument, "token_routes: choice 1 of token 1 is expert 4; there are 4",
                     [&] {
                       return routes({0, 1, 2, 4});
                     });
  test::expect_error(ErrorCode::bad_argument, "token_routes: token 1 chose expert 2 twice", [&] {
    return routes({0, 1, 2, 2});
  });
  test::expect_error(ErrorCode::bad_argument, "token_routes: 3 choices; expected 1 tokens x 2", [&] {
    return routes({0, 1, 2});
  });
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    const Tensor experts(rank.context, {0, rank.rank + 1}, DType::i32),
        weights(rank.context, {0, rank.rank + 1});
    test::expect_error(
        ErrorCode::mismatch,
        "gather_choices: tokens choose 1 experts on rank 0 and 2 on rank 1; expected the same on all "
        "ranks",
        [&] { return gather_choices(compute, rank.group(), experts, weights).tokens; });
  });
}

// Rank 1 is killed, or stopped, in the middle of a dispatch. The others name it: at once, or when the
// deadline is over.
void expect_named(bool killed) {
  test::RankOptions options;
  if (!killed) options.deadline = std::chrono::milliseconds(700);
  test::RankProcesses ranks(
      3,
      [&](Rank& rank) {
        Compute compute(rank.context);
        const Tensor experts(rank.context, {2, 1}, DType::i32), weights(rank.context, {2, 1}),
            x(rank.context, {2, 4});
        experts.as<std::int32_t>()[0] = 0, experts.as<std::int32_t>()[1] = 2;
        ProcessGroup& group = rank.group();
        group.barrier().wait();
        rank.meet("ready");
        const Error e = test::error_of([&] {
          for (;;) {
            const ExpertChoices choices = gather_choices(compute, group, experts, weights);
            const TokenRoutes routes(choices, rank.rank, 1, Numbers{0, 1, 2, 3});
            const Tensor rows = routes.start_dispatch(compute, &group, x).finish();
            routes.start_combine(compute, &group, rows).finish();
          }
          return 0;
        });
        if (rank.rank == 1) return;  // a stopped rank goes on when the others are gone
        EXPECT_EQ(e.code(), killed ? ErrorCode::peer_lost : ErrorCode::timeout) << e.what();
        EXPECT_EQ(test::ranks_of(e), std::vector<int>{1});
        rank.store->set("named by " + std::to_string(rank.rank), "1");
      },
      options);
  ranks.store().get("test/met/ready", Deadline::after(std::chrono::seconds(10)));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (killed)
    ranks[1].kill(SIGKILL);
  else
    ranks[1].stop();
  for (const char* by : {"named by 0", "named by 2"})
    EXPECT_NO_THROW(ranks.store().get(by, Deadline::after(std::chrono::seconds(10))));
  if (!killed) ranks[1].resume();
  ranks.finish({1});
}
TEST(Dispatch, AKilledRankIsNamed) { expect_named(true); }
TEST(Dispatch, AStoppedRankIsNamed) { expect_named(false); }

}  // namespace
}  // namespace weft::dispatch_test
