#include "weft/dp/grad_norm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dp/bag.hpp"
#include "support/golden_case.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft {
namespace {

using test::Bag;
using test::error_of;
using test::gradient;
using test::Rank;
using test::Ranks;
using test::use;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- the reference cases ---

// ["R", "S0"] → placements of a gradient; null → none
Placement placement_of(const std::string& envelopes) {
  if (envelopes == "R") return Replicate{};
  if (envelopes == "P") return Partial{};
  return Shard{std::stoi(envelopes.substr(1))};
}

// One set of gradients of the file as this rank holds them.
struct GoldenGradients {
  GoldenGradients(Rank& rank, const DeviceMesh& mesh, test::Golden& golden, const std::string& set_in)
      : set(set_in) {
    for (const nlohmann::json& g : golden.info().at("cases").at(set).at("gradients")) {
      const std::string name = g.at("name");
      const auto sizes = g.at("shape").get<std::vector<std::int64_t>>();
      const Shape shape{std::span<const std::int64_t>(sizes)};
      const Tensor local = golden.tensor(set + ".local." + std::to_string(rank.rank) + "." + name);
      LayoutRef of_gradient = nullptr, of_value = nullptr;
      if (!g.at("placement").is_null()) {
        Placements placements, values;
        for (const std::string envelopes : g.at("placement")) {
          placements.push_back(placement_of(envelopes));
          values.push_back(is_partial(placements.back()) ? Replicate{} : placements.back());
          partial = partial || is_partial(placements.back());
        }
        of_gradient = make_layout(mesh, placements, shape), of_value = make_layout(mesh, values, shape);
      }
      Parameter& p = bag.put(rank.context, name, shape, of_value);
      p.accumulate(local.with_layout(of_gradient));
      names.push_back(name);
    }
  }
  std::string set;
  Bag bag;
  std::vector<std::string> names;
  bool partial = false;
};

// What is plain is the same everywhere: it has no placement to reduce.
void reduce_partials(GoldenGradients& gradients, const DeviceMesh& mesh) {
  std::vector<Parameter*> placed;
  for (Parameter* p : gradients.bag.parameters())
    if (p->gradient_layout() != nullptr) placed.push_back(p);
  for (const MeshAxis& axis : mesh.shape().axes()) sync_replicated_gradients(placed, mesh[axis.name]);
}

TEST(GradNorm, GoldenCases) {
  const auto files = test::golden_files("clip_cases");
  if (files.empty()) GTEST_SKIP() << "no clip_cases*.safetensors in " << test::golden_dir();
  for (const auto& file : files) {
    SCOPED_TRACE(file.filename().string());
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
      test::Golden golden(file);
      const double max_norm = golden.info().at("max_norm");
      for (const auto& [set, about] : golden.info().at("cases").items()) {
        SCOPED_TRACE(set);
        const std::vector<double> norms = golden.values(set + ".total_norm");
        std::size_t at = 0;
        for (const nlohmann::json& power : golden.info().at("p")) {
          const double p = power.is_string() ? kInfinity : power.get<double>();
          GoldenGradients gradients(rank, mesh, golden, set);
          const std::vector<Parameter*> all = gradients.bag.parameters();
          if (gradients.partial) {
            EXPECT_EQ(error_of([&] { grad_norm(all, p); }).code(), ErrorCode::layout);
          }
          reduce_partials(gradients, mesh);
          // The parts are f32, and sums of two such are rounded once more.
          EXPECT_NEAR(grad_norm(all, p), norms[at], 1e-6 * norms[at]) << "p = " << p;
          const double coefficient = golden.values(set + ".clip_coef")[at];
          EXPECT_NEAR(std::min(1.0, max_norm / (grad_norm(all, p) + 1e-6)), coefficient, 1e-6 * coefficient);
          ++at;
        }

        GoldenGradients gradients(rank, mesh, golden, set);
        const std::vector<Parameter*> all = gradients.bag.parameters();
        reduce_partials(gradients, mesh);
        const double norm = clip_grad_norm(all, max_norm);
        EXPECT_EQ(norm > max_norm, grad_norm(all) < norm);
        for (const Parameter* p : all) {
          const std::vector<double> expected = golden.values(set + ".clipped." + p->path());
          const Tensor whole = full(p->gradient());
          ASSERT_EQ(static_cast<std::size_t>(whole.count()), expected.size());
          for (std::size_t i = 0; i < expected.size(); ++i)
            EXPECT_NEAR(whole.f32()[i], expected[i], 1e-6 * (std::abs(expected[i]) + 0.01))
                << p->path() << " " << i;
        }
      }
    });
  }
}

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
        Bag bag;
        int number = 0;
        for (const Shape& global : shapes)
          for (const Placements& placements : layouts) {
            std::string name("w");
            name += std::to_string(number++);
            Tensor whole(rank.context, global);
            RandomStream(1, name).normal(0, whole.count(), whole.f32().data());
            const LayoutRef layout = make_layout(mesh, placements, global);
            bag.put(rank.context, name, global, layout).accumulate(distribute(whole, layout));
          }
        const double norm = grad_norm(bag.parameters(), p);
        if (shape.size() == 1)
          reference = norm;
        else
          EXPECT_NEAR(norm, reference, 1e-12 * reference) << to_string(shape) << ", p = " << p;
      });
  }
}

// --- norms one can do in the head ---

TEST(GradNorm, SmallNumbers) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Bag bag;
    const std::vector<float> values = {3, -4, 0, 12};
    use(bag.put(rank.context, "a", {4}), nullptr, [&](std::size_t i) { return values[i]; });
    use(bag.put(rank.context, "empty", {0}), nullptr, [](std::size_t) { return 1.0f; });
    const std::vector<Parameter*> all = bag.parameters();
    EXPECT_EQ(grad_norm(all), 13);
    EXPECT_EQ(grad_norm(all, 1), 19);
    EXPECT_EQ(grad_norm(all, kInfinity), 12);
    EXPECT_NEAR(grad_norm(all, 3), std::cbrt(27 + 64 + 1728), 1e-14 * 12);
    EXPECT_NEAR(grad_norm(all, 60), 12, 1e-12);
    EXPECT_EQ(grad_norm({}), 0);
    EXPECT_EQ(grad_norm({}, kInfinity), 0);
  });
}

// Elements whose powers no double holds.
TEST(GradNorm, HighPowersOfLargeAndSmallElements) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"tp", 2}});
    for (const float size : {1e30f, 1e-30f}) {
      Bag bag;
      use(bag.put(rank.context, "w", {8}, make_layout(mesh, {Shard{0}}, {8})),
          make_layout(mesh, {Shard{0}}, {8}), [&](std::size_t) { return size; });
      EXPECT_NEAR(grad_norm(bag.parameters(), 20), std::pow(8, 0.05) * static_cast<double>(size),
                  1e-12 * static_cast<double>(size));
      EXPECT_NEAR(grad_norm(bag.parameters(), 4), std::pow(8, 0.25) * static_cast<double>(size),
                  1e-12 * static_cast<double>(size));
    }
  });
}

TEST(GradNorm, ClippingScalesOrLeavesAlone) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Bag bag;
    Parameter& p = bag.put(rank.context, "a", {2});
    use(p, nullptr, [](std::size_t i) { return i == 0 ? 3.0f : 4.0f; });
    EXPECT_EQ(clip_grad_norm(bag.parameters(), 5.1), 5);
    EXPECT_EQ(gradient(p), (std::vector<float>{3, 4}));
    EXPECT_EQ(clip_grad_norm(bag.parameters(), 1), 5);
    const double coefficient = 1 / (5 + 1e-6);
    EXPECT_EQ(gradient(p),
              (std::vector<float>{static_cast<float>(3 * coefficient), static_cast<float>(4 * coefficient)}));
    // 1 / (1 + 1e-6) is below one: a norm of exactly the limit is scaled, too.
    EXPECT_NEAR(clip_grad_norm(bag.parameters(), 1), 1, 1e-6);
  });
}

TEST(GradNorm, NotFiniteIsAnErrorOrASkipOnEveryRank) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    for (const double p : {2.0, 9.0, kInfinity})
      test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
        DeviceMesh mesh(rank.group(), {{"tp", 2}});
        Bag bag;
        const LayoutRef layout = make_layout(mesh, {Shard{0}}, {4});
        Parameter& w = bag.put(rank.context, "w", {4}, layout);
        use(w, layout, [&](std::size_t i) { return rank.rank == 1 && i == 0 ? bad : 1.0f; });
        const double norm = clip_grad_norm(bag.parameters(), 0.5, p, NonFinite::skip);
        EXPECT_FALSE(std::isfinite(norm));
        EXPECT_EQ(gradient(w)[1], 1.0f) << "changed, though the step is skipped";
        const Error e = error_of([&] { clip_grad_norm(bag.parameters(), 0.5, p); });
        EXPECT_EQ(e.code(), ErrorCode::bad_argument);
        EXPECT_EQ(e.what(), std::string("clip_grad_norm: the norm is ") + (std::isnan(norm) ? "nan" : "inf") +
                                "; not finite on this rank: " + (rank.rank == 1 ? "\"w\"" : "none"));
      });
}

TEST(GradNorm, WhatCannotBeNormedIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    Bag bag;
    Parameter& w = bag.put(rank.context, "w", {4}, replicated_layout(mesh, {4}));
    const std::vector<Parameter*> all = bag.parameters();
    EXPECT_STREQ(error_of([&] { grad_norm(all); }).what(), "grad_norm: \"w\" has no gradient");
    use(w, make_layout(mesh, {Partial{}, Replicate{}}, {4}), [](std::size_t) { return 1.0f; });
    EXPECT_STREQ(error_of([&] { clip_grad_norm(all, 1); }).what(),
                 "grad_norm: the gradient of \"w\" is Partial(sum) on dp=2; it must be reduced first");
    w.zero_gradient();
    use(w, make_layout(mesh, {Replicate{}, Partial{}}, {4}), [](std::size_t) { return 1.0f; });
    EXPECT_EQ(grad_norm(all), 2) << "on an axis of one rank every placement means the same";
    EXPECT_STREQ(error_of([&] { grad_norm(all, 0.5); }).what(), "grad_norm: p is 0.5; expected 1 or more");
    EXPECT_STREQ(error_of([&] { clip_grad_norm(all, 0); }).what(),
                 "clip_grad_norm: max_norm is 0; expected more than 0");
  });
}

}  // namespace
}  // namespace weft
