#include "weft/base/random.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace weft::random_test {
namespace {

// The known answers that the authors of Philox publish with it (Random123, kat_vectors, philox4x32 10
// rounds).
TEST(Random, PhiloxGivesItsPublishedAnswers) {
  using Four = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, AnyRunOfAStreamIsAPartOfTheWhole) {
  const RandomStream stream(7, "layers.0.weight");
  std::vector<float> whole(101), uniform(101);
  stream.normal(0, 101, whole.data());
  stream.uniform(0, 101, uniform.data());
  for (const std::uint64_t first : {0u, 1u, 3u, 4u, 50u}) {
    for (const std::int64_t count : {0, 1, 2, 5, 51}) {
      std::vector<float> part(static_cast<std::size_t>(count)), upart(part);
      stream.normal(first, count, part.data());
      stream.uniform(first, count, upart.data());
      for (std::size_t i = 0; i < part.size(); ++i) {
        EXPECT_EQ(part[i], whole[first + i]);
        EXPECT_EQ(upart[i], uniform[first + i]);
      }
    }
  }
}

TEST(Random, StreamsDifferBySeedAndPath) {
  float a[4], b[4], c[4];
  RandomStream(1, "a").normal(0, 4, a);
  RandomStream(2, "a").normal(0, 4, b);
  RandomStream(1, "b").normal(0, 4, c);
  for (int i = 0; i < 4; ++i) {
    EXPECT_NE(a[i], b[i]);
    EXPECT_NE(a[i], c[i]);
  }
}

TEST(Random, NumbersAreDistributedAsTheySay) {
  constexpr std::int64_t n = 400000;
  std::vector<float> x(n);
  RandomStream(3, "w").normal(0, n, x.data());
  double m1 = 0, m2 = 0, m4 = 0, within = 0;
  for (const float f : x) {
    const double v = f;
    m1 += v, m2 += v * v, m4 += v * v * v * v, within += std::abs(v) < 1.0;
  }
  // Standard errors at this n: mean 0.0016, variance 0.0022, fourth moment 0.015, share 0.0007. Five of them
  // are allowed.
  EXPECT_NEAR(m1 / n, 0.0, 0.008);
  EXPECT_NEAR(m2 / n, 1.0, 0.011);
  EXPECT_NEAR(m4 / n, 3.0, 0.08);
  EXPECT_NEAR(within / n, 0.682689, 0.0037);

  RandomStream(3, "w").uniform(0, n, x.data());
  double u1 = 0, u2 = 0;
  for (const float f : x) {
    ASSERT_TRUE(f >= 0.0f && f < 1.0f);
    u1 += f, u2 += static_cast<double>(f) * f;
  }
  EXPECT_NEAR(u1 / n, 0.5, 0.0025);
  EXPECT_NEAR(u2 / n, 1.0 / 3.0, 0.0025);
}

}  // namespace
}  // namespace weft::random_test
