// Sums of squares without rounding: the exact value, whatever the order, and norms of gradients made of them.
#include "dp/fixed_sum.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "dp/vectors.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::fixed_sum_test {
namespace {

using dp::FixedSum;
using test::error_text;
using test::Rank;
using test::Ranks;
using test::Vectors;

double root_of(const std::vector<float>& x) {
  FixedSum sum;
  sum.add(x);
  return sum.root();
}

TEST(FixedSum, IsTheSumOfSquares) {
  EXPECT_EQ(root_of({}), 0);
  EXPECT_EQ(root_of({3, -4}), 5);
  EXPECT_EQ(root_of(std::vector<float>(100000, 2.0f)), std::sqrt(400000.0));
  const float least = std::numeric_limits<float>::denorm_min(), most = std::numeric_limits<float>::max();
  EXPECT_EQ(root_of({least}), static_cast<double>(least));
  EXPECT_EQ(root_of({most}), static_cast<double>(most));
  EXPECT_EQ(root_of(std::vector<float>(4, most)), 2 * static_cast<double>(most));
  EXPECT_EQ(root_of({std::numeric_limits<float>::min()}),
            static_cast<double>(std::numeric_limits<float>::min()));
}

// f64 would lose the small terms.
TEST(FixedSum, LosesNothing) {
  FixedSum sum, small;
  std::vector<float> x(std::size_t{1} << 20, 0x1p-30f);
  x[0] = 0x1p60f;
  sum.add(x);
  small.add(std::span(x).subspan(1));
  FixedSum large;
  large.add(std::span(x).first(1));
  large += small;
  EXPECT_EQ(large.words(), sum.words());
  EXPECT_NEAR(small.root(), std::sqrt(static_cast<double>(x.size() - 1)) * 0x1p-30, 1e-20);
}

TEST(FixedSum, HasTheSameBitsInAnyOrder) {
  std::vector<float> x(70001);
  RandomStream(1, "x").normal(0, static_cast<std::int64_t>(x.size()), x.data());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(x[i], static_cast<int>(i % 200) - 120);
  FixedSum forward, parts;
  forward.add(x);
  std::reverse(x.begin(), x.end());
  for (std::size_t at = 0; at < x.size(); at += 777) {
    FixedSum part;
    part.add(std::span(x).subspan(at, std::min<std::size_t>(777, x.size() - at)));
    parts += FixedSum::of(part.words());
  }
  EXPECT_EQ(parts.words(), forward.words());
  long double plain = 0;
  for (const float v : x) plain += static_cast<long double>(v) * static_cast<long double>(v);
  EXPECT_NEAR(forward.root(), static_cast<double>(std::sqrt(plain)), 1e-14 * forward.root());
}

TEST(FixedSum, SeesWhatIsNotFinite) {
  for (const float wrong : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
    FixedSum sum;
    sum.add(std::vector<float>{1, wrong});
    EXPECT_FALSE(sum.finite());
    EXPECT_FALSE(FixedSum::of(sum.words()).finite());
    FixedSum other;
    other += sum;
    EXPECT_FALSE(other.finite());
  }
}

// Gradients over all ways to cut them: the same bits, where norms in f64 differ in the last places.
TEST(ExactGradNorm, HasTheSameBitsOnEveryMesh) {
  const MeshShape meshes[] = {
      {{"a", 1}, {"b", 1}}, {{"a", 4}, {"b", 1}}, {{"a", 1}, {"b", 4}}, {{"a", 2}, {"b", 2}}};
  const Placements layouts[] = {{Replicate{}, Replicate{}}, {Shard{0}, Replicate{}}, {Shard{0}, Shard{0}}};
  double reference = 0, usual = 0, clipped = 0;
  for (const MeshShape& shape : meshes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), shape);
      Vectors gradients;
      for (const Placements& placements : layouts) {
        const std::string name = "w" + std::to_string(&placements - layouts);
        Tensor whole(rank.context, {257, 31});
        RandomStream(1, name).normal(0, whole.count(), whole.f32().data());
        const LayoutRef layout = make_layout(mesh, placements, whole.shape());
        const Tensor part = distribute(whole, layout);
        gradients.put(name, layout, [&](std::size_t i) { return part.f32()[i]; });
      }
      const double norm = grad_norm(gradients.all(), 2, nullptr, Exact::yes),
                   other = grad_norm(gradients.all());
      if (shape.size() == 1) reference = norm, usual = other;
      EXPECT_EQ(norm, reference) << to_string(shape);
      EXPECT_NEAR(norm, usual, 1e-12 * usual);
      EXPECT_EQ(clip_grad_norm(gradients.all(), 1.0, 2, NonFinite::error, nullptr, Exact::yes), reference);
      const double after = grad_norm(gradients.all(), 2, nullptr, Exact::yes);
      if (shape.size() == 1) clipped = after;
      EXPECT_EQ(after, clipped);
      EXPECT_NEAR(after, 1.0, 1e-5);
    });
}

TEST(ExactGradNorm, RefusesWhatHasNoExactSum) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"a", 2}});
    Vectors gradients;
    gradients.put("w", make_layout(mesh, {Replicate{}}, {4}), [](std::size_t) { return 1.0f; });
    EXPECT_EQ(error_text([&] { grad_norm(gradients.all(), 3, nullptr, Exact::yes); }),
              "bad_argument: grad_norm: exact: p is 3; expected 2, the sum of squares");
    const Exact own = rank.rank == 0 ? Exact::yes : Exact::no;
    EXPECT_THAT(error_text([&] { grad_norm(gradients.all(), 2, nullptr, own); }),
                testing::HasSubstr("exact"));
    std::vector<double> wide(4, 1.0);
    const Gradient doubles[] = {
        {"d", TensorView{reinterpret_cast<std::byte*>(wide.data()), DType::f64, {}, {4}, {1}}, nullptr}};
    EXPECT_EQ(error_text([&] { grad_norm(doubles, 2, nullptr, Exact::yes); }),
              "bad_argument: grad_norm: exact: the gradient of \"d\" is f64; expected f32, whose squares are "
              "exact");
  });
}

TEST(ExactGradNorm, NamesRanksThatAreNotFinite) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"a", 2}});
    Vectors gradients;
    gradients.put("w", make_layout(mesh, {Shard{0}}, {4}), [&](std::size_t i) {
      return rank.rank == 1 && i == 0 ? std::numeric_limits<float>::infinity() : 1.0f;
    });
    EXPECT_THAT(
        error_text([&] { clip_grad_norm(gradients.all(), 1.0, 2, NonFinite::error, nullptr, Exact::yes); }),
        testing::HasSubstr("not finite on rank 1"));
  });
}

}  // namespace
}  // namespace weft::fixed_sum_test
