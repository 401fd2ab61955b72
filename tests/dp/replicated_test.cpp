#include "weft/dp/replicated.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "dp/vectors.hpp"
#include "support/calls_made.hpp"
#include "weft/dp/bucket_reducer.hpp"

namespace weft::replicated_test {
namespace {

using test::error_of;
using test::error_text;
using test::Rank;
using test::Ranks;
using test::Vectors;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(ReplicatedViews, AWrongArgumentOnOneRankIsToldToAll) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Vectors g;
    g.put("w", replicated_layout(mesh, {4}), [](std::size_t) { return 1.0f; });
    const bool odd = rank.rank == 1;
    const std::string caller = "sync_replicated_gradients: ";
    EXPECT_EQ(error_text([&] { sync_replicated_gradients(g.all(), mesh, {.tolerance = odd ? -1 : 1}); }),
              "bad_argument: " + (odd ? "" : caller + "tp rank 1 failed: ") + caller +
                  "options.tolerance is -1; expected 0 or more");
    if (odd) g.at(0).data.strides = {2};
    EXPECT_EQ(error_text([&] { sync_replicated_gradients(g.all(), mesh); }),
              "bad_argument: " + (odd ? "" : caller + "tp rank 1 failed: ") + caller +
                  "the gradient of \"w\" is not contiguous; copy it into a contiguous buffer");
    g.at(0).data.strides = {1};
    sync_replicated_gradients(g.all(), mesh);  // the group goes on
  });
}

TEST(ReplicatedViews, OverTwoAxesAtOnce) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"domain", 2}});
    const auto layout = [&](Placement dp, Placement domain) { return make_layout(mesh, {dp, domain}, {2}); };
    const auto mine = [&](std::size_t) { return static_cast<float>(1 << rank.rank); };
    Vectors g;
    std::vector<float>& all = g.put("all", layout(Partial{}, Partial{}), mine);
    std::vector<float>& dp = g.put("dp", layout(Partial{}, Shard{0}), mine);
    std::vector<float>& mean = g.put("mean", layout(Partial{ReduceOp::avg}, Partial{}), mine);
    // Summed along dp; along domain it is the same, and compared.
    std::vector<float>& both = g.put("both", layout(Partial{}, Replicate{}),
                                     [&](std::size_t) { return rank.rank < 2 ? 1.0f : 2.0f; });
    sync_replicated_gradients(g.all(), mesh);
    EXPECT_EQ(all, std::vector<float>(2, 15.0f));
    EXPECT_EQ(dp, std::vector<float>(1, rank.rank % 2 == 0 ? 5.0f : 10.0f));
    EXPECT_EQ(mean, std::vector<float>(2, 7.5f));
    EXPECT_EQ(both, std::vector<float>(2, 3.0f));
    EXPECT_EQ(g.at(0).layout, replicated_layout(mesh, {2}));
    EXPECT_EQ(g.at(1).layout, layout(Replicate{}, Shard{0}));
    EXPECT_EQ(g.at(2).layout, replicated_layout(mesh, {2}));
    EXPECT_EQ(g.at(3).layout, replicated_layout(mesh, {2}));
  });
}

TEST(ReplicatedViews, EveryFloatingDtype) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    const LayoutRef partial = make_layout(mesh, {Partial{}}, {2}), same = replicated_layout(mesh, {2});
    const float r = static_cast<float>(rank.rank + 1);
    std::vector<bf16> b = {bf16(r), bf16(2.0f)}, replica = {bf16(1.5f), bf16(-2.0f)};
    std::vector<f16> h = {f16(r), f16(3.0f)};
    std::vector<double> d = {r, 4.0};
    Gradient g[] = {{"b", view(b), partial},
                    {"h", view(h), partial},
                    {"d", view(d), partial},
                    {"replica", view(replica), same}};
    sync_replicated_gradients(g, mesh["tp"], {.tolerance = 0});
    EXPECT_EQ(static_cast<float>(b[0]), 3.0f);
    EXPECT_EQ(static_cast<float>(h[1]), 6.0f);
    EXPECT_EQ(d, (std::vector<double>{3, 8}));
    EXPECT_EQ(static_cast<float>(replica[1]), -2.0f);
  });
}

// A tolerance of nothing tolerates nothing, though no distance is a multiple of it.
TEST(ReplicatedViews, WithoutToleranceTheLastBitCounts) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 3}});
    Vectors g;
    g.put("w", replicated_layout(mesh, {4}),
          [&](std::size_t i) { return rank.rank == 1 && i == 2 ? 1.0f + 0x1p-22f : 1.0f; });
    sync_replicated_gradients(g.all(), mesh["tp"]);  // rounding, by default

    Vectors exact;
    exact.put("w", replicated_layout(mesh, {4}),
              [&](std::size_t i) { return rank.rank == 1 && i == 2 ? 1.0f + 0x1p-22f : 1.0f; });
    const Error e = error_of([&] { sync_replicated_gradients(exact.all(), mesh["tp"], {.tolerance = 0}); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(
        e.what(),
        "sync_replicated_gradients: the gradient of \"w\" is Replicate on tp=3, but on tp rank 1 it has "
        "other bits, where the tolerance is 0; a replica drifted, or the gradient is Partial there");
    const Error wrong =
        error_of([&] { sync_replicated_gradients(exact.all(), mesh["tp"], {.tolerance = -1}); });
    EXPECT_STREQ(wrong.what(), "sync_replicated_gradients: options.tolerance is -1; expected 0 or more");
  });
}

// Each of two ranks has a NaN in a different gradient. Both gradients differ, although every rank has a
// NaN.
TEST(ReplicatedViews, NaNsInDifferentGradientsAreDrift) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Vectors g;
    g.put("a", replicated_layout(mesh, {2}), [&](std::size_t) { return rank.rank == 0 ? kNaN : 1.0f; });
    g.put("b", replicated_layout(mesh, {2}), [&](std::size_t) { return rank.rank == 1 ? kNaN : 1.0f; });
    EXPECT_STREQ(
        error_of([&] { sync_replicated_gradients(g.all(), mesh["tp"]); }).what(),
        "sync_replicated_gradients: the gradient of \"a\" is Replicate on tp=2, but on tp rank 0 it is "
        "not finite; a replica drifted, or the gradient is Partial there");
    EXPECT_EQ(g.values(0)[0] == 1.0f, rank.rank == 1) << "changed in spite of the error";
  });
}

// Ranks are numbered along the axis; the group of the whole mesh numbers them otherwise.
TEST(ReplicatedViews, RanksOfAnAxisAreNamedBothWays) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Vectors g;
    g.put("w", replicated_layout(mesh, {2}), [&](std::size_t) { return rank.rank == 3 ? kNaN : 1.0f; });
    if (rank.rank >= 2) {
      EXPECT_STREQ(error_of([&] { sync_replicated_gradients(g.all(), mesh["tp"]); }).what(),
                   "sync_replicated_gradients: the gradient of \"w\" is Replicate on tp=2, but on tp rank 1 "
                   "(rank 3 of "
                   "\"world\") it is not finite; a replica drifted, or the gradient is Partial there");
    }
    BucketReducer reducer(mesh["dp"], {{"w", 1}});
    if (rank.rank != 3) reducer.ready(0);
    const Error e = error_of([&] {
      reducer.finish();
      throw Error(ErrorCode::system, "none");
    });
    if (rank.rank % 2 == 1) {
      EXPECT_THAT(e.what(), testing::HasSubstr(
                                "ready() was not called for \"w\" on dp rank 1 (rank 3 of \"world\"); "));
    }
  });
}

// A NaN on all ranks in one gradient does not hide the drift of another.
TEST(ReplicatedViews, ANaNOnAllRanksHidesNothing) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 3}});
    Vectors g;
    g.put("a", replicated_layout(mesh, {2}), [&](std::size_t) { return kNaN; });
    g.put("b", replicated_layout(mesh, {2}), [&](std::size_t) { return rank.rank == 2 ? 2.0f : 1.0f; });
    const Error e = error_of([&] { sync_replicated_gradients(g.all(), mesh["tp"]); });
    ASSERT_EQ(e.ranks().size(), 1u) << e.what();
    EXPECT_EQ(e.ranks()[0], 2);
  });
}

TEST(ReplicatedViews, AverageTakesWhatRanksMadeOfDifferentData) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const auto mine = [&](std::size_t) { return rank.rank == 0 ? 1.0f : 3.0f; };
    Vectors g;
    std::vector<float>& sum = g.put("sum", make_layout(mesh, {Partial{}}, {2}), mine);
    std::vector<float>& mean = g.put("mean", make_layout(mesh, {Partial{ReduceOp::avg}}, {2}), mine);
    std::vector<float>& own = g.put("own", make_layout(mesh, {Shard{0}}, {2}), mine);
    average_gradients(g.all(), mesh["dp"]);
    EXPECT_EQ(sum, std::vector<float>(2, 4.0f));
    EXPECT_EQ(mean, std::vector<float>(2, 2.0f));
    EXPECT_EQ(own, std::vector<float>(1, rank.rank == 0 ? 1.0f : 3.0f));

    Vectors wrong;
    wrong.put("w", replicated_layout(mesh, {2}), mine);
    EXPECT_STREQ(error_of([&] { average_gradients(wrong.all(), mesh["dp"]); }).what(),
                 "average_gradients: the gradient of \"w\" is Replicate on dp=2; expected Partial(sum) or "
                 "Partial(avg): there is nothing to reduce");
    wrong.at(0).layout = nullptr;
    EXPECT_STREQ(error_of([&] { average_gradients(wrong.all(), mesh["dp"]); }).what(),
                 "average_gradients: the gradient of \"w\" is a plain tensor; on dp=2 it needs a layout, "
                 "which says what part of the whole it is");
  });
}

// One rank has the same gradients in another order. Their sizes fit, so without a comparison of the lists the
// numbers would be wrong without an error. No gradient changes, and the group can be used afterwards.
TEST(ReplicatedViews, AnotherOrderOnOneRankIsFoundOut) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const auto reduced = [&](bool average, const LayoutRef& first, const LayoutRef& second) {
      Vectors g;
      const bool odd = rank.rank == 3;
      g.put(odd ? "b" : "a", odd ? second : first, [&](std::size_t) { return odd ? 100.0f : 1.0f; });
      g.put(odd ? "a" : "b", odd ? first : second, [&](std::size_t) { return odd ? 1.0f : 100.0f; });
      const Error e = error_of([&] {
        average ? average_gradients(g.all(), mesh) : sync_replicated_gradients(g.all(), mesh["tp"]);
      });
      EXPECT_EQ(g.values(0), std::vector<float>(2, odd ? 100.0f : 1.0f));
      return e;
    };
    const LayoutRef partial = make_layout(mesh, {Partial{ReduceOp::avg}, Partial{ReduceOp::avg}}, {2});
    const Error e = reduced(true, partial, partial);
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(
        e.what(),
        "average_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Partial(avg), tp: Partial(avg)]) on "
        "dp,tp rank 0, but \"b\" (f32 (2) as [dp: Partial(avg), tp: Partial(avg)]) on dp,tp rank 3");
    ASSERT_EQ(e.ranks().size(), 2u);
    EXPECT_EQ(e.ranks()[1], 3);
    if (rank.rank < 2) return;  // tp ranks 0 and 1 of the other dp rank agree
    const LayoutRef same = replicated_layout(mesh, {2});
    EXPECT_STREQ(reduced(false, same, same).what(),
                 "sync_replicated_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Replicate, tp: Replicate]) "
                 "on tp rank 0 (rank 2 of \"world\"), but \"b\" (f32 (2) as [dp: Replicate, tp: "
                 "Replicate]) on tp rank 1 (rank 3 of \"world\")");
  });
}

TEST(ReplicatedViews, AnotherListOnOneRankIsFoundOut) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const LayoutRef sum = make_layout(mesh, {Partial{}}, {2}),
                    mean = make_layout(mesh, {Partial{ReduceOp::avg}}, {2});
    const auto one = [](std::size_t) { return 1.0f; };
    const auto text = [&](Vectors& g) {
      return std::string(error_of([&] { average_gradients(g.all(), mesh["dp"]); }).what());
    };
    Vectors placement, fewer, none, plain;
    placement.put("a", rank.rank == 0 ? sum : mean, one);
    EXPECT_EQ(
        text(placement),
        "average_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Partial(sum)]) on dp rank 0, but \"a\" "
        "(f32 (2) as [dp: Partial(avg)]) on dp rank 1");
    fewer.put("a", sum, one);
    if (rank.rank == 0) fewer.put("b", mean, one);
    EXPECT_EQ(
        text(fewer),
        "average_gradients: gradient 1 is \"b\" (f32 (2) as [dp: Partial(avg)]) on dp rank 0, but missing "
        "on dp rank 1");
    if (rank.rank == 0) none.put("a", sum, one);
    EXPECT_EQ(
        text(none),
        "average_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Partial(sum)]) on dp rank 0, but missing "
        "on dp rank 1");
    plain.put("a", rank.rank == 0 ? sum : nullptr, {2}, one);
    EXPECT_EQ(
        text(plain),
        "average_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Partial(sum)]) on dp rank 0, but \"a\" "
        "(f32 (2) without a layout) on dp rank 1");
    average_gradients({}, mesh["dp"]);  // the group lives
  });
}

// Only the replicas of one column of the mesh drift. All ranks of the axes throw, and number the ranks in the
// same way.
TEST(ReplicatedViews, DriftOnSomeOfTheAxesIsThrownOnAllRanks) {
  for (const std::optional<double> tolerance : {SyncOptions{}.tolerance, std::optional(0.0)})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
      const auto drifted = [&](std::size_t i) { return rank.rank == 2 && i == 0 ? 5.0f : 1.0f; };
      const auto one = [](std::size_t) { return 1.0f; };
      Vectors g;  // "v" comes to another group after "w" has drifted
      g.put("none", make_layout(mesh, {Replicate{}, Shard{0}}, {1}), one);
      g.put("w", make_layout(mesh, {Replicate{}, Shard{0}}, {8}), drifted);
      g.put("v", make_layout(mesh, {Shard{0}, Replicate{}}, {8}), one);
      const auto before = g.values(1);
      const Error e = error_of([&] {
        sync_replicated_gradients(g.all(), mesh[{"dp", "tp"}], {.tolerance = tolerance});
      });
      EXPECT_EQ(e.code(), ErrorCode::mismatch);
      EXPECT_STREQ(e.what(), tolerance == 0 ? "sync_replicated_gradients: the gradient of \"w\" is Replicate "
                                              "on dp=2, but on dp,tp ranks 0, "
                                              "2 it has other bits, where the tolerance is 0; a replica "
                                              "drifted, or the gradient is Partial "
                                              "there"
                                            : "sync_replicated_gradients: the gradient of \"w\" is Replicate "
                                              "on dp=2, but on dp,tp ranks 0, "
                                              "2 it is 2 from the average, 3.28e+03 times what rounding "
                                              "explains; a replica drifted, or the "
                                              "gradient is Partial there");
      ASSERT_EQ(e.ranks().size(), 2u);
      EXPECT_EQ(e.ranks()[1], 2);
      EXPECT_EQ(g.values(1), before);
      rank.group().barrier().wait();  // nobody is left in a collective
    });
}

// A part that some ranks lack, and replicas of which only some differ: the rest of the buffer is as before.
TEST(ReplicatedViews, WhatRanksNeedNotReduceDoesNotMixUpTheirOrder) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const float nearly = rank.rank == 0 ? 1.0f + 0x1p-20f : 1.0f;
    Vectors g;
    g.put("a", make_layout(mesh, {Replicate{}, Shard{0}}, {1}), [&](std::size_t) { return nearly; });
    g.put("b", make_layout(mesh, {Shard{0}, Replicate{}}, {1}), [&](std::size_t) { return nearly; });
    g.put("c", make_layout(mesh, {Replicate{}, Partial{}}, {2}), [&](std::size_t) { return nearly; });
    g.put("d", make_layout(mesh, {Partial{}, Replicate{}}, {2}), [&](std::size_t) { return 1.0f; });
    g.put("e", make_layout(mesh, {Shard{0}, Replicate{}}, {4}), [&](std::size_t) { return nearly; });
    sync_replicated_gradients(g.all(), mesh);
    for (const float x : g.values(0)) EXPECT_NEAR(x, 1, 1e-5);
    for (const float x : g.values(1)) EXPECT_NEAR(x, 1, 1e-5);
    for (const float x : g.values(2)) EXPECT_NEAR(x, 2, 1e-5);
    EXPECT_EQ(g.values(3), std::vector<float>(2, 2.0f));
    EXPECT_EQ(g.values(4), std::vector<float>(2, rank.rank < 2 ? 1.0f + 0x1p-21f : 1.0f));
  });
}

// The average of three equal numbers may be another number, or overflow.
TEST(ReplicatedViews, ReplicasWithTheSameBitsStayAsTheyAre) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 3}});
    std::vector<float> values = {3e38f, -0.0f, 1e-45f, std::numeric_limits<float>::infinity()};
    for (int i = 0; i < 10000; ++i) values.push_back(1 + static_cast<float>(i) * 0x1.35p-13f);
    std::vector<double> large = {1.7e308, 1};
    for (const std::optional<double> tolerance :
         {std::optional(0.0), std::optional(1e-9), SyncOptions{}.tolerance}) {
      std::vector<float> w = values;
      std::vector<double> d = large;
      Gradient g[] = {{"w", view(w), replicated_layout(mesh, {static_cast<std::int64_t>(w.size())})},
                      {"d", view(d), replicated_layout(mesh, {2})}};
      sync_replicated_gradients(g, mesh["tp"], {.tolerance = tolerance});
      EXPECT_EQ(std::memcmp(w.data(), values.data(), 4 * w.size()), 0);
      EXPECT_EQ(d, large);
    }
  });
}

// By default small rounding differences are allowed. The limit depends on the dtype.
TEST(ReplicatedViews, TheToleranceFitsTheDtype) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 3}});
    const auto passes = [&]<class T>(T largest, T nearby) {
      std::vector<T> w(4, largest);
      if (rank.rank == 1) w[2] = nearby;
      Gradient g[] = {{"w", view(w), replicated_layout(mesh, {4})}};
      try {
        sync_replicated_gradients(g, mesh["tp"]);
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        return false;
      }
      return true;
    };
    EXPECT_TRUE(passes(bf16(1.0f), bf16(1.0f + 0x1p-7f)));
    EXPECT_TRUE(passes(bf16(1.0f), bf16(1.0f + 0x1p-6f)));
    EXPECT_FALSE(passes(bf16(1.0f), bf16(1.0f + 0x1p-3f)));
    EXPECT_TRUE(passes(f16(1.0f), f16(1.0f + 0x1p-10f)));
    EXPECT_FALSE(passes(f16(1.0f), f16(1.0f + 0x1p-6f)));
    EXPECT_TRUE(passes(1.0f, 1.0f + 0x1p-14f));
    EXPECT_FALSE(passes(1.0f, 1.0f + 0x1p-11f));
    EXPECT_TRUE(passes(1.0, 1.0 + 0x1p-43));
    EXPECT_FALSE(passes(1.0, 1.0 + 1e-5));
    EXPECT_FALSE(passes(1.0, 1.0 + 0x1p-39));
    // If all elements are below the smallest normal number a unit is a large part of each.
    EXPECT_TRUE(passes(f16(0x1p-20f), f16(0x1p-20f + 0x1p-24f)));
    EXPECT_TRUE(passes(f16(0.0f), f16(0x1p-24f)));
    EXPECT_FALSE(passes(f16(0x1p-20f), f16(0x1p-16f)));
    EXPECT_TRUE(passes(bf16(0x1p-132f), bf16(0x1p-132f + 0x1p-133f)));
    EXPECT_FALSE(passes(bf16(0x1p-133f), bf16(0x1p-127f)));
    EXPECT_TRUE(passes(0x1p-149f, 0x1p-148f));
    EXPECT_FALSE(passes(0x1p-130f, 0x1p-129f));
    EXPECT_TRUE(passes(0x1p-1074, 0x1p-1073));
    EXPECT_FALSE(passes(0x1p-1050, 0x1p-1049));
  });
}

TEST(ReplicatedViews, AMeshOfTooManyAxesIsRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const int most : {63, 64}) {
      std::vector<MeshAxis> axes;
      Placements placements;
      for (int a = 0; a + 1 < most; ++a) {
        axes.push_back({"one" + std::to_string(a), 1});
        placements.push_back(Replicate{});
      }
      axes.push_back({"dp", 2});
      placements.push_back(Partial{});
      const DeviceMesh mesh(rank.group(), MeshShape(axes));
      std::vector<float> w(4, 1.0f);
      Gradient g[] = {{"w", view(w), make_layout(mesh, placements, {4})}};
      if (most == 63) {
        average_gradients(g, mesh);
        EXPECT_EQ(w, std::vector<float>(4, 2.0f));
      } else {
        EXPECT_STREQ(error_of([&] { average_gradients(g, mesh); }).what(),
                     "average_gradients: axes has 64 axes; expected at most 63");
      }
    }
  });
}

// Flipped signs, which a hash that multiplies only would add up to nothing.
TEST(ReplicatedViews, OtherSignsAreOtherBits) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    for (const std::size_t n : {2u, 8u, 16u, 33u}) {
      std::vector<double> w(n, rank.rank == 0 ? 0.0 : -0.0);
      Gradient g[] = {{"w", view(w), replicated_layout(mesh, {static_cast<std::int64_t>(n)})}};
      EXPECT_EQ(error_of([&] { sync_replicated_gradients(g, mesh["tp"], {.tolerance = 0}); }).code(),
                ErrorCode::mismatch);
    }
  });
}

TEST(ReplicatedViews, OtherOptionsOnOneRankAreNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Vectors g;
    g.put("w", replicated_layout(mesh, {4}), [&](std::size_t) { return 1.0f; });
    const SyncOptions exact{.tolerance = 0}, average{.on_drift = OnDrift::average};
    EXPECT_STREQ(
        error_of([&] {
          sync_replicated_gradients(g.all(), mesh["tp"], rank.rank == 0 ? exact : average);
        }).what(),
        "sync_replicated_gradients: ranks gave different options: tolerance 0 and on_drift error on tp rank "
        "0, tolerance unset and on_drift average on tp rank 1");
  });
}

TEST(ReplicatedViews, MemoryThatIsNoGradientIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    alignas(8) std::byte memory[64] = {};
    const auto text = [&](std::byte* data, const Shape& shape) {
      Gradient g[] = {{"w", {data, DType::f32, {}, shape, row_major(shape)}, nullptr}};
      return std::string(error_of([&] { average_gradients(g, mesh["tp"]); }).what());
    };
    EXPECT_EQ(text(nullptr, {4}), "average_gradients: the gradient of \"w\" has no memory");
    EXPECT_EQ(text(memory, {-4}),
              "average_gradients: the gradient of \"w\" has shape (-4); expected no negative extent");
    EXPECT_EQ(text(memory, {std::int64_t{1} << 62, 2}),
              "average_gradients: the gradient of \"w\" has shape (4611686018427387904, 2); its bytes do not "
              "fit 64 bits");
    EXPECT_EQ(text(memory + 1, {4}),
              fmt::format("average_gradients: the gradient of \"w\" begins at {}; expected a multiple of 4 "
                          "bytes for f32",
                          static_cast<const void*>(memory + 1)));
    std::vector<float> twice(6);
    Gradient tied[] = {{"x", view(twice.data(), 4), nullptr}, {"y", view(twice.data() + 3, 3), nullptr}};
    EXPECT_STREQ(error_of([&] { average_gradients(tied, mesh["tp"]); }).what(),
                 "average_gradients: the gradients of \"x\" and \"y\" overlap; give each once");
    Gradient null[] = {make_gradient<float>("w", nullptr, replicated_layout(mesh, {4}))};
    EXPECT_STREQ(error_of([&] { sync_replicated_gradients(null, mesh["tp"]); }).what(),
                 "sync_replicated_gradients: the gradient of \"w\" has no memory");
    average_gradients({}, mesh["tp"]);
  });
}

TEST(ReplicatedViews, ALayoutOverAnotherMeshIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}}), other(rank.group(), {{"x", 2}});
    Vectors g;
    g.put("w", make_layout(other, {Partial{}}, {4}), [&](std::size_t) { return 1.0f; });
    const Error e = error_of([&] { average_gradients(g.all(), mesh["dp"]); });
    EXPECT_EQ(e.code(), ErrorCode::layout);
    EXPECT_STREQ(
        e.what(),
        "average_gradients: the gradient of \"w\" is laid out over x=2, another mesh than that of dp");
    DeviceMesh one(rank.group(), {{"dp", 2}, {"one", 1}});
    EXPECT_STREQ(
        error_of([&] { sync_replicated_gradients(g.all(), one["one"]); }).what(),
        "sync_replicated_gradients: the gradient of \"w\" is laid out over x=2, another mesh than that of "
        "one");
  });
}

// Their sum is infinite. Elements next to them, tiny ones too, keep the bits of the plain average.
TEST(ReplicatedViews, AveragesOfNumbersNearTheLargestAreFinite) {
  for (const int ranks : {2, 3})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
      const auto average = [&]<class T>(T large, T other, Placement placement) {
        const T tiny = std::numeric_limits<T>::denorm_min();
        std::vector<T> w = {rank.rank == 0 ? large : other, -large, tiny, rank.rank == 0 ? T(1) : T(1.5),
                            3 * tiny};
        std::vector<T> plain(w.begin() + 2, w.end());
        Gradient g[] = {{"w", view(w), make_layout(mesh, {placement}, {5})}};
        sync_replicated_gradients(g, mesh["tp"], {.tolerance = 0.5});
        rank.group().all_reduce(view(plain), view(plain), {.op = ReduceOp::avg}).wait();
        EXPECT_EQ(w[1], -large);
        EXPECT_TRUE(w[0] >= other && w[0] <= large) << w[0];
        EXPECT_EQ(std::vector<T>(w.begin() + 2, w.end()), plain) << "not the bits of the average";
        return w[0];
      };
      constexpr float kMost = std::numeric_limits<float>::max();
      constexpr double kLargest = std::numeric_limits<double>::max();
      for (const Placement& placement : {Placement(Replicate{}), Placement(Partial{ReduceOp::avg})}) {
        EXPECT_EQ(average(kMost, kMost, placement), kMost);
        const float other = kMost / 2;
        EXPECT_NEAR(average(kMost, other, placement) / kMost, rank.size == 2 ? 0.75f : 2.0f / 3, 1e-6f);
        EXPECT_EQ(average(kLargest, kLargest, placement), kLargest);
      }
      std::vector<bf16> b = {bf16(rank.rank == 0 ? 3.3e38f : 3.2e38f)};
      Gradient g[] = {{"b", view(b), replicated_layout(mesh, {1})}};
      sync_replicated_gradients(g, mesh["tp"], {.tolerance = 0.5});
      EXPECT_NEAR(static_cast<float>(b[0]) / 3.2e38f, 1, 0.04);
    });
}

// A value that is infinite or NaN on all ranks stays as it is.
TEST(ReplicatedViews, AveragesOfInfinitiesStayInfinite) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<float> w = {infinity, kNaN, rank.rank == 0 ? 1.0f : 2.0f};
    Gradient g[] = {{"w", view(w), make_layout(mesh, {Partial{ReduceOp::avg}}, {3})}};
    average_gradients(g, mesh["dp"]);
    EXPECT_EQ(w[0], infinity);
    EXPECT_TRUE(std::isnan(w[1]));
    EXPECT_EQ(w[2], 1.5f);
  });
}

// The distance of the two values overflows a double, and so does the sum of distance and magnitude.
TEST(ReplicatedViews, TheEndsOfF64AreDrift) {
  for (const double other : {-1.7e308, 0.2e308})
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"tp", 2}});
      std::vector<double> w = {rank.rank == 0 ? 1.7e308 : other};
      Gradient g[] = {{"w", view(w), replicated_layout(mesh, {1})}};
      const Error e = error_of([&] { sync_replicated_gradients(g, mesh["tp"]); });
      EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    });
}

// The lists, the options and the bits are compared in one exchange, if nothing differs.
TEST(ReplicatedViews, OneSmallExchangeComparesEverything) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Vectors g;
    for (int i = 0; i < 40; ++i)
      g.put("w" + std::to_string(i),
            make_layout(mesh, {Replicate{}, i % 2 == 0 ? Placement(Shard{0}) : Placement(Replicate{})}, {4}),
            [&](std::size_t) { return static_cast<float>(i + (i % 2 == 0 ? rank.rank % 2 : 0)); });
    const auto calls = [&] { return test::calls_made(rank.group()); };
    const std::size_t before = calls();
    sync_replicated_gradients(g.all(), mesh);
    EXPECT_EQ(calls(), before + 1);
    BucketReducer reducer(mesh, {{"w", 4}});
    reducer.ready(0);
    EXPECT_EQ(calls(), before + 3) << "the comparison, and the bucket";
    reducer.finish();
  });
}

// Only one rank cannot reduce its gradients. All ranks get the error.
TEST(ReplicatedViews, APlacementThatOneRankAloneCannotReduceIsAMismatch) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Vectors g;
    g.put("w",
          rank.rank == 0 ? replicated_layout(mesh, {2}) : make_layout(mesh, {Partial{ReduceOp::max}}, {2}),
          [](std::size_t) { return 1.0f; });
    EXPECT_EQ(error_of([&] { sync_replicated_gradients(g.all(), mesh["tp"]); }).code(), ErrorCode::mismatch);
  });
}

}  // namespace
}  // namespace weft::replicated_test
