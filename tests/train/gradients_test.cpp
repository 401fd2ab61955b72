#include "weft/train/gradients.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "train/bag.hpp"

namespace weft::gradients_test {
namespace {

using test::Bag;
using test::error_of;
using test::gradient;
using test::Rank;
using test::Ranks;
using test::use;

// One parameter of (4) elements per placement on tp.
struct Bench {
  explicit Bench(Rank& rank_in) : rank(rank_in), mesh(rank.group(), {{"tp", rank.size}}) {}
  Parameter& with(const std::string& name, const Placement& of_gradient,
                  const std::function<float(std::size_t)>& f) {
    Parameter& p = bag.put(rank.context, name, {4},
                           make_layout(mesh, {is_shard(of_gradient) ? of_gradient : Replicate{}}, {4}));
    use(p, make_layout(mesh, {of_gradient}, {4}), f);
    return p;
  }
  void sync(const SyncOptions& options = {}) {
    sync_replicated_gradients(bag.parameters(), mesh["tp"], options);
  }
  LayoutRef replicated() const { return replicated_layout(mesh, {4}); }

  Rank& rank;
  DeviceMesh mesh;
  Bag bag;
};

// Element i of a rank's contribution.
float contribution(int rank, std::size_t i) {
  return static_cast<float>(10 * (rank + 1) + static_cast<int>(i));
}

TEST(Replicated, PartialIsSummed) {
  for (const int ranks : {1, 2, 3, 4})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      Bench bench(rank);
      Parameter& p =
          bench.with("shared_bias", Partial{}, [&](std::size_t i) { return contribution(rank.rank, i); });
      bench.sync();
      for (std::size_t i = 0; i < 4; ++i) {
        float sum = 0;
        for (int r = 0; r < rank.size; ++r) sum += contribution(r, i);
        EXPECT_EQ(gradient(p)[i], sum);
      }
      EXPECT_EQ(p.gradient_layout(), bench.replicated());
    });
}

// Replicas that rounding has moved apart become one: the mean.
TEST(Replicated, ReplicateIsAveraged) {
  for (const int ranks : {1, 2, 4})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      Bench bench(rank);
      constexpr float kStep = 0x1p-20f;
      Parameter& p = bench.with("norm", Replicate{}, [&](std::size_t i) {
        return static_cast<float>(i + 1) + static_cast<float>(rank.rank) * kStep;
      });
      bench.sync();
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_EQ(gradient(p)[i], static_cast<float>(i + 1) + static_cast<float>(rank.size - 1) * kStep / 2);
      EXPECT_EQ(p.gradient_layout(), bench.replicated());
    });
}

TEST(Replicated, MeansAreAveragedWhateverTheirDistance) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    Parameter& p =
        bench.with("mean", Partial{ReduceOp::avg}, [&](std::size_t) { return rank.rank == 0 ? 2.0f : 8.0f; });
    bench.sync();
    EXPECT_EQ(gradient(p), std::vector<float>(4, 5.0f));
    EXPECT_EQ(p.gradient_layout(), bench.replicated());
  });
}

TEST(Replicated, ShardIsLeftAloneAndAllMayStandTogether) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    Parameter& sharded = bench.with("w", Shard{0}, [&](std::size_t i) { return contribution(rank.rank, i); });
    Parameter& a = bench.with("a", Partial{}, [&](std::size_t) { return rank.rank == 0 ? 1.0f : 2.0f; });
    Parameter& b = bench.with("b", Replicate{}, [&](std::size_t) { return 7.0f; });
    Parameter& c = bench.with("c", Partial{}, [&](std::size_t) { return rank.rank == 0 ? 10.0f : 20.0f; });
    bench.sync();
    EXPECT_EQ(gradient(sharded),
              (std::vector<float>{contribution(rank.rank, 0), contribution(rank.rank, 1)}));
    EXPECT_EQ(sharded.gradient_layout(), sharded.layout());
    EXPECT_EQ(gradient(a), std::vector<float>(4, 3.0f));
    EXPECT_EQ(gradient(b), std::vector<float>(4, 7.0f));
    EXPECT_EQ(gradient(c), std::vector<float>(4, 30.0f));
  });
}

// One of three replicas has half of the gradient, as if a sum had been left out.
TEST(Replicated, AReplicaThatDriftedIsNamedOnEveryRank) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Bench bench(rank);
    bench.with("sound", Replicate{}, [](std::size_t) { return 3.0f; });
    Parameter& p = bench.with("bias", Replicate{}, [&](std::size_t) { return rank.rank == 1 ? 3.0f : 6.0f; });
    const Error e = error_of([&] { bench.sync(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(
        e.what(),
        "sync_replicated_gradients: the gradient of \"bias\" is Replicate on tp=3, but on tp rank 1 it is 2 "
        "from "
        "the average, 2.34e+03 times what rounding explains; a replica drifted, or the gradient is Partial "
        "there");
    ASSERT_EQ(e.ranks().size(), 1u);
    EXPECT_EQ(e.ranks()[0], 1);
    EXPECT_EQ(gradient(p), std::vector<float>(4, rank.rank == 1 ? 3.0f : 6.0f))
        << "changed in spite of the error";
  });
}

TEST(Replicated, OfTwoReplicasNeitherCanBeBlamedAlone) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    bench.with("bias", Replicate{}, [&](std::size_t) { return rank.rank == 1 ? 3.0f : 6.0f; });
    const Error e = error_of([&] { bench.sync(); });
    EXPECT_STREQ(
        e.what(),
        "sync_replicated_gradients: the gradient of \"bias\" is Replicate on tp=2, but on tp ranks 0, 1 it "
        "is "
        "1.5 "
        "from the average, 2.05e+03 times what rounding explains; a replica drifted, or the gradient is "
        "Partial there");
    EXPECT_EQ(e.ranks().size(), 2u);
  });
}

TEST(Replicated, OnRequestDriftIsAveragedAway) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    Parameter& p = bench.with("bias", Replicate{}, [&](std::size_t) { return rank.rank == 1 ? 3.0f : 6.0f; });
    bench.sync({.on_drift = OnDrift::average});
    EXPECT_EQ(gradient(p), std::vector<float>(4, 4.5f));
  });
}

TEST(Replicated, AReplicaThatIsNotFiniteIsNamed) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Bench bench(rank);
    bench.with("bias", Replicate{}, [&](std::size_t i) { return rank.rank == 2 && i == 1 ? kNaN : 6.0f; });
    EXPECT_STREQ(error_of([&] { bench.sync(); }).what(),
                 "sync_replicated_gradients: the gradient of \"bias\" is Replicate on tp=3, but on tp rank 2 "
                 "it is not "
                 "finite; a replica drifted, or the gradient is Partial there");
  });
  // The same on all is no drift: clipping sees it.
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Bench bench(rank);
    Parameter& p = bench.with("bias", Replicate{}, [&](std::size_t i) { return i == 1 ? kNaN : 6.0f; });
    bench.sync();
    EXPECT_TRUE(std::isnan(gradient(p)[1]));
    EXPECT_EQ(gradient(p)[2], 6.0f);
  });
}

TEST(Replicated, OnATwoDimensionalMeshOtherAxesStay) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Bag bag;
    Parameter& p = bag.put(rank.context, "w", {2}, replicated_layout(mesh, {2}));
    use(p, make_layout(mesh, {Partial{}, Partial{}}, {2}),
        [&](std::size_t) { return static_cast<float>(1 << rank.rank); });
    sync_replicated_gradients(bag.parameters(), mesh["tp"]);
    EXPECT_EQ(gradient(p), std::vector<float>(2, rank.rank < 2 ? 3.0f : 12.0f));
    EXPECT_EQ(p.gradient_layout(), make_layout(mesh, {Partial{}, Replicate{}}, {2}));
    sync_replicated_gradients(bag.parameters(), mesh["dp"]);
    EXPECT_EQ(gradient(p), std::vector<float>(2, 15.0f));
    EXPECT_EQ(p.gradient_layout(), p.layout());
  });
}

TEST(Replicated, WhatCannotBeReducedIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Bench bench(rank);
    bench.with("largest", Partial{ReduceOp::max}, [](std::size_t) { return 1.0f; });
    EXPECT_STREQ(
        error_of([&] { bench.sync(); }).what(),
        "sync_replicated_gradients: the gradient of \"largest\" is Partial(max) on tp=2; expected Shard, "
        "Replicate, Partial(sum) or Partial(avg)");
    Bench other(rank);
    Parameter& plain = other.bag.put(rank.context, "plain", {4});
    EXPECT_STREQ(error_of([&] { other.sync(); }).what(),
                 "sync_replicated_gradients: \"plain\" has no gradient");
    use(plain, nullptr, [](std::size_t) { return 1.0f; });
    EXPECT_EQ(error_of([&] { other.sync(); }).code(), ErrorCode::layout);
  });
}

// All axes at once: what a step of data and tensor ranks has after backward.
TEST(ReduceGradients, OfParametersOnDataTimesTensor) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Bag bag;
    const LayoutRef whole = replicated_layout(mesh, {4}),
                    rows = make_layout(mesh, {Replicate{}, Shard{0}}, {4});
    Parameter& bias = bag.put(rank.context, "bias", {4}, whole);
    Parameter& frozen = bag.put(rank.context, "frozen", {4}, whole);
    Parameter& weight = bag.put(rank.context, "weight", {4}, rows);
    Parameter& norm = bag.put(rank.context, "norm", {4}, whole);
    frozen.set_trainable(false);
    const auto mine = [&](std::size_t) { return static_cast<float>(1 << rank.rank); };
    use(bias, make_layout(mesh, {Partial{}, Partial{}}, {4}), mine);
    use(weight, make_layout(mesh, {Partial{}, Shard{0}}, {4}), mine);
    use(norm, make_layout(mesh, {Partial{ReduceOp::avg}, Replicate{}}, {4}),
        [&](std::size_t) { return rank.rank < 2 ? 1.0f : 2.0f; });
    reduce_gradients(bag.parameters(), mesh, {.data_axes = mesh["dp"]});
    EXPECT_EQ(gradient(bias), std::vector<float>(4, 15.0f));
    EXPECT_EQ(gradient(weight), std::vector<float>(2, rank.rank % 2 == 0 ? 5.0f : 10.0f));
    EXPECT_EQ(gradient(norm), std::vector<float>(4, 1.5f));
    for (const Parameter* p : {&bias, &weight, &norm}) EXPECT_EQ(p->gradient_layout(), p->layout());

    EXPECT_EQ(error_of([&] { reduce_gradients(bag.parameters(), mesh, {.data_axes = mesh["dp"]}); }).what(),
              std::string("reduce_gradients: the gradient of \"bias\" is Replicate on dp=2; expected "
                          "Partial(sum) or Partial(avg): there is nothing to reduce"));
    Bag other;
    other.put(rank.context, "plain", {4});
    EXPECT_STREQ(error_of([&] { reduce_gradients(other.parameters(), mesh); }).what(),
                 "reduce_gradients: \"plain\" has no gradient");
  });
}

TEST(GradientsOf, NamesParametersWithoutGradient) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Bag bag;
    Parameter& w = bag.put(rank.context, "w", {2});
    const std::vector<Parameter*> all = bag.parameters();
    EXPECT_STREQ(error_of([&] { clip_grad_norm(all, 1); }).what(), "clip_grad_norm: \"w\" has no gradient");
    EXPECT_STREQ(error_of([&] { grad_norm(all); }).what(), "grad_norm: \"w\" has no gradient");
    use(w, nullptr, [](std::size_t i) { return i == 0 ? 3.0f : 4.0f; });
    EXPECT_EQ(clip_grad_norm(all, 2.5), 5);
    EXPECT_NEAR(gradient(w)[0], 1.5, 1e-6);
  });
}

}  // namespace
}  // namespace weft::gradients_test
