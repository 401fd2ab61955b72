// Norms and clipping against the reference cases: distributed ones against their f64 values; f32 against what
// torch computes; f64.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <limits>

#include "dp/vectors.hpp"
#include "support/golden_case.hpp"
#include "weft/base/tensor.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::clip_golden_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using test::Vectors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ["R", "S0"] → placements of a gradient; null → none
Placement placement_of(const std::string& text) {
  if (text == "R") return Replicate{};
  if (text == "P") return Partial{};
  return Shard{std::stoi(text.substr(1))};
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
      LayoutRef layout = nullptr;
      if (!g.at("placement").is_null()) {
        Placements placements;
        for (const std::string text : g.at("placement")) {
          placements.push_back(placement_of(text));
          partial = partial || is_partial(placements.back());
        }
        layout = make_layout(mesh, placements, shape);
      }
      gradients.put(name, layout, shape, [&](std::size_t i) { return local.f32()[i]; });
      names.push_back(name);
    }
  }
  std::string set;
  Vectors gradients;
  std::vector<std::string> names;
  bool partial = false;
};

// A plain tensor is the same everywhere: it has no placement to reduce.
void reduce_partials(GoldenGradients& golden, const DeviceMesh& mesh) {
  std::vector<Gradient> placed;
  for (const Gradient& g : golden.gradients.all())
    if (g.layout != nullptr) placed.push_back(g);
  sync_replicated_gradients(placed, mesh);
  std::size_t at = 0;
  for (Gradient& g : golden.gradients.all())
    if (g.layout != nullptr) g.layout = placed[at++].layout;
}

TEST(ClipGolden, DistributedCases) {
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
          const auto all = gradients.gradients.all();
          if (gradients.partial) {
            EXPECT_EQ(error_of([&] { grad_norm(all, p); }).code(), ErrorCode::layout);
          }
          reduce_partials(gradients, mesh);
          // The parts are f32, and a sum of two parts is rounded once more.
          EXPECT_NEAR(grad_norm(all, p), norms[at], 1e-6 * norms[at]) << "p = " << p;
          const double coefficient = golden.values(set + ".clip_coef")[at];
          EXPECT_NEAR(std::min(1.0, max_norm / (grad_norm(all, p) + 1e-6)), coefficient, 1e-6 * coefficient);
          ++at;
        }

        GoldenGradients gradients(rank, mesh, golden, set);
        const auto all = gradients.gradients.all();
        reduce_partials(gradients, mesh);
        const double norm = clip_grad_norm(all, max_norm);
        EXPECT_EQ(norm > max_norm, grad_norm(all) < norm);
        for (const Gradient& g : all) {
          const std::vector<double> expected = golden.values(set + ".clipped." + std::string(g.name));
          const Tensor part(Storage::borrow(g.data.data, static_cast<std::size_t>(g.data.bytes())), 0,
                            g.data.shape, DType::f32);
          const Tensor whole = full(part.with_layout(g.layout));
          ASSERT_EQ(static_cast<std::size_t>(whole.count()), expected.size());
          for (std::size_t i = 0; i < expected.size(); ++i)
            EXPECT_NEAR(whole.f32()[i], expected[i], 1e-6 * (std::abs(expected[i]) + 0.01))
                << g.name << " " << i;
        }
      }
    });
  }
}

// The number of floats between two: neighbours are 1 apart.
std::int64_t ulps(float a, float b) {
  const auto place = [](float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return std::int64_t{bits < 0 ? std::numeric_limits<std::int32_t>::min() - bits : bits};
  };
  return std::abs(place(a) - place(b));
}

// The whole gradients of a set, f32 or f64, on one rank: what torch clips if nothing is distributed. A
// gradient without a placement is one of them.
template <class T>
struct Wholes {
  Wholes(test::Golden& golden, const std::string& set) {
    for (const nlohmann::json& g : golden.info().at("cases").at(set).at("gradients")) {
      names.push_back(g.at("name"));
      std::vector<T>& to = values.emplace_back();
      for (const double x : golden.values(set + ".full." + names.back())) to.push_back(static_cast<T>(x));
    }
    for (std::size_t i = 0; i < values.size(); ++i) all.push_back({names[i], view(values[i]), nullptr});
  }
  std::deque<std::string> names;
  std::deque<std::vector<T>> values;
  std::vector<Gradient> all;
};

// The arithmetic of torch.nn.utils.clip_grad_norm_ in f32: norms of the tensors, their norm, max_norm /
// (norm + 1e-6), at most 1.
TEST(ClipGolden, F32IsWithinFourUlpsOfTorchs) {
  const auto files = test::golden_files("clip_cases");
  if (files.empty()) GTEST_SKIP() << "no clip_cases*.safetensors in " << test::golden_dir();
  for (const auto& file : files) {
    test::Golden golden(file);
    const double max_norm = golden.info().at("max_norm");
    int compared = 0;
    for (const auto& [set, about] : golden.info().at("cases").items()) {
      SCOPED_TRACE(set);
      const std::vector<double> norms = golden.values(set + ".total_norm");
      Wholes<float> whole(golden, set);
      std::size_t at = 0;
      for (const nlohmann::json& power : golden.info().at("p")) {
        const double p = power.is_string() ? kInfinity : power.get<double>();
        const double norm = grad_norm(whole.all, p);
        EXPECT_LE(ulps(static_cast<float>(norm), static_cast<float>(norms[at])), 4) << "p = " << p;
        ++at;
      }
      // The results of both projects' own code in f32 on these gradients.
      for (const auto& [who, value] : about.at("checked_with_real_dtensor").items())
        if (value.is_number() && who != "full_diff") {
          const double p =
              who.starts_with("credit_p") ? (who == "credit_pinf" ? kInfinity : std::stod(who.substr(8))) : 2;
          EXPECT_LE(ulps(static_cast<float>(grad_norm(whole.all, p)), value.get<float>()), 4) << who;
          ++compared;
        }
      EXPECT_EQ(clip_grad_norm(whole.all, max_norm), grad_norm(Wholes<float>(golden, set).all));
      for (std::size_t i = 0; i < whole.all.size(); ++i) {
        const std::vector<double> expected = golden.values(set + ".clipped." + whole.names[i]);
        ASSERT_EQ(whole.values[i].size(), expected.size());
        for (std::size_t k = 0; k < expected.size(); ++k)
          EXPECT_LE(ulps(whole.values[i][k], static_cast<float>(expected[k])), 4)
              << whole.names[i] << " " << k;
      }
    }
    EXPECT_GT(compared, 10);
  }
}

// The same in f64, to the last digits.
TEST(ClipGolden, F64IsTheReferenceItself) {
  const auto files = test::golden_files("clip_cases");
  if (files.empty()) GTEST_SKIP() << "no clip_cases*.safetensors in " << test::golden_dir();
  for (const auto& file : files) {
    test::Golden golden(file);
    const double max_norm = golden.info().at("max_norm");
    for (const auto& [set, about] : golden.info().at("cases").items()) {
      SCOPED_TRACE(set);
      const std::vector<double> norms = golden.values(set + ".total_norm");
      Wholes<double> whole(golden, set);
      std::size_t at = 0;
      for (const nlohmann::json& power : golden.info().at("p")) {
        const double p = power.is_string() ? kInfinity : power.get<double>();
        EXPECT_NEAR(grad_norm(whole.all, p), norms[at], 1e-14 * norms[at]) << "p = " << p;
        ++at;
      }
      clip_grad_norm(whole.all, max_norm);
      for (std::size_t i = 0; i < whole.all.size(); ++i) {
        const std::vector<double> expected = golden.values(set + ".clipped." + whole.names[i]);
        for (std::size_t k = 0; k < expected.size(); ++k)
          EXPECT_NEAR(whole.values[i][k], expected[k], 1e-14 * std::abs(expected[k]))
              << whole.names[i] << " " << k;
      }
    }
  }
}

}  // namespace
}  // namespace weft::clip_golden_test
