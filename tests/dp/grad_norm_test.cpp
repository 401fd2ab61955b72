#include "weft/dp/grad_norm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dp/vectors.hpp"
#include "weft/base/random.hpp"
#include "weft/base/tensor.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::grad_norm_test {
namespace {

using test::error_of;
using test::error_text;
using test::Rank;
using test::Ranks;
using test::Vectors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- the same gradients on any mesh ---

TEST(GradNorm, IsTheSameOnEveryFactorisationOfTheRanks) {
  const Shape shapes[] = {{10, 6}, {7, 3}, {1, 3}, {257}, {8, 129}};
  const MeshShape meshes[] = {{{"a", 1}, {"b", 1}, {"c", 1}}, {{"a", 4}, {"b", 1}, {"c", 1}},
                              {{"a", 1}, {"b", 4}, {"c", 1}}, {{"a", 1}, {"b", 1}, {"c", 4}},
                              {{"a", 2}, {"b", 2}, {"c", 1}}, {{"a", 2}, {"b", 1}, {"c", 2}},
                              {{"a", 1}, {"b", 2}, {"c", 2}}};
  const Placements layouts[] = {{Replicate{}, Replicate{}, Replicate{}},
                                {Shard{0}, Replicate{}, Replicate{}},
                                {Replicate{}, Shard{0}, Replicate{}},
                                {Shard{0}, Shard{0}, Shard{0}},
                                {Shard{0}, Replicate{}, Shard{0}}};
  for (const double p : {1.0, 2.0, 3.0, 7.5, kInfinity}) {
    double reference = 0;  // of the first mesh: one rank
    for (const MeshShape& shape : meshes)
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        DeviceMesh mesh(rank.group(), shape);
        Vectors gradients;
        int number = 0;
        for (const Shape& global : shapes)
          for (const Placements& placements : layouts) {
            std::string name("w");
            name += std::to_string(number++);
            Tensor whole(rank.context, global);
            RandomStream(1, name).normal(0, whole.count(), whole.f32().data());
            const LayoutRef layout = make_layout(mesh, placements, global);
            const Tensor part = distribute(whole, layout);
            gradients.put(name, layout, [&](std::size_t i) { return part.f32()[i]; });
          }
        const double norm = grad_norm(gradients.all(), p);
        if (shape.size() == 1)
          reference = norm;
        else
          EXPECT_NEAR(norm, reference, 1e-12 * reference) << to_string(shape) << ", p = " << p;
      });
  }
}

// Every factorisation of 8 ranks, with the axes that a program has, in any order. A norm depends on
// placements, not on names. Weights are cut over tp, over dp_shard, over both, or over neither. Sizes are
// primes, so that shards are uneven and some empty.
TEST(GradNorm, IsTheSameOnEveryFactorisationOfEightRanks) {
  constexpr std::int64_t kSizes[] = {2, 3, 7, 31, 257};
  double reference[3] = {};
  const auto check = [&](const MeshShape& shape, const char* shard, const char* tensor) {
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), shape);
      Vectors gradients;
      int number = 0;
      for (const std::int64_t rows : kSizes)
        for (const int cut : {0, 1, 2, 3}) {
          const std::string name = std::to_string(number++);
          const Shape global{rows, 3};
          Placements placements(static_cast<std::size_t>(shape.axis_count()), Replicate{});
          if ((cut & 1) != 0) placements[static_cast<std::size_t>(shape.index(tensor))] = Shard{0};
          if ((cut & 2) != 0) placements[static_cast<std::size_t>(shape.index(shard))] = Shard{0};
          const LayoutRef layout = make_layout(mesh, placements, global);
          Tensor whole(rank.context, global);
          RandomStream(7, name).normal(0, whole.count(), whole.f32().data());
          const Tensor part = distribute(whole, layout);
          gradients.put(name, layout, [&](std::size_t i) { return part.f32()[i]; });
        }
      std::size_t at = 0;
      for (const double p : {2.0, 1.0, kInfinity}) {
        const double norm = grad_norm(gradients.all(), p);
        if (shape.size() == 1)
          reference[at] = norm;
        else
          EXPECT_NEAR(norm, reference[at], 1e-13 * reference[at]) << to_string(shape) << ", p = " << p;
        ++at;
      }
      const double before = grad_norm(gradients.all());
      EXPECT_EQ(clip_grad_norm(gradients.all(), before / 3), before);
      EXPECT_NEAR(grad_norm(gradients.all()), before / 3, 1e-6 * before);
    });
  };
  check({{"dp_replicate", 1}, {"dp_shard", 1}, {"tp", 1}}, "dp_shard", "tp");
  for (int replicate = 1; replicate <= 8; replicate *= 2)
    for (int shard = 1; replicate * shard <= 8; shard *= 2) {
      const int tensor = 8 / replicate / shard;
      check({{"dp_replicate", replicate}, {"dp_shard", shard}, {"tp", tensor}}, "dp_shard", "tp");
    }
  check({{"pp", 2}, {"domain", 2}, {"cp", 2}}, "domain", "cp");
  check({{"tp", 2}, {"pp", 2}, {"dp", 2}}, "pp", "tp");
}

// --- norms one can do in the head ---

TEST(GradNorm, SmallNumbers) {
  Vectors gradients;
  const std::vector<float> values = {3, -4, 0, 12};
  gradients.put("a", nullptr, {4}, [&](std::size_t i) { return values[i]; });
  gradients.put("empty", nullptr, {0}, [](std::size_t) { return 1.0f; });
  const auto all = gradients.all();
  EXPECT_EQ(grad_norm(all), 13);
  EXPECT_EQ(grad_norm(all, 1), 19);
  EXPECT_EQ(grad_norm(all, kInfinity), 12);
  EXPECT_NEAR(grad_norm(all, 3), std::cbrt(27 + 64 + 1728), 1e-14 * 12);
  EXPECT_NEAR(grad_norm(all, 60), 12, 1e-12);
  EXPECT_EQ(grad_norm({}), 0);
  EXPECT_EQ(grad_norm({}, kInfinity), 0);
}

// Elements whose powers no double holds.
TEST(GradNorm, HighPowersOfLargeAndSmallElements) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    for (const float size : {1e30f, 1e-30f}) {
      Vectors gradients;
      gradients.put("w", make_layout(mesh, {Shard{0}}, {8}), [&](std::size_t) { return size; });
      EXPECT_NEAR(grad_norm(gradients.all(), 20), std::pow(8, 0.05) * static_cast<double>(size),
                  1e-12 * static_cast<double>(size));
      EXPECT_NEAR(grad_norm(gradients.all(), 4), std::pow(8, 0.25) * static_cast<double>(size),
                  1e-12 * static_cast<double>(size));
    }
  });
}

// Magnitudes in f64 whose squares overflow, or whose sum of squares overflows.
TEST(GradNorm, AnyMagnitudeOfF64) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    for (const double p : {1.0, 2.0, 3.0, 4.0, 5.0, kInfinity})
      for (const double size : {1e-307, 1e-200, 1e-160, 1e-90, 1.0, 1e80, 6e153, 1e200, 1e307}) {
        std::vector<double> a(4, size), b(4, size), zeros(4), least(1, 1e-308);
        const LayoutRef cut = make_layout(mesh, {Shard{0}}, {8}), same = replicated_layout(mesh, {4});
        Gradient g[] = {{"zeros", view(zeros), cut},
                        {"a", view(a), cut},
                        {"b", view(b), same},
                        {"least", view(least), replicated_layout(mesh, {1})}};
        const double expected = std::isinf(p) ? size : size * std::pow(12, 1 / p);
        EXPECT_NEAR(grad_norm(std::span(g).first(3), p) / expected, 1, 1e-12) << size << ", p = " << p;
        if (size >= 1e-200) {
          EXPECT_NEAR(grad_norm(g, p) / expected, 1, 1e-12);
        }
        EXPECT_EQ(grad_norm(std::span(g).first(1), p), 0);
      }
  });
}

// A gradient without a layout belongs only to this rank, and so does an error in it.
TEST(GradNorm, NotFiniteWithoutALayoutIsThisRanksAlone) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Vectors gradients;
    gradients.put("w", replicated_layout(mesh, {4}), [](std::size_t) { return 1.0f; });
    gradients.put("mine", nullptr, {1}, [&](std::size_t) {
      return rank.rank == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
    });
    if (rank.rank == 0) {
      EXPECT_EQ(clip_grad_norm(gradients.all(), 10), std::sqrt(5.0));
    } else {
      const Error e = error_of([&] { clip_grad_norm(gradients.all(), 10); });
      EXPECT_STREQ(e.what(),
                   "clip_grad_norm: the norm is nan; not finite on this rank; of this rank: \"mine\"");
      EXPECT_TRUE(e.ranks().empty());
    }
  });
}

TEST(GradNorm, OtherDtypes) {
  std::vector<double> f64 = {3, 1e200};
  std::vector<bf16> half = {bf16(3.0f), bf16(4.0f)};
  Gradient g[] = {{"half", view(half)}};
  EXPECT_EQ(grad_norm(g), 5);
  EXPECT_EQ(clip_grad_norm(g, 2.5), 5);
  EXPECT_EQ(static_cast<float>(half[0]), static_cast<float>(bf16(1.5f)));
  EXPECT_EQ(static_cast<float>(half[1]), static_cast<float>(bf16(2.0f)));
  g[0] = {"double", view(f64)};
  EXPECT_EQ(grad_norm(g), 1e200) << "its square is no double";
}

// A norm without clipping, no gradients at all, and a limit that is a tensor of one element: of any floating
// dtype.
TEST(GradNorm, LimitsOfEveryKind) {
  std::vector<float> values = {3, 4};
  const Gradient g[] = {{"w", view(values)}};
  EXPECT_EQ(clip_grad_norm(g, kInfinity), 5) << "no limit";
  EXPECT_EQ(values, (std::vector<float>{3, 4}));
  EXPECT_EQ(clip_grad_norm(g, 100.0), 5) << "the coefficient is at most 1";
  EXPECT_EQ(values, (std::vector<float>{3, 4}));
  EXPECT_EQ(clip_grad_norm({}, 1.0), 0);
  EXPECT_EQ(grad_norm({}), 0);
  Context context;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Tensor limit(context, {1}, dtype);
    switch (dtype) {
      case DType::f64: limit.as<double>()[0] = 2.5; break;
      case DType::f32: limit.as<float>()[0] = 2.5f; break;
      case DType::bf16: limit.as<bf16>()[0] = bf16(2.5f); break;
      default: limit.as<f16>()[0] = f16(2.5f); break;
    }
    values = {3, 4};
    EXPECT_EQ(clip_grad_norm(g, limit), 5);
    const double coefficient = 2.5 / (5 + 1e-6);
    EXPECT_EQ(values,
              (std::vector<float>{static_cast<float>(3 * coefficient), static_cast<float>(4 * coefficient)}));
    EXPECT_EQ(clip_grad_norm({}, limit), 0);
  }
  Tensor none(context, {2});
  EXPECT_STREQ(error_of([&] { clip_grad_norm(g, none); }).what(),
               "clip_grad_norm: max_norm is a tensor of 2 elements; expected 1");
  EXPECT_STREQ(error_of([&] { clip_grad_norm(g, Tensor(context, {1}, DType::i32)); }).what(),
               "clip_grad_norm: max_norm is a tensor of i32; expected f64, f32, bf16 or f16");
}

// If the limit is an invalid tensor on one rank, all ranks get an error.
TEST(GradNorm, ALimitThatOneRankAloneHasIsToldToAll) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    Vectors gradients;
    gradients.put("w", replicated_layout(mesh, {4}), [](std::size_t) { return 1.0f; });
    const std::string why = "clip_grad_norm: max_norm is a tensor of 2 elements; expected 1";
    Tensor limit(rank.context, {rank.rank == 1 ? 2 : 1});
    limit.f32()[0] = 1;
    EXPECT_EQ(error_of([&] { clip_grad_norm(gradients.all(), limit); }).what(),
              rank.rank == 1 ? why : "clip_grad_norm: dp rank 1 failed: " + why);
  });
}

TEST(GradNorm, ClippingScalesOrLeavesAlone) {
  Vectors gradients;
  std::vector<float>& p =
      gradients.put("a", nullptr, {2}, [](std::size_t i) { return i == 0 ? 3.0f : 4.0f; });
  EXPECT_EQ(clip_grad_norm(gradients.all(), 5.1), 5);
  EXPECT_EQ(p, (std::vector<float>{3, 4}));
  EXPECT_EQ(clip_grad_norm(gradients.all(), 1), 5);
  const double coefficient = 1 / (5 + 1e-6);
  EXPECT_EQ(p,
            (std::vector<float>{static_cast<float>(3 * coefficient), static_cast<float>(4 * coefficient)}));
  // 1 / (1 + 1e-6) is below one: a norm of exactly the limit is scaled, too.
  EXPECT_NEAR(clip_grad_norm(gradients.all(), 1), 1, 1e-6);
}

// The gradient is replicated, and only one rank has the NaN: the others do not wait for it.
TEST(GradNorm, NotFiniteIsAnErrorOrASkipOnEveryRank) {
  for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})})
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
      for (const double p : {2.0, 9.0, kInfinity})
        test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
          DeviceMesh mesh(rank.group(), {{"tp", 2}});
          Vectors gradients;
          std::vector<float>& w = gradients.put("w", make_layout(mesh, {placement}, {4}), [&](std::size_t i) {
            return rank.rank == 1 && i == 0 ? bad : 1.0f;
          });
          const double norm = clip_grad_norm(gradients.all(), 0.5, p, NonFinite::skip);
          EXPECT_EQ(std::isnan(norm), std::isnan(bad));
          EXPECT_FALSE(std::isfinite(norm));
          EXPECT_EQ(w[1], 1.0f) << "changed, though the step is skipped";
          const Error e = error_of([&] { clip_grad_norm(gradients.all(), 0.5, p); });
          EXPECT_EQ(e.code(), ErrorCode::bad_argument);
          EXPECT_EQ(e.what(),
                    std::string("clip_grad_norm: the norm is ") + (std::isnan(norm) ? "nan" : "inf") +
                        "; not finite on rank 1; of this rank: " + (rank.rank == 1 ? "\"w\"" : "none"));
          ASSERT_EQ(e.ranks().size(), 1u);
          EXPECT_EQ(e.ranks()[0], 1);
        });
}

// Replicas that are no longer equal are clipped by one factor, that of the rank with coordinate 0.
TEST(GradNorm, IsTheSameOnRanksWhoseReplicasDiffer) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    Vectors gradients;
    gradients.put("w", replicated_layout(mesh, {1}),
                  [&](std::size_t) { return rank.rank == 0 ? 3.0f : 4.0f; });
    EXPECT_EQ(grad_norm(gradients.all()), 3);
  });
}

TEST(GradNorm, WhatCannotBeNormedIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    const auto one = [](std::size_t) { return 1.0f; };
    Vectors partial, whole, wrong;
    partial.put("w", make_layout(mesh, {Partial{}, Replicate{}}, {4}), one);
    EXPECT_STREQ(error_of([&] { clip_grad_norm(partial.all(), 1); }).what(),
                 "clip_grad_norm: the gradient of \"w\" is Partial(sum) on dp=2; it must be reduced first");
    whole.put("w", make_layout(mesh, {Replicate{}, Partial{}}, {4}), one);
    EXPECT_EQ(grad_norm(whole.all()), 2) << "on an axis of one rank every placement means the same";
    EXPECT_STREQ(error_of([&] { grad_norm(whole.all(), 0.5); }).what(),
                 "grad_norm: p is 0.5; expected 1 or more");
    EXPECT_STREQ(error_of([&] { clip_grad_norm(whole.all(), 0); }).what(),
                 "clip_grad_norm: max_norm is 0; expected more than 0");
    wrong.put("w", nullptr, {2, 3}, one);
    wrong.at(0).layout = replicated_layout(mesh, {4});
    EXPECT_STREQ(
        error_of([&] { grad_norm(wrong.all()); }).what(),
        "grad_norm: the gradient of \"w\" is (2, 3); (4) as [dp: Replicate, tp: Replicate] is (4) on "
        "this rank");
    wrong.at(0).layout = nullptr;
    wrong.at(0).data.dtype = DType::i32;
    EXPECT_STREQ(error_of([&] { grad_norm(wrong.all()); }).what(),
                 "grad_norm: the gradient of \"w\" is i32; expected f64, f32, bf16 or f16");
    wrong.at(0).data.dtype = DType::f32;
    wrong.at(0).data.strides = {1, 2};
    EXPECT_STREQ(error_of([&] { grad_norm(wrong.all()); }).what(),
                 "grad_norm: the gradient of \"w\" is not contiguous; copy it into a contiguous buffer");
    wrong.at(0).data.device = {DeviceKind::cuda, 1};
    EXPECT_STREQ(error_of([&] { grad_norm(wrong.all()); }).what(),
                 "grad_norm: the gradient of \"w\" is on cuda:1; expected cpu, as no Compute was given");
  });
}

// The gradients lie over several meshes, and all ranks of these meshes get the error.
TEST(GradNorm, AWrongArgumentOnOneRankIsToldToAll) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 3}}), experts(rank.group(), {{"ep", 3}});
    Vectors g;
    g.put("a", make_layout(mesh, {Shard{0}}, {6}), [](std::size_t) { return 1.0f; });
    g.put("b", make_layout(experts, {Shard{0}}, {6}), [](std::size_t) { return 1.0f; });
    const bool odd = rank.rank == 1;
    const double norm = grad_norm(g.all());
    EXPECT_EQ(error_text([&] { grad_norm(g.all(), odd ? 0 : 2); }),
              std::string("bad_argument: ") + (odd ? "" : "grad_norm: tp rank 1 failed: ") +
                  "grad_norm: p is 0; expected 1 or more");
    EXPECT_EQ(error_text([&] { clip_grad_norm(g.all(), odd ? -1 : 1); }),
              std::string("bad_argument: ") + (odd ? "" : "clip_grad_norm: tp rank 1 failed: ") +
                  "clip_grad_norm: max_norm is -1; expected more than 0");
    std::byte* const data = g.at(1).data.data;
    if (odd) g.at(1).data.data = nullptr;
    EXPECT_EQ(error_text([&] { grad_norm(g.all()); }), std::string("bad_argument: ") +
                                                           (odd ? "" : "grad_norm: tp rank 1 failed: ") +
                                                           "grad_norm: the gradient of \"b\" has no memory");
    g.at(1).data.data = data;
    EXPECT_EQ(grad_norm(g.all()), norm) << "and the groups go on";
  });
}

// One rank has a shorter list, another order or another layout. All ranks throw mismatch, and none returns a
// norm.
TEST(GradNorm, AnotherListOnOneRankIsFoundOut) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 3}});
    const LayoutRef same = replicated_layout(mesh, {3}), cut = make_layout(mesh, {Shard{0}}, {3});
    const auto one = [](std::size_t) { return 1.0f; };
    const bool odd = rank.rank == 1;
    Vectors shorter, order, layout;
    shorter.put("a", same, one);
    if (!odd) shorter.put("b", cut, one);  // one cohort more, too
    const Error e = error_of([&] { clip_grad_norm(shorter.all(), 1); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(
        e.what(),
        "clip_grad_norm: gradient 1 is \"b\" (f32 (3) as [tp: Shard(0)]) on tp rank 0, but missing on "
        "tp rank 1");
    order.put(odd ? "b" : "a", same, one);
    order.put(odd ? "a" : "b", same, one);
    EXPECT_STREQ(
        error_of([&] { grad_norm(order.all()); }).what(),
        "grad_norm: gradient 0 is \"a\" (f32 (3) as [tp: Replicate]) on tp rank 0, but \"b\" (f32 (3) "
        "as [tp: Replicate]) on tp rank 1");
    layout.put("a", odd ? make_layout(mesh, {Partial{}}, {3}) : same, one);
    EXPECT_STREQ(
        error_of([&] { grad_norm(layout.all()); }).what(),
        "grad_norm: gradient 0 is \"a\" (f32 (3) as [tp: Replicate]) on tp rank 0, but \"a\" (f32 (3) "
        "as [tp: Partial(sum)]) on tp rank 1");
    // A gradient without a layout belongs only to this rank.
    Vectors plain;
    plain.put("a", same, one);
    if (odd) plain.put("mine", nullptr, {2}, one);
    EXPECT_EQ(grad_norm(plain.all()) == std::sqrt(3.0), !odd);
  });
}

// More cohorts than travel with the digest.
TEST(GradNorm, ManyCohorts) {
  test::run_ranks(Ranks::threads, 8, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"a", 2}, {"b", 2}, {"c", 2}});
    Vectors gradients;
    for (int cut = 0; cut < 8; ++cut) {
      Placements placements(3, Replicate{});
      for (std::size_t axis = 0; axis < 3; ++axis)
        if ((cut >> axis & 1) != 0) placements[axis] = Shard{0};
      gradients.put("w" + std::to_string(cut), make_layout(mesh, placements, {8}),
                    [&](std::size_t) { return static_cast<float>(1 + cut); });
    }
    EXPECT_EQ(grad_norm(gradients.all(), 1), 8 * 36);
    EXPECT_EQ(grad_norm(gradients.all(), kInfinity), 8);
  });
}

// Ranks are named in the numbering of their group: for two meshes of one group together; for two groups, with
// the name of each group.
TEST(GradNorm, NotFiniteOnRanksOfSeveralMeshes) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}}), line(rank.group(), {{"x", 4}});
    const auto bad_on = [&](int bad) {
      return [&rank, bad](std::size_t) {
        return rank.rank == bad ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
      };
    };
    Vectors one_group;
    one_group.put("a", replicated_layout(mesh, {4}), bad_on(3));
    one_group.put("b", make_layout(line, {Shard{0}}, {4}), bad_on(1));
    const Error e = error_of([&] { clip_grad_norm(one_group.all(), 1); });
    EXPECT_EQ(e.what(),
              std::string("clip_grad_norm: the norm is nan; not finite on ranks 1, 3; of this rank: ") +
                  (rank.rank == 3   ? "\"a\""
                   : rank.rank == 1 ? "\"b\""
                                    : "none"));
    EXPECT_EQ(std::vector<int>(e.ranks().begin(), e.ranks().end()), (std::vector<int>{1, 3}));

    const int reversed[] = {3, 2, 1, 0};
    ProcessGroup other = rank.group().subgroup("reversed", reversed);
    DeviceMesh back(other, {{"x", 4}});
    Vectors two_groups;
    two_groups.put("a", replicated_layout(mesh, {4}), bad_on(3));
    two_groups.put("b", make_layout(back, {Shard{0}}, {4}), bad_on(1));
    const Error f = error_of([&] { clip_grad_norm(two_groups.all(), 1); });
    EXPECT_EQ(std::string(f.what()).substr(0, std::string(f.what()).find("; of this rank")),
              "clip_grad_norm: the norm is nan; not finite on rank 3 of \"world\" and rank 2 of \"" +
                  other.name() + "\"");
    EXPECT_TRUE(f.ranks().empty()) << "no one numbering holds for both";
  });
}

}  // namespace
}  // namespace weft::grad_norm_test
