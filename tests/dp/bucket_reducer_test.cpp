#include "weft/dp/bucket_reducer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/dp/sampler.hpp"

namespace weft::bucket_reducer_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;

const std::vector<BucketEntry> kEntries = {{"c", 5}, {"b", 300}, {"a", 7}, {"empty", 0}};

void fill(const TensorView& slot, float value) {
  for (float& x : slot.as<float>()) x = value;
}

void expect_all(const TensorView& slot, float value) {
  for (const float x : slot.as<float>()) ASSERT_EQ(x, value);
}

TEST(BucketReducer, ReducesSlotsWhileTheRestIsComputed) {
  for (const int ranks : {1, 2, 3})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
      BucketReducer reducer(mesh, kEntries, {.bucket_bytes = 1000});
      EXPECT_EQ(reducer.bucket_bytes(), (std::vector<std::int64_t>{64 + 1216, 64}));
      const float sum = static_cast<float>(rank.size * (rank.size + 1) / 2);
      for (int step = 1; step < 4; ++step) {
        for (std::size_t i = 0; i < reducer.size(); ++i) {
          fill(reducer.slot(i), static_cast<float>(step * (rank.rank + 1)));
          reducer.ready(i);
          EXPECT_TRUE(reducer.is_ready(i));
        }
        reducer.finish();
        for (std::size_t i = 0; i < reducer.size(); ++i) {
          expect_all(reducer.slot(i), static_cast<float>(step) * sum);
          EXPECT_FALSE(reducer.is_ready(i));
        }
      }
      EXPECT_EQ(reducer.posted_early(), rank.size == 1 ? 0 : 6);
    });
}

// The collectives are posted in the order of the entries, whichever gradient becomes ready first on a rank.
TEST(BucketReducer, RanksMayBeReadyInDifferentOrders) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 3}});
    BucketReducer reducer(mesh, {{"a", 3}, {"b", 3}, {"c", 3}}, {.bucket_bytes = 1});
    for (std::size_t k = 0; k < 3; ++k) {
      const std::size_t i = (k + static_cast<std::size_t>(rank.rank)) % 3;
      fill(reducer.slot(i), static_cast<float>(i + 1));
      reducer.ready(i);
    }
    reducer.finish();
    for (std::size_t i = 0; i < 3; ++i) expect_all(reducer.slot(i), 3 * static_cast<float>(i + 1));
  });
}

// Small gradients are copied through the bucket; a gradient that fills a bucket is reduced in place.
TEST(BucketReducer, TakesMemoryOfTheCaller) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer reducer(mesh, {{"large", 1000}, {"small", 3}, {"slot", 3}}, {.bucket_bytes = 4000});
    std::vector<float> large(1000), small(3);
    reducer.bind(0, view(large));
    reducer.bind(1, view(small));
    EXPECT_EQ(reducer.slot(0).data, reinterpret_cast<std::byte*>(large.data()));
    for (int step = 0; step < 2; ++step) {
      const float mine = static_cast<float>(rank.rank + step);
      std::fill(large.begin(), large.end(), mine);
      std::fill(small.begin(), small.end(), 10 * mine);
      fill(reducer.slot(2), 100 * mine);
      for (std::size_t i = 0; i < 3; ++i) reducer.ready(i);
      reducer.finish();
      const float sum = static_cast<float>(1 + 2 * step);
      EXPECT_EQ(large, std::vector<float>(1000, sum));
      EXPECT_EQ(small, std::vector<float>(3, 10 * sum));
      expect_all(reducer.slot(2), 100 * sum);
    }
  });
}

// As a host framework's hooks call ready() in every micro-batch. Only the last one reduces. "early" gets a
// gradient in the first one alone, and lies in the caller's memory. "large" also lies there, and is reduced
// in place.
TEST(BucketReducer, AccumulatesInsideNoSync) {
  for (const int ranks : {1, 2})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"dp", rank.size}});
      BucketReducer reducer(mesh, {{"large", 1000}, {"small", 3}, {"slot", 3}, {"early", 2}},
                            {.bucket_bytes = 4000});
      std::vector<float> large(1000), small(3), early(2);
      reducer.bind(0, view(large));
      reducer.bind(1, view(small));
      reducer.bind(3, view(early));
      const auto accumulate = [&](std::size_t i, float value) {
        for (float& x : i == 2   ? reducer.slot(2).as<float>()
                        : i == 0 ? std::span<float>(large)
                        : i == 1 ? std::span<float>(small)
                                 : std::span<float>(early))
          x += value * static_cast<float>(rank.rank + 1);
        reducer.ready(i);
      };
      const float ranks_sum = rank.size == 2 ? 3 : 1;
      for (int step = 0; step < 2; ++step) {
        for (const auto& values : {std::span<float>(large), std::span<float>(small), std::span<float>(early),
                                   reducer.slot(2).as<float>()})
          std::fill(values.begin(), values.end(), 0.0f);
        {
          const NoSync off = reducer.no_sync();
          accumulate(3, 1000);
          for (int batch = 0; batch < 2; ++batch)
            for (std::size_t i = 0; i < 3; ++i) accumulate(i, batch == 0 ? 1 : 10);
          EXPECT_FALSE(reducer.is_ready(0));
          EXPECT_EQ(
              test::error_text([&] { reducer.finish(); }),
              "bad_argument: bucket_reducer: finish() inside no_sync(); end that scope before the last pass");
        }
        EXPECT_EQ(large[0], 11.0f * static_cast<float>(rank.rank + 1)) << "reduced too early";
        for (std::size_t i = 0; i < 3; ++i) accumulate(i, 100);
        EXPECT_EQ(
            test::error_text([&] { const NoSync off = reducer.no_sync(); }),
            "bad_argument: bucket_reducer: no_sync() after \"large\" became ready; call finish() first");
        reducer.finish();
        EXPECT_EQ(large, std::vector<float>(1000, 111 * ranks_sum));
        EXPECT_EQ(small, std::vector<float>(3, 111 * ranks_sum));
        expect_all(reducer.slot(2), 111 * ranks_sum);
        EXPECT_EQ(early, std::vector<float>(2, 1000 * ranks_sum));
      }
      std::optional<NoSync> last(reducer.no_sync());
      reducer = BucketReducer(mesh, {{"w", 1}});
      last.reset();  // it may outlive the reducer
    });
}

TEST(BucketReducer, SeveralAxesDtypesAndMeans) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"replicate", 2}, {"tp", 1}, {"domain", 2}});
    BucketReducer reducer(mesh[{"replicate", "domain"}],
                          {{"sum", 2}, {"mean", 2, DType::f32, ReduceOp::avg}, {"half", 2, DType::bf16}});
    fill(reducer.slot(0), static_cast<float>(rank.rank));
    fill(reducer.slot(1), static_cast<float>(rank.rank));
    for (bf16& x : reducer.slot(2).as<bf16>()) x = bf16(static_cast<float>(rank.rank));
    for (std::size_t i = 3; i-- > 0;) reducer.ready(i);
    reducer.finish();
    expect_all(reducer.slot(0), 6);
    expect_all(reducer.slot(1), 1.5);
    EXPECT_EQ(static_cast<float>(reducer.slot(2).as<bf16>()[1]), 6.0f);
    EXPECT_EQ(reducer.bucket_bytes().size(), 3u) << "one for each dtype and reduction";
  });
}

TEST(BucketReducer, WhatIsNotReadyIsNamedOnEveryRank) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer reducer(mesh, {{"a", 2}, {"b", 2}, {"c", 2}});
    reducer.ready(0);
    if (rank.rank == 0) reducer.ready(2);
    const Error e = error_of([&] { reducer.finish(); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_STREQ(e.what(),
                 "bucket_reducer: ready() was not called for \"b\" on dp rank 0; \"b\", \"c\" on dp rank 1; "
                 "BucketOptions::unused = zeros lets such ranks contribute zeros");
    // The next step works as usual.
    for (std::size_t i = 0; i < 3; ++i) {
      fill(reducer.slot(i), 1);
      reducer.ready(i);
    }
    reducer.finish();
    expect_all(reducer.slot(2), 2);

    BucketReducer zeros(mesh, {{"a", 2}, {"b", 2}}, {.unused = Unused::zeros});
    fill(zeros.slot(0), 5);
    if (rank.rank == 1) zeros.ready(0);
    zeros.finish();
    expect_all(zeros.slot(0), 5);
    expect_all(zeros.slot(1), 0);
  });
}

TEST(BucketReducer, RanksWithDifferentGradientsAreFoundOut) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer names(mesh, {{"a", 2}, {rank.rank == 0 ? "b" : "B", 2}});
    const Error e = error_of([&] { names.finish(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(e.what(),
                 "bucket_reducer: gradient 1 is \"b\" (f32 x2 sum) on dp rank 0, but \"B\" (f32 x2 sum) on "
                 "dp rank 1");
    BucketReducer numbers(mesh, std::vector<BucketEntry>(static_cast<std::size_t>(rank.rank + 1), {"a", 2}));
    EXPECT_STREQ(error_of([&] { numbers.finish(); }).what(),
                 "bucket_reducer: gradient 1 is missing on dp rank 0, but \"a\" (f32 x2 sum) on dp rank 1");
  });
}

TEST(BucketReducer, AnEmptyMeshIsRefused) {
  const auto text = [](const auto& f) { return test::error_text(f); };
  EXPECT_EQ(text([] {
              BucketReducer(DeviceMesh(), {{"w", 1}});
            }),
            "bad_argument: bucket_reducer: axes is an empty DeviceMesh, made by default or moved from");
  EXPECT_EQ(text([] { average_gradients({}, DeviceMesh()); }),
            "bad_argument: average_gradients: axes is an empty DeviceMesh, made by default or moved from");
  EXPECT_EQ(
      text([] { sync_replicated_gradients({}, DeviceMesh()); }),
      "bad_argument: sync_replicated_gradients: axes is an empty DeviceMesh, made by default or moved from");
  EXPECT_EQ(text([] { Sampler(DeviceMesh(), 10, 1, 0); }),
            "bad_argument: sampler: axis is an empty DeviceMesh, made by default or moved from");
}

TEST(BucketReducer, AGradientWithoutALayoutHasNoShape) {
  float x = 0;
  EXPECT_EQ(test::error_text([&] { make_gradient("bias", &x, nullptr); }),
            "bad_argument: make_gradient: layout of \"bias\" is null, so its shape is not known; for a "
            "gradient of this rank alone write Gradient{\"bias\", view(...)}");
}

TEST(BucketReducer, WrongArgumentsAreNamed) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 1}});
    const auto text = [&](const std::vector<BucketEntry>& entries, const BucketOptions& options = {}) {
      return std::string(error_of([&] { BucketReducer(mesh, entries, options); }).what());
    };
    EXPECT_EQ(text({{"w", -1}}), "bucket_reducer: \"w\" has count -1; expected 0 or more");
    EXPECT_EQ(text({{"w", 1, DType::f32, ReduceOp::max}}),
              "bucket_reducer: \"w\" has op max; expected sum or avg");
    ReduceOp scaled = ReduceOp::sum;
    scaled.scale = 2;
    EXPECT_EQ(text({{"w", 1, DType::f32, scaled}}),
              "bucket_reducer: \"w\" has op sum with scale 2; expected sum or avg");
    EXPECT_EQ(text({{"w", 1, DType::i32}}), "bucket_reducer: \"w\" is i32; expected f64, f32, bf16 or f16");
    EXPECT_EQ(text({}, {.bucket_bytes = 0}), "bucket_reducer: options.bucket_bytes is 0; expected 1 or more");

    BucketReducer reducer(mesh, {{"w", 2}});
    std::vector<float> three(3);
    EXPECT_STREQ(error_of([&] { reducer.bind(0, view(three)); }).what(),
                 "bucket_reducer: bind of \"w\": data is f32 x3; expected f32 x2, contiguous");
    EXPECT_STREQ(error_of([&] { reducer.ready(1); }).what(), "bucket_reducer: i is 1; expected less than 1");
    reducer.ready(0);
    EXPECT_STREQ(error_of([&] { reducer.ready(0); }).what(),
                 "bucket_reducer: \"w\" is ready twice; call finish() between two steps");
    EXPECT_STREQ(error_of([&] { reducer.bind(0, view(three)); }).what(),
                 "bucket_reducer: bind of \"w\" between ready() and finish()");
    reducer.finish();
  });
}

// Their collectives are called in another order on each rank. A group that both use would add the one's
// gradients to the other's.
TEST(BucketReducer, SeveralOverTheSameAxesMayBeReadyInDifferentOrders) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 3}});
    BucketReducer last(mesh, {{"last", 1000}});
    for (int round = 0; round < 2; ++round) {  // the second one takes the number that is free
      BucketReducer a(mesh, {{"w", 1000}}), b(mesh, {{"w", 1000}});
      for (int step = 0; step < 3; ++step) {
        BucketReducer* order[] = {&a, &b, &last};
        fill(a.slot(0), 1);
        fill(b.slot(0), 10);
        fill(last.slot(0), 100);
        if (step > 0) std::rotate(order, order + rank.rank, order + 3);
        for (BucketReducer* r : order) r->ready(0);
        for (BucketReducer* r : {&b, &last, &a}) r->finish();
        expect_all(a.slot(0), 3);
        expect_all(b.slot(0), 30);
        expect_all(last.slot(0), 300);
      }
      EXPECT_EQ(a.posted_early(), 3);
    }
  });
}

// An axis of one rank changes nothing, and all ranks of any mesh are the group that it was made of.
TEST(BucketReducer, MeshesThatShareAGroupCount) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"one", 1}}), another(rank.group(), {{"x", 2}});
    BucketReducer a(mesh["dp"], {{"w", 100}}), b(mesh[{"dp", "one"}], {{"w", 100}}), c(another, {{"w", 100}});
    for (int step = 0; step < 2; ++step) {
      BucketReducer* order[] = {&a, &b, &c};
      float value = 1;
      for (BucketReducer* r : order) fill(r->slot(0), value *= 10);
      if (step > 0 && rank.rank == 1) std::reverse(order, order + 3);
      for (BucketReducer* r : order) r->ready(0);
      for (BucketReducer* r : {&a, &b, &c}) r->finish();
      expect_all(a.slot(0), 20);
      expect_all(b.slot(0), 200);
      expect_all(c.slot(0), 2000);
    }
  });
  Context context;
  const DeviceMesh alone = DeviceMesh::arithmetic(context, MeshShape{{"dp", 2}}, 0);
  BucketReducer counts(alone, {{"w", 4}});  // sizes can be asked for
  EXPECT_EQ(counts.bucket_bytes(), std::vector<std::int64_t>{64});
}

TEST(BucketReducer, OtherOptionsOnOneRankAreNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer first(mesh, {{"w", 2}});
    const BucketOptions mine{.bucket_bytes = rank.rank == 0 ? 1 : 64,
                             .unused = rank.rank == 0 ? Unused::error : Unused::zeros};
    BucketReducer reducer(mesh, {{"w", 2}, {"v", 2}}, mine);
    for (int i = 0; i < 2; ++i) {
      const Error e = error_of([&] { reducer.ready(0); });
      EXPECT_EQ(e.code(), ErrorCode::mismatch);
      EXPECT_STREQ(e.what(),
                   "bucket_reducer: the reducer is number 1 with bucket_bytes 1, unused error and no hook on "
                   "dp rank 0, but "
                   "number 1 with bucket_bytes 64, unused zeros and no hook on dp rank 1");
      EXPECT_EQ(e.ranks().size(), 2u);
    }
  });
}

// Each rank begins with another reducer. Both reducers can be used once the ranks agree.
TEST(BucketReducer, AfterAMismatchTheStepBeginsAnew) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer a(mesh, {{"a", 2}}), b(mesh, {{"b", 2}});
    for (const bool at_once : {true, false}) {
      const Error e = error_of([&] {
        if (at_once) (rank.rank == 0 ? a : b).ready(0);
        (rank.rank == 0 ? a : b).finish();
      });
      EXPECT_STREQ(
          e.what(),
          "bucket_reducer: gradient 0 is \"a\" (f32 x2 sum) on dp rank 0, but \"b\" (f32 x2 sum) on dp "
          "rank 1");
    }
    for (BucketReducer* r : {&a, &b}) {
      fill(r->slot(0), 1);
      r->ready(0);
      r->finish();
      expect_all(r->slot(0), 2);
    }
  });
}

TEST(BucketReducer, LaterCallsTellOfAReductionThatFailed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer reducer(mesh, {{"w", 2}});
    reducer.ready(0);
    reducer.finish();
    rank.meet("before the abort");
    if (rank.rank == 0) rank.group().abort("enough");
    const Error first = error_of([&] {
      reducer.ready(0);
      reducer.finish();
    });
    EXPECT_EQ(first.code(), ErrorCode::aborted);
    for (int i = 0; i < 2; ++i) {
      const Error ready = error_of([&] { reducer.ready(0); }), finish = error_of([&] { reducer.finish(); });
      EXPECT_EQ(ready.code(), ErrorCode::aborted);
      EXPECT_EQ(ready.what(), std::string("bucket_reducer: an earlier reduction failed: ") + first.what());
      EXPECT_STREQ(finish.what(), ready.what());
    }
  });
}

TEST(BucketReducer, SizesThatDoNotFitAreNamed) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 1}});
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    const auto text = [&](const std::vector<BucketEntry>& entries) {
      return std::string(error_of([&] { BucketReducer(mesh, entries, {.bucket_bytes = kMost}); }).what());
    };
    EXPECT_EQ(
        text({{"w", kMost}}),
        "bucket_reducer: \"w\" has count 9223372036854775807; the bytes of its bucket do not fit 64 bits");
    EXPECT_EQ(
        text({{"w", kMost / 4}}),
        "bucket_reducer: \"w\" has count 2305843009213693951; the bytes of its bucket do not fit 64 bits");
    EXPECT_EQ(
        text({{"w", kMost / 8}, {"v", kMost / 8}}),
        "bucket_reducer: \"v\" has count 1152921504606846975; the bytes of its bucket do not fit 64 bits");
  });
}

TEST(BucketReducer, MemoryThatCannotBeBoundIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BucketReducer reducer(mesh, {{"large", 64}, {"a", 4}, {"b", 4}}, {.bucket_bytes = 256});
    const auto text = [&](std::size_t i, const TensorView& data) {
      const Error e = error_of([&] { reducer.bind(i, data); });
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      return std::string(e.what());
    };
    std::vector<float> memory(65);
    EXPECT_EQ(text(0, view(static_cast<float*>(nullptr), 64)),
              "bucket_reducer: bind of \"large\": data has no memory");
    EXPECT_EQ(text(1, view(static_cast<float*>(nullptr), 4)),
              "bucket_reducer: bind of \"a\": data has no memory");
    EXPECT_EQ(text(1, {reinterpret_cast<std::byte*>(memory.data()), DType::f32, {}, {-2, -2}, {-2, 1}}),
              "bucket_reducer: bind of \"a\": data has shape (-2, -2); expected no negative extent");
    EXPECT_EQ(text(1, {reinterpret_cast<std::byte*>(memory.data()), DType::f32, {}, {2, 2}, {1, 2}}),
              "bucket_reducer: bind of \"a\": data is not contiguous; copy it into a contiguous buffer");
    TensorView misplaced = view(memory.data(), 64);
    misplaced.data += 1;
    EXPECT_EQ(text(0, misplaced).substr(0, 50), "bucket_reducer: bind of \"large\": data begins at 0x");
    for (const std::size_t slot : {0u, 1u, 2u})
      EXPECT_EQ(text(slot, reducer.slot(slot)),
                "bucket_reducer: bind of \"" + reducer.entry(slot).name +
                    "\": data lies in the reducer's own memory, where slot() points to");
    reducer.bind(1, view(memory.data(), 4));
    EXPECT_EQ(text(2, view(memory.data() + 3, 4)),
              "bucket_reducer: bind of \"b\": data overlaps the data of \"a\"");
    EXPECT_EQ(text(0, view(memory.data(), 64)),
              "bucket_reducer: bind of \"large\": data overlaps the data of \"a\"");
    reducer.bind(1, view(memory.data() + 1, 4));  // again
    reducer.bind(2, view(memory.data() + 5, 4));  // touches it
    std::fill(memory.begin(), memory.end(), 1.0f);
    for (std::size_t i = 0; i < 3; ++i) reducer.ready(i);
    reducer.finish();
    EXPECT_EQ(memory[0], 1);
    EXPECT_EQ(memory[1], 2);
    EXPECT_EQ(memory[8], 2);
  });
}

}  // namespace
}  // namespace weft::bucket_reducer_test
