#include "weft/train/gradient_reducer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "train/bag.hpp"
#include "weft/base/random.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft::gradient_reducer_test {
namespace {

using test::Bag;
using test::error_of;
using test::gradient;
using test::Rank;
using test::Ranks;
using test::use;

// Some parameters over a mesh of one data axis, and what each rank contributes: small integers that tell
// rank, parameter, index and pass apart, and whose sums are exact.
struct Bench {
  explicit Bench(Rank& rank_in, std::vector<std::int64_t> sizes_in = {5, 1, 37, 0, 16, 8})
      : rank(rank_in), mesh(rank.group(), {{"dp", rank.size}}), sizes(std::move(sizes_in)) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::string name("p");
      name += std::to_string(i);
      p.push_back(&bag.put(rank.context, name, {sizes[i]}, replicated_layout(mesh, {sizes[i]})));
    }
  }
  LayoutRef partial(std::size_t i, ReduceOp op = ReduceOp::sum) const {
    return make_layout(mesh, {Partial{op}}, {sizes[i]});
  }
  static float value(int r, std::size_t i, std::size_t at, int pass) {
    return static_cast<float>((r + 1) * 100 + static_cast<int>(i) * 7 + static_cast<int>(at) + pass * 1000);
  }
  void use_one(std::size_t i, int pass, ReduceOp op = ReduceOp::sum, bool last = true) {
    use(
        *p[i], partial(i, op), [&](std::size_t at) { return value(rank.rank, i, at, pass); }, last);
  }
  void backward(int pass) {
    for (std::size_t i = p.size(); i-- > 0;) use_one(i, pass);
  }
  // The gradient when each rank contributed the sum of `passes`.
  std::vector<float> summed(std::size_t i, const std::vector<int>& passes) const {
    std::vector<float> expected(static_cast<std::size_t>(sizes[i]));
    for (std::size_t at = 0; at < expected.size(); ++at)
      for (int r = 0; r < rank.size; ++r)
        for (const int pass : passes) expected[at] += value(r, i, at, pass);
    return expected;
  }
  void expect_summed(const std::vector<int>& passes) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      EXPECT_EQ(gradient(*p[i]), summed(i, passes)) << p[i]->path();
      EXPECT_EQ(p[i]->gradient_layout(), replicated_layout(mesh, {sizes[i]}));
    }
  }
  void zero() {
    for (Parameter* parameter : p) parameter->zero_gradient();
  }

  Rank& rank;
  DeviceMesh mesh;
  std::vector<std::int64_t> sizes;
  Bag bag;
  std::vector<Parameter*> p;
};

TEST(GradientReducer, SumsEveryGradientOnEveryPass) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const int ranks : {1, 2, 3, 4})
      test::run_ranks(kind, ranks, [](Rank& rank) {
        Bench bench(rank);
        GradientReducer reducer(bench.p, bench.mesh);
        for (int pass = 0; pass < 4; ++pass) {
          bench.backward(pass);
          reducer.finish();
          bench.expect_summed({pass});
          bench.zero();
        }
      });
}

TEST(GradientReducer, GradientsLiveInSharedBucketsAndAreReducedWhileBackwardGoesOn) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    GradientReducer reducer(bench.p, bench.mesh, {.bucket_bytes = 100});
    EXPECT_TRUE(reducer.bucket_bytes().empty());
    bench.backward(0);
    reducer.finish();
    bench.expect_summed({0});
    EXPECT_EQ(reducer.posted_early(), 0);
    // In the order in which they became final, each gradient at a multiple of 64 bytes: p5 + p4 = 128 bytes
    // close a bucket, p3 (empty) + p2 = 192 another.
    EXPECT_EQ(reducer.bucket_bytes(), (std::vector<std::int64_t>{128, 192, 128}));
    std::vector<const std::byte*> places;
    for (const Parameter* p : bench.p) {
      places.push_back(p->gradient().data());
      EXPECT_EQ(p->gradient().storage().memory(), Memory::shared);
    }
    EXPECT_EQ(places[4], places[5] + 64);

    bench.zero();
    bench.use_one(5, 1);
    EXPECT_EQ(reducer.posted_early(), 0);
    bench.use_one(4, 1);
    EXPECT_EQ(reducer.posted_early(), 1);
    bench.use_one(2, 1);  // p3, of the same bucket, is not final yet
    EXPECT_EQ(reducer.posted_early(), 1);
    bench.use_one(3, 1);
    EXPECT_EQ(reducer.posted_early(), 2);
    bench.use_one(1, 1);
    bench.use_one(0, 1);
    EXPECT_EQ(reducer.posted_early(), 3);
    reducer.finish();
    bench.expect_summed({1});
    for (std::size_t i = 0; i < places.size(); ++i) EXPECT_EQ(bench.p[i]->gradient().data(), places[i]);
  });
}

TEST(GradientReducer, RanksMayReachGradientsInDifferentOrders) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Bench bench(rank);
    GradientReducer reducer(bench.p, bench.mesh, {.bucket_bytes = 64});
    for (int pass = 0; pass < 3; ++pass) {
      for (std::size_t k = 0; k < bench.p.size(); ++k)
        bench.use_one((k * 5 + static_cast<std::size_t>(rank.rank + pass)) % bench.p.size(), pass);
      reducer.finish();
      bench.expect_summed({pass});
      bench.zero();
    }
  });
}

TEST(GradientReducer, AccumulatesInsideNoSync) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    GradientReducer reducer(bench.p, bench.mesh);
    for (int step = 0; step < 3; ++step) {
      {
        const NoSync off = reducer.no_sync();
        bench.backward(0);
        const NoSync nested = reducer.no_sync();
        bench.backward(1);
      }
      bench.backward(2);
      reducer.finish();
      bench.expect_summed({0, 1, 2});
      bench.zero();
    }
  });
}

TEST(GradientReducer, AGradientOfAnEarlierMicroBatchOnlyIsReducedToo) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {3, 4});
    GradientReducer reducer(bench.p, bench.mesh);
    for (int step = 0; step < 2; ++step) {
      {
        const NoSync off = reducer.no_sync();
        bench.backward(0);
      }
      bench.use_one(0, 1);
      reducer.finish();
      EXPECT_EQ(gradient(*bench.p[0]), bench.summed(0, {0, 1}));
      EXPECT_EQ(gradient(*bench.p[1]), bench.summed(1, {0}));
      bench.zero();
    }
  });
}

// In every micro-batch but the last nothing is sent; a misuse of no_sync() is found before anything is sent.
TEST(GradientReducer, NoSyncAtTheWrongTimeIsRefused) {
  for (const int ranks : {1, 2})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      Bench bench(rank, {3, 4});
      std::optional<NoSync> off;
      {
        GradientReducer reducer(bench.p, bench.mesh, {.bucket_bytes = 1});
        for (int step = 0; step < 2; ++step) {  // without buckets, and with
          bench.use_one(1, 0);
          EXPECT_EQ(test::error_text([&] { const NoSync late = reducer.no_sync(); }),
                    "bad_argument: gradient_reducer: no_sync() after the gradient of \"p1\" became final; "
                    "finish() comes first");
          bench.use_one(0, 0);
          reducer.finish();
          bench.expect_summed({0});
          bench.zero();
          off.emplace(reducer.no_sync());
          const std::int64_t early = reducer.posted_early();
          bench.backward(1);
          EXPECT_EQ(reducer.posted_early(), early);
          EXPECT_EQ(test::error_text([&] { reducer.finish(); }),
                    "bad_argument: gradient_reducer: finish() inside no_sync(); end that scope before the "
                    "last pass");
          off.reset();
          bench.backward(2);
          reducer.finish();
          bench.expect_summed({1, 2});
          bench.zero();
        }
        off.emplace(reducer.no_sync());
      }
      off.reset();  // it may outlive the reducer
    });
}

TEST(GradientReducer, MeansOfRanksAreAveraged) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Bench bench(rank, {3, 8});
    GradientReducer reducer(bench.p, bench.mesh);
    for (int pass = 0; pass < 2; ++pass) {
      bench.use_one(1, pass, ReduceOp::avg);
      bench.use_one(0, pass, ReduceOp::sum);
      reducer.finish();
      EXPECT_EQ(gradient(*bench.p[0]), bench.summed(0, {pass}));
      std::vector<float> mean = bench.summed(1, {pass});
      for (float& m : mean) m /= 4;
      EXPECT_EQ(gradient(*bench.p[1]), mean);
      EXPECT_EQ(bench.p[1]->gradient_layout(), replicated_layout(bench.mesh, {8}));
      bench.zero();
    }
  });
}

TEST(GradientReducer, OnATwoDimensionalMeshOnlyTheDataAxisIsReduced) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Bag bag;
    Parameter& p = bag.put(rank.context, "w", {5}, make_layout(mesh, {{"tp", Shard{0}}}, {5}));
    GradientReducer reducer({&p}, mesh["dp"]);
    use(p, make_layout(mesh, {{"dp", Partial{}}, {"tp", Shard{0}}}, {5}),
        [&](std::size_t i) { return static_cast<float>(10 * rank.rank + static_cast<int>(i)); });
    reducer.finish();
    const int peer = (rank.rank + 2) % 4;
    std::vector<float> expected;
    for (int i = 0; i < (rank.rank % 2 == 0 ? 3 : 2); ++i)
      expected.push_back(static_cast<float>(10 * (rank.rank + peer) + 2 * i));
    EXPECT_EQ(gradient(p), expected);
    EXPECT_EQ(p.gradient_layout(), p.layout());
  });
}

TEST(GradientReducer, UnusedParametersAreNamedOnEveryRank) {
  for (const int ranks : {1, 2})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      Bench bench(rank, {3, 4, 5});
      GradientReducer reducer(bench.p, bench.mesh);
      for (int pass = 0; pass < 2; ++pass) {  // without buckets, and with
        bench.use_one(0, pass);
        if (rank.rank == 1) bench.use_one(1, pass);
        const Error e = error_of([&] { reducer.finish(); });
        EXPECT_EQ(e.code(), ErrorCode::bad_argument);
        const std::string others = rank.size == 2 ? "; \"p2\" on dp rank 1" : "";
        EXPECT_EQ(e.what(), "gradient_reducer: no backward pass used \"p1\", \"p2\" on dp rank 0" + others +
                                "; GradientReducerOptions::unused = zeros lets such ranks contribute zeros");
        EXPECT_EQ(e.ranks().size(), static_cast<std::size_t>(rank.size));
        EXPECT_FALSE(bench.p[2]->has_gradient());
        bench.zero();
      }
      bench.backward(2);
      reducer.finish();
      bench.expect_summed({2});
    });
}

TEST(GradientReducer, OnRequestUnusedParametersAreZeros) {
  for (const int ranks : {1, 3})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      Bench bench(rank, {3, 4, 5});
      GradientReducer reducer(bench.p, bench.mesh, {.unused = Unused::zeros});
      for (int pass = 0; pass < 3; ++pass) {
        bench.use_one(0, pass);
        if (rank.rank == 1) bench.use_one(1, pass);
        reducer.finish();
        EXPECT_EQ(gradient(*bench.p[0]), bench.summed(0, {pass}));
        for (std::size_t at = 0; at < 4; ++at)
          EXPECT_EQ(gradient(*bench.p[1])[at], rank.size > 1 ? Bench::value(1, 1, at, pass) : 0);
        EXPECT_EQ(gradient(*bench.p[2]), std::vector<float>(5, 0.0f));
        EXPECT_EQ(bench.p[2]->gradient_layout(), replicated_layout(bench.mesh, {5}));
        bench.zero();
      }
    });
}

TEST(GradientReducer, ATiedWeightIsReducedAfterItsLastUse) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {3, 4});
    GradientReducer reducer(bench.p, bench.mesh, {.bucket_bytes = 1});
    for (int pass = 0; pass < 3; ++pass) {
      bench.use_one(1, pass, ReduceOp::sum, false);
      bench.use_one(0, pass);
      const std::int64_t early = reducer.posted_early();
      bench.use_one(1, 7);
      EXPECT_EQ(reducer.posted_early() - early, pass == 0 ? 0 : 1);
      reducer.finish();
      EXPECT_EQ(gradient(*bench.p[0]), bench.summed(0, {pass}));
      EXPECT_EQ(gradient(*bench.p[1]), bench.summed(1, {pass, 7}));
      bench.zero();
    }
  });
}

TEST(GradientReducer, WhatIsNotPartialIsRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {4});
    GradientReducer reducer(bench.p, bench.mesh);
    const auto text = [&](LayoutRef layout) {
      bench.zero();
      const Error e = error_of([&] { use(*bench.p[0], layout, [](std::size_t) { return 1.0f; }); });
      EXPECT_EQ(e.code(), ErrorCode::layout);
      return std::string(e.what());
    };
    EXPECT_EQ(text(replicated_layout(bench.mesh, {4})),
              "gradient_reducer: the gradient of \"p0\" is Replicate on dp=2; expected Partial(sum), or "
              "Partial(avg): there is nothing to reduce");
    EXPECT_EQ(text(make_layout(bench.mesh, {Partial{ReduceOp::max}}, {4})),
              "gradient_reducer: the gradient of \"p0\" is Partial(max) on dp=2; expected Partial(sum), or "
              "Partial(avg): there is nothing to reduce");
    bench.zero();
    bench.use_one(0, 0);
    reducer.finish();
    EXPECT_EQ(text(bench.partial(0, ReduceOp::avg)),
              "gradient_reducer: the gradient of \"p0\" is Partial(avg) on dp=2; in the passes before, or on "
              "another axis, it was Partial(sum)");
  });
}

TEST(GradientReducer, TwoSynchronisedPassesBeforeFinishAreRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {4});
    GradientReducer reducer(bench.p, bench.mesh);
    bench.use_one(0, 0);
    EXPECT_STREQ(error_of([&] { bench.use_one(0, 1); }).what(),
                 "gradient_reducer: the gradient of \"p0\" became final twice; several backward passes "
                 "before finish() need no_sync() around all but the last");
  });
}

TEST(GradientReducer, RanksWithDifferentParametersAreFoundOut) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {4, rank.rank == 0 ? 6 : 7});
    GradientReducer reducer(bench.p, bench.mesh);
    bench.backward(0);
    const Error e = error_of([&] { reducer.finish(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(e.what(),
                 "gradient_reducer: parameter 1 is \"p1\" (x6) on dp rank 0, but \"p1\" (x7) on dp rank 1");
    ASSERT_EQ(e.ranks().size(), 2u);
    EXPECT_EQ(e.ranks()[1], 1);
  });
}

// Ranks are named as the axis and as the group of the mesh number them.
TEST(GradientReducer, OtherPlacementsOnOneRankAreNamed) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}, {"dp", 2}});
    Bag bag;
    Parameter& w = bag.put(rank.context, "w", {3}, replicated_layout(mesh, {3}));
    GradientReducer reducer(bag.parameters(), mesh["dp"]);
    use(w,
        make_layout(mesh, {rank.rank == 3 ? Placement(Partial{}) : Placement(Replicate{}), Partial{}}, {3}),
        [](std::size_t) { return 1.0f; });
    if (rank.rank < 2) return reducer.finish();
    const Error e = error_of([&] { reducer.finish(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(e.what(),
                 "gradient_reducer: the gradient of \"w\" is Replicate on tp for dp rank 0 (rank 2 of "
                 "\"world\"), but Partial(sum) for dp rank 1 (rank 3 of \"world\")");
    ASSERT_EQ(e.ranks().size(), 2u);
    EXPECT_EQ(e.ranks()[1], 1);
  });
}

TEST(GradientReducer, AnEmptyMeshIsRefused) {
  EXPECT_EQ(test::error_text([] { GradientReducer({}, DeviceMesh()); }),
            "bad_argument: gradient_reducer: axes is an empty DeviceMesh, made by default or moved from");
}

// A second one would take the gradient out of the first one's bucket.
TEST(GradientReducer, ASecondOneIsRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {4, 5});
    auto first = std::make_unique<GradientReducer>(std::vector<Parameter*>{bench.p[1]}, bench.mesh);
    EXPECT_STREQ(error_of([&] { GradientReducer(bench.p, bench.mesh); }).what(),
                 "parameter \"p1\": its gradient belongs to another reducer already; one reducer reduces "
                 "over several axes");
    bench.backward(0);  // nobody but the first one listens
    first->finish();
    EXPECT_EQ(gradient(*bench.p[1]), bench.summed(1, {0}));
    first.reset();
    bench.zero();
    GradientReducer second(bench.p, bench.mesh);
    bench.backward(1);
    second.finish();
    bench.expect_summed({1});
  });
}

// Ranks that cut it otherwise would compare its values with other ranks.
TEST(GradientReducer, RefusesAParameterThatOneRankCuts) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const bool cuts = rank.rank == 0;
    const LayoutRef layout = make_layout(mesh, {cuts ? Placement(Shard{0}) : Placement(Replicate{})}, {8});
    Bag bag;
    Parameter& w = bag.put(rank.context, "w", {8}, layout);
    std::ranges::fill(w.write_master().f32(), 1.0f);
    GradientReducer reducer(bag.parameters(), mesh);
    use(w, cuts ? layout : make_layout(mesh, {Partial{}}, {8}), [](std::size_t) { return 1.0f; });
    const Error e = error_of([&] { reducer.finish(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(e.what(),
                 "gradient_reducer: parameter 0 is \"w\" (x8, cut along dp, with values) on dp rank 0, but "
                 "\"w\" (x8, with values) on dp rank 1");
  });
}

TEST(GradientReducer, ReducesOverSeveralAxes) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}, {"domain", 2}});
    Bag bag;
    Parameter& w = bag.put(rank.context, "w", {3}, replicated_layout(mesh, {3}));
    GradientReducer reducer(bag.parameters(), mesh[{"dp", "domain"}]);
    const LayoutRef partial = make_layout(mesh, {Partial{}, Replicate{}, Partial{}}, {3});
    for (int pass = 0; pass < 2; ++pass) {
      use(w, partial, [&](std::size_t) { return static_cast<float>(rank.rank); });
      reducer.finish();
      EXPECT_EQ(gradient(w), std::vector<float>(3, 6.0f));
      EXPECT_EQ(w.gradient_layout(), w.layout());
      w.zero_gradient();
    }
    use(
        w, make_layout(mesh, {Partial{}, Replicate{}, Replicate{}}, {3}), [](std::size_t) { return 1.0f; },
        false);
    EXPECT_STREQ(error_of([&] { w.announce_final(); }).what(),
                 "gradient_reducer: the gradient of \"w\" is Replicate on domain=2; expected Partial(sum), "
                 "or Partial(avg): there is nothing to reduce");
  });
}

// A parameter that is cut along an axis, evenly or not, has different elements on each rank of the axis, so
// its gradients are summed only over the other axes.
TEST(GradientReducer, AxesAlongWhichAParameterIsCutAreLeftToIt) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"h", 2}});
    for (const bool along_both : {true, false}) {
      SCOPED_TRACE(along_both);
      const DeviceMesh axes = along_both ? mesh : mesh["h"];
      Bag bag;
      Parameter &w = bag.put(rank.context, "w", {3}, replicated_layout(mesh, {3})),
                &gain = bag.put(rank.context, "gain", {5}, make_layout(mesh, {Replicate{}, Shard{0}}, {5})),
                &corner = bag.put(rank.context, "corner", {4}, make_layout(mesh, {Shard{0}, Shard{0}}, {4}));
      const LayoutRef of_w = make_layout(mesh, {Partial{}, Partial{}}, {3}),
                      of_gain = make_layout(mesh, {Partial{}, Shard{0}}, {5});
      const int d = mesh["d"].rank(), h = mesh["h"].rank();
      GradientReducer reducer(bag.parameters(), axes, {.unused = Unused::zeros});
      const auto backward = [&](float pass, bool uses_gain) {
        use(corner, corner.layout(), [&](std::size_t) { return pass + static_cast<float>(rank.rank); });
        if (uses_gain)
          use(gain, of_gain,
              [&](std::size_t i) { return pass + static_cast<float>(10 * d + h) + static_cast<float>(i); });
        use(w, of_w, [&](std::size_t) { return pass * static_cast<float>(rank.rank + 1); });
      };
      const auto expect = [&](float passes, bool all_used_gain) {
        EXPECT_EQ(gradient(corner), std::vector<float>(1, passes + static_cast<float>(rank.rank)));
        EXPECT_EQ(corner.gradient_layout(), corner.layout());
        EXPECT_EQ(gradient(w),
                  std::vector<float>(3, passes * (along_both ? 10.0f : 4.0f * static_cast<float>(d) + 3.0f)));
        EXPECT_EQ(w.gradient_layout(),
                  along_both ? w.layout() : make_layout(mesh, {Partial{}, Replicate{}}, {3}));
        std::vector<float> summed(h == 0 ? 3 : 2);
        for (std::size_t i = 0; i < summed.size(); ++i)
          for (const int of : {0, 1})
            if ((along_both || of == d) && (of == 0 || all_used_gain))
              summed[i] += passes + static_cast<float>(10 * of + h) + static_cast<float>(i);
        EXPECT_EQ(gradient(gain), summed);
        EXPECT_EQ(gain.gradient_layout(), along_both ? gain.layout() : of_gain);
        for (Parameter* p : bag.parameters()) p->zero_gradient();
      };
      for (const float pass : {1.0f, 2.0f, 3.0f}) {
        backward(pass, true);
        reducer.finish();
        ASSERT_NO_FATAL_FAILURE(expect(pass, true));
      }
      backward(4, d == 0);
      reducer.finish();
      ASSERT_NO_FATAL_FAILURE(expect(4, false));
    }
  });
}

TEST(GradientReducer, WhatIsCutAlongAnAxisHasGradientsThatAre) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"d", 1}, {"h", 2}});
    Bag bag;
    Parameter& none = bag.put(rank.context, "none", {0}, make_layout(mesh, {Replicate{}, Shard{0}}, {0}));
    GradientReducer reducer(bag.parameters(), mesh["h"]);
    none.place_weight(Tensor(rank.context, {0}).with_layout(replicated_layout(mesh, {0})));  // gathered
    EXPECT_STREQ(
        error_of([&] {
          use(none, make_layout(mesh, {Replicate{}, Partial{}}, {0}), [](std::size_t) { return 0.0f; });
        }).what(),
        "gradient_reducer: the gradient of \"none\" is Partial(sum) on h=2; expected Shard(0), as the "
        "parameter is");
  });
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"h", 2}});
    Bag bag;
    Parameter &w = bag.put(rank.context, "w", {3}, replicated_layout(mesh, {3})),
              &gain = bag.put(rank.context, "gain", {4}, make_layout(mesh, {Replicate{}, Shard{0}}, {4}));
    GradientReducer reducer(bag.parameters(), mesh, {.hook = bf16_hook(rank.context)});
    use(w, make_layout(mesh, {Partial{}, Partial{}}, {3}), [](std::size_t) { return 1.0f; });
    use(gain, make_layout(mesh, {Partial{}, Shard{0}}, {4}), [](std::size_t) { return 1.0f; });
    EXPECT_STREQ(
        error_of([&] { reducer.finish(); }).what(),
        "gradient_reducer: options.hook \"bf16\" sees the buckets of one set of axes; parameters that are "
        "cut along some of d,h are reduced over 2 sets: give them a GradientReducer of their own");
  });
}

// A norm over maps that are cut in space has an element for each pixel, cut as the maps are; other weights
// are whole.
TEST(GradientReducer, TrainsANormOverSpaceAsOneRankDoes) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const auto make = [] {
      auto model = std::make_unique<Sequential>();
      model->append("conv",
                    std::make_unique<Conv2d>(Conv2dConfig{.in = 2, .out = 2, .kernel = 3, .padding = 1}));
      model->append("norm", std::make_unique<LayerNorm>(Shape{2, 7, 4}));
      return model;
    };
    const auto set_up = [](Module& model, Compute& compute) {
      for (Parameter* p : model.parameters()) p->set_init(Normal{0.5});
      materialise(model, compute);
      initialise(model, 3);
    };
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"h", 2}});
    const auto serial = make(), split = make();
    const DomainManager manager = apply_domain_parallel(*split, mesh["h"], {.data = mesh["d"]});
    replicate(*split, mesh);
    set_up(*serial, compute);
    set_up(*split, compute);
    GradientReducer reducer(split->parameters(), mesh);
    SGD sgd_of_serial(compute, serial->parameters(), {}), sgd(compute, split->parameters(), {});
    Tensor x(rank.context, {4, 2, 7, 4});
    RandomStream(7, "x").normal(0, x.count(), x.f32().data());
    for (int step = 0; step < 4; ++step) {
      Frame frame(compute);
      serial->backward(serial->forward(x, frame), frame);  // the loss is half the sum of squares
      sgd_of_serial.step(0.01);
      split->backward(split->forward(distribute(x, manager.layout(x.shape())), frame), frame);
      reducer.finish();
      sgd.step(0.01);
      for (const auto& model : {serial.get(), split.get()})
        for (Parameter* p : model->parameters()) p->zero_gradient();
    }
    for (Parameter* p : split->parameters()) {
      const Tensor got = full(p->master()), want = serial->parameter(p->path())->master();
      for (std::size_t i = 0; i < want.f32().size(); ++i)
        ASSERT_NEAR(got.f32()[i], want.f32()[i], 5e-6) << p->path() << " " << i;
    }
  });
}

// The gradient of a parameter that a rank did not use has the placements that a use would have given, on the
// other axes, too: a sum over tp is still to come.
TEST(GradientReducer, ZerosAreLaidOutAsTheUsesOfOtherRanks) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Bag bag;
    Parameter& w = bag.put(rank.context, "w", {3}, replicated_layout(mesh, {3}));
    GradientReducer reducer(bag.parameters(), mesh["dp"], {.unused = Unused::zeros});
    for (int pass = 0; pass < 2; ++pass) {
      if (rank.rank < 2)
        use(w, make_layout(mesh, {Partial{}, Partial{}}, {3}), [](std::size_t) { return 2.0f; });
      reducer.finish();
      EXPECT_EQ(w.gradient_layout(), make_layout(mesh, {Replicate{}, Partial{}}, {3}));
      EXPECT_EQ(gradient(w), std::vector<float>(3, 2.0f));
      w.zero_gradient();
    }
  });
}

TEST(GradientReducer, StopsListeningWhenItGoes) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank, {4});
    { const GradientReducer reducer(bench.p, bench.mesh); }
    use(*bench.p[0], replicated_layout(bench.mesh, {4}), [](std::size_t) { return 1.0f; });  // nobody objects
    EXPECT_EQ(gradient(*bench.p[0]), std::vector<float>(4, 1.0f));
  });
}

TEST(GradientReducer, SendsBf16OnRequest) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    GradientReducer reducer(bench.p, bench.mesh, {.hook = bf16_hook(rank.context)});
    for (int pass = 1; pass < 4; ++pass) {
      bench.backward(pass);
      reducer.finish();
      for (std::size_t i = 0; i < bench.p.size(); ++i) {
        const std::vector<float> got = gradient(*bench.p[i]), exact = bench.summed(i, {pass});
        for (std::size_t k = 0; k < got.size(); ++k) {
          EXPECT_NEAR(got[k], exact[k], 0x1p-7 * static_cast<double>(exact[k]));
          EXPECT_EQ(got[k], static_cast<float>(bf16(got[k])));
        }
      }
      bench.zero();
    }
  });
}

// Before their deadline, at the end of their first step.
TEST(GradientReducer, WhatIsWrongOnOneRankIsToldToAll) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Bench bench(rank, {4});
    std::optional<GradientReducer> other;
    const auto step = [&](const GradientReducer::Options& options) {
      GradientReducer reducer(bench.p, bench.mesh, options);
      bench.backward(1);
      reducer.finish();
    };
    const auto told = [&](const std::string& why) {
      return rank.rank == 2 ? why : "gradient_reducer: dp rank 2 failed: " + why;
    };
    EXPECT_EQ(error_of([&] { step({.bucket_bytes = rank.rank == 2 ? 0 : 64}); }).what(),
              told("gradient_reducer: options.bucket_bytes is 0; expected 1 or more"));
    bench.zero();
    if (rank.rank == 2) other.emplace(bench.p, bench.mesh);
    EXPECT_EQ(error_of([&] { step({}); }).what(),
              told("parameter \"p0\": its gradient belongs to another reducer already; one reducer "
                   "reduces over several axes"));
    other.reset();
    bench.zero();
    step({});
    bench.expect_summed({1});
  });
}

TEST(GradientReducer, BucketsHaveAPositiveSize) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Bench bench(rank, {4});
    EXPECT_STREQ(error_of([&] { GradientReducer(bench.p, bench.mesh, {.bucket_bytes = 0}); }).what(),
                 "gradient_reducer: options.bucket_bytes is 0; expected 1 or more");
  });
}

}  // namespace
}  // namespace weft::gradient_reducer_test
