// Replacements of a bucket's all-reduce: bf16, a compression and a reduction of the program's own; and the
// errors on all ranks if a hook, or a reducer, fails on one rank.
#include "weft/dp/bucket_hook.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/dp/bucket_reducer.hpp"

namespace weft::bucket_hook_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

// Fractions that neither f32 nor bf16 has.
float number(int rank, std::size_t i, int step) {
  return (static_cast<float>(i) + 1) / (3 + static_cast<float>(rank)) * (step % 2 == 0 ? 1.0f : -1.0f);
}
float as_bf16(float x) { return static_cast<float>(bf16(x)); }

void fill(const TensorView& slot, int rank, int step) {
  const auto to = slot.as<float>();
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = number(rank, i, step);
}

// Each rank's contribution is rounded once, and sums of bf16 as often as there are ranks.
TEST(BucketHook, Bf16ReducesHalfTheBytes) {
  for (const int ranks : {1, 2, 3})
    for (const ReduceOp op : {ReduceOp(ReduceOp::sum), ReduceOp(ReduceOp::avg)})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
        BucketReducer reducer(
            mesh, {{"a", 5, DType::f32, op}, {"b", 1031, DType::f32, op}, {"empty", 0, DType::f32, op}},
            {.bucket_bytes = 64, .hook = bf16_hook(rank.context)});
        for (int step = 0; step < 3; ++step) {
          for (std::size_t i = 0; i < reducer.size(); ++i) {
            fill(reducer.slot(i), rank.rank, step);
            reducer.ready(i);
          }
          reducer.finish();
          for (std::size_t k = 0; k < reducer.size(); ++k) {
            const auto got = reducer.slot(k).as<float>();
            for (std::size_t i = 0; i < got.size(); ++i) {
              double sum = 0, magnitude = 0;
              for (int r = 0; r < ranks; ++r) {
                const double x =
                    static_cast<double>(ranks == 1 ? number(r, i, step) : as_bf16(number(r, i, step)));
                sum += x;
                magnitude += std::abs(x);
              }
              if (op == ReduceOp(ReduceOp::avg)) sum /= ranks, magnitude /= ranks;
              EXPECT_NEAR(got[i], sum, ranks == 1 ? 0 : 0x1p-8 * ranks * magnitude);
              if (ranks > 1) {
                EXPECT_EQ(got[i], as_bf16(got[i])) << "it was sent as bf16";
              }
            }
          }
        }
      });
}

// Gradients in bound memory are rounded, too. Buckets of dtypes other than f32 are reduced as they are.
TEST(BucketHook, Bf16TakesForeignMemoryAndLeavesOtherDtypes) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer reducer(mesh,
                          {{"small", 2}, {"large", 64}, {"double", 3, DType::f64}, {"half", 3, DType::bf16}},
                          {.bucket_bytes = 256, .hook = bf16_hook(rank.context)});
    std::vector<float> small(2), large(64);
    reducer.bind(0, view(small));
    reducer.bind(1, view(large));
    for (int step = 0; step < 2; ++step) {
      small[0] = large[0] = number(rank.rank, 0, step);
      reducer.slot(2).as<double>()[0] = 1.0 / (3 + rank.rank);
      reducer.slot(3).as<bf16>()[0] = bf16(2.0f);
      for (std::size_t i = 0; i < 4; ++i) reducer.ready(i);
      reducer.finish();
      const float sum = as_bf16(as_bf16(number(0, 0, step)) + as_bf16(number(1, 0, step)));
      EXPECT_EQ(small[0], sum);
      EXPECT_EQ(large[0], sum);
      EXPECT_EQ(reducer.slot(2).as<double>()[0], 1.0 / 3 + 1.0 / 4);
      EXPECT_EQ(static_cast<float>(reducer.slot(3).as<bf16>()[0]), 4.0f);
    }
  });
}

// Their buckets would be rounded into the same memory while it is sent.
TEST(BucketHook, Bf16OfTwoReducersIsAnError) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const BucketHook hook = bf16_hook(rank.context);
    BucketReducer first(mesh, {{"a", 1000}}, {.bucket_bytes = 64, .hook = hook});
    std::vector<float> memory(1000);
    for (int step = 0; step < 2; ++step) {
      BucketReducer second(mesh, {{"b", 1000}}, {.hook = hook});
      if (step == 1) first.bind(0, view(memory));  // its bucket moves
      for (float& x : first.slot(0).as<float>()) x = 1;
      first.ready(0);
      const Error e = error_of([&] {
        second.ready(0);
        second.finish();
      });
      const std::string why =
          "bf16_hook: bucket 0 belongs to another reducer than those before; expected a hook for each "
          "reducer, "
          "made "
          "by a call of bf16_hook()";
      // The rank that first learns from the other that the group has failed gets the same text.
      EXPECT_THAT(e.what(), testing::HasSubstr(why));
      first.finish();
      for (const float x : first.slot(0).as<float>()) EXPECT_EQ(x, 2.0f);
      rank.meet("step");
    }
  });
}

// Signs alone, as one byte each, with what was lost kept for the next step (J. Bernstein et al., "signSGD",
// 2018): compress, an all-gather, decompress.
TEST(BucketHook, ACompressionOfTheProgramsOwn) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 3}});
    struct Signs {
      std::vector<std::int8_t> own, all;
    };
    const auto signs = std::make_shared<Signs>();
    BucketHook hook{.name = "signs"};
    hook.start = [signs](const ReadyBucket& b) {
      const auto values = b.data.as<float>();
      signs->own.resize(values.size());
      signs->all.resize(values.size() * static_cast<std::size_t>(b.group.size()));
      for (std::size_t i = 0; i < values.size(); ++i) signs->own[i] = values[i] < 0 ? -1 : 1;
      return b.group.all_gather(view(signs->own), view(signs->all));
    };
    hook.finish = [signs](const ReadyBucket& b) {
      const auto values = b.data.as<float>();
      for (std::size_t i = 0; i < values.size(); ++i) {
        int sum = 0;
        for (std::size_t at = i; at < signs->all.size(); at += values.size()) sum += signs->all[at];
        values[i] = sum > 0 ? 1.0f : -1.0f;
      }
    };
    BucketReducer reducer(mesh, {{"w", 7}}, {.hook = hook});
    const auto slot = reducer.slot(0).as<float>();
    for (std::size_t i = 0; i < 7; ++i)  // the majority of the ranks
      slot[i] = (static_cast<int>(i) >> rank.rank & 1) != 0 ? -2.0f : 0.5f;
    reducer.ready(0);
    reducer.finish();
    for (std::size_t i = 0; i < 7; ++i)
      EXPECT_EQ(slot[i], __builtin_popcount(static_cast<unsigned>(i)) > 1 ? -1.0f : 1.0f);
  });
}

// A blocking hook, over several axes. Buckets arrive in their order, whichever gradient is ready first.
TEST(BucketHook, AReductionOfTheProgramsOwn) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp_replicate", 2}, {"tp", 1}, {"domain", 2}});
    std::vector<std::size_t> seen;
    std::vector<std::vector<std::size_t>> members;
    const BucketHook hook{.name = "mine", .start = [&](const ReadyBucket& b) {
                            seen.push_back(b.number);
                            members.emplace_back(b.members.begin(), b.members.end());
                            EXPECT_EQ(b.group.size(), 4);
                            b.group.all_reduce(b.data, b.data, {.op = b.op}).wait();
                            for (float& x : b.data.as<float>()) x *= 10;
                            return Work();
                          }};
    BucketReducer reducer(mesh[{"dp_replicate", "domain"}], {{"a", 2}, {"b", 3}, {"c", 40}, {"empty", 0}},
                          {.bucket_bytes = 100, .hook = hook});
    for (std::size_t k = 0; k < 4; ++k) {
      const std::size_t i = (k + static_cast<std::size_t>(rank.rank)) % 4;
      for (float& x : reducer.slot(i).as<float>()) x = static_cast<float>(rank.rank + 1);
      reducer.ready(i);
    }
    reducer.finish();
    for (std::size_t i = 0; i < 4; ++i)
      for (const float x : reducer.slot(i).as<float>()) EXPECT_EQ(x, 100.0f);
    EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1}));
    EXPECT_EQ(members, (std::vector<std::vector<std::size_t>>{{0, 1}, {2}}));
    EXPECT_LE(reducer.posted_early(), 2);
  });
}

TEST(BucketHook, AHookThatThrowsOnOneRankKeepsNobodyWaiting) {
  for (const bool at_start : {true, false})
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"dp", 3}});
      const auto fail = [&] {
        if (rank.rank == 1) throw std::runtime_error("no more room");
      };
      BucketHook hook{.name = "top_k"};
      hook.start = [&](const ReadyBucket& b) {
        if (at_start) fail();
        return b.group.all_reduce(b.data, b.data);
      };
      hook.finish = [&](const ReadyBucket& b) {
        if (!at_start) fail();
        b.group.all_reduce(b.data, b.data).wait();
      };
      BucketReducer reducer(mesh, {{"w", 2}}, {.hook = hook});
      const auto began = std::chrono::steady_clock::now();
      const auto step = [&] {
        reducer.ready(0);
        reducer.finish();
      };
      if (rank.rank == 1) {
        EXPECT_THROW(step(), std::runtime_error);
        EXPECT_STREQ(error_of(step).what(), "bucket_reducer: an earlier reduction failed: no more room");
      } else {
        const Error e = error_of(step);
        EXPECT_EQ(e.code(), ErrorCode::aborted);
        EXPECT_THAT(e.what(), testing::HasSubstr("bucket_reducer: the hook \"top_k\" failed: no more room"));
      }
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
    });
}

TEST(BucketHook, WhatDoesNotFitIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const auto text = [&](const BucketHook& hook) {
      return std::string(error_of([&] { BucketReducer(mesh, {{"w", 2}}, {.hook = hook}); }).what());
    };
    EXPECT_EQ(text({.start = [](const ReadyBucket&) { return Work(); }}),
              "bucket_reducer: options.hook has no name");
    EXPECT_EQ(text({.name = "mine"}), "bucket_reducer: options.hook \"mine\" has no start");
    BucketOptions options;
    if (rank.rank == 1) options.hook = bf16_hook(rank.context);
    BucketReducer reducer(mesh, {{"w", 2}}, options);
    const Error e = error_of([&] { reducer.finish(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    const std::string same =
        "bucket_reducer: the reducer is number 0 with bucket_bytes 4194304, unused error and ";
    EXPECT_EQ(e.what(), same + (rank.rank == 0 ? "no hook on dp rank 0, but number 0 with bucket_bytes "
                                                 "4194304, unused error and another hook on dp rank 1"
                                               : "no hook on dp rank 0, but number 0 with bucket_bytes "
                                                 "4194304, unused error and the hook \"bf16\" on dp rank 1"));
  });
}

// --- what is wrong on one rank alone ---

test::RankOptions patient() {
  test::RankOptions options;
  options.deadline = std::chrono::seconds(60);
  return options;
}
void expect_soon(std::chrono::steady_clock::time_point began) {
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20)) << "long before the deadline";
}

// The other ranks get the error in their first step, and all ranks can continue with a new reducer.
TEST(BucketReducerFaults, AConstructorThatThrowsOnOneRankIsToldToAll) {
  test::run_ranks(
      Ranks::threads, 3,
      [](Rank& rank) {
        DeviceMesh mesh(rank.group(), {{"dp", 3}});
        const auto began = std::chrono::steady_clock::now();
        const std::string why = "bucket_reducer: \"w\" has count -1; expected 0 or more";
        for (const bool at_once : {true, false}) {
          const Error e = error_of([&] {
            BucketReducer reducer(mesh, {{"w", rank.rank == 1 ? -1 : 2}});
            if (at_once) reducer.ready(0);
            reducer.finish();
          });
          EXPECT_EQ(e.code(), ErrorCode::bad_argument);
          EXPECT_EQ(e.what(), rank.rank == 1 ? why : "bucket_reducer: dp rank 1 failed: " + why);
        }
        BucketReducer reducer(mesh, {{"w", 2}});
        reducer.slot(0).as<float>()[1] = 1;
        reducer.ready(0);
        reducer.finish();
        EXPECT_EQ(reducer.slot(0).as<float>()[1], 3.0f);
        expect_soon(began);
      },
      patient());
}

TEST(BucketReducerFaults, ABindThatThrowsOnOneRankIsToldToAll) {
  test::run_ranks(
      Ranks::threads, 2,
      [](Rank& rank) {
        DeviceMesh mesh(rank.group(), {{"dp", 2}});
        const auto began = std::chrono::steady_clock::now();
        BucketReducer reducer(mesh, {{"w", 2}});
        std::vector<float> memory(3);
        const std::string why = "bucket_reducer: bind of \"w\": data is f32 x3; expected f32 x2, contiguous";
        const Error e = error_of([&] {
          reducer.bind(0, view(memory.data(), rank.rank == 1 ? 3 : 2));
          reducer.ready(0);
          reducer.finish();
        });
        EXPECT_EQ(e.what(), rank.rank == 1 ? why : "bucket_reducer: dp rank 1 failed: " + why);
        const auto step = [&] {
          memory[0] = 1;
          reducer.ready(0);
          reducer.finish();
        };
        reducer.bind(0, view(memory.data(), 2));
        step();
        EXPECT_EQ(memory[0], 2.0f);
        // In later steps the exception handler notifies the others by a step without this gradient.
        if (rank.rank == 1) {
          EXPECT_EQ(error_of([&] { reducer.bind(0, view(memory)); }).what(), why);
          EXPECT_STREQ(
              error_of([&] { reducer.finish(); }).what(),
              "bucket_reducer: ready() was not called for \"w\" on dp rank 1; BucketOptions::unused = zeros "
              "lets such ranks contribute zeros");
        } else {
          EXPECT_STREQ(
              error_of(step).what(),
              "bucket_reducer: ready() was not called for \"w\" on dp rank 1; BucketOptions::unused = zeros "
              "lets such ranks contribute zeros");
        }
        step();
        EXPECT_EQ(memory[0], 2.0f);
        expect_soon(began);
      },
      patient());
}

}  // namespace
}  // namespace weft::bucket_hook_test
