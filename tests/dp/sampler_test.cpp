#include "weft/dp/sampler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "support/run_ranks.hpp"

namespace weft::sampler_test {
namespace {

using Samples = std::vector<std::int64_t>;

TEST(Sampler, TheGlobalBatchIsTheSameForAnyNumberOfRanksAndCutInOrder) {
  const Samples whole = Sampler(1, 0, 1000, 12, 7).global_batch(5);
  EXPECT_EQ(whole.size(), 12u);
  for (const int parts : {1, 2, 3, 4, 5, 12}) {
    Samples joined;
    for (int index = 0; index < parts; ++index) {
      const Sampler sampler(parts, index, 1000, 12, 7);
      EXPECT_EQ(sampler.global_batch(5), whole);
      const Samples part = sampler.local_batch(5);
      EXPECT_EQ(static_cast<std::int64_t>(part.size()), sampler.part().size);
      joined.insert(joined.end(), part.begin(), part.end());
    }
    EXPECT_EQ(joined, whole) << parts << " parts";
  }
}

TEST(Sampler, PeersOfATensorAxisSeeTheSameBatch) {
  Context context;
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  const auto seen = [&](int rank) {
    return Sampler(DeviceMesh::arithmetic(context, shape, rank)["dp"], 100, 6, 1).local_batch(0);
  };
  EXPECT_EQ(seen(0), seen(1));
  EXPECT_EQ(seen(2), seen(3));
  EXPECT_NE(seen(0), seen(2));
}

TEST(Sampler, EverySampleOnceInARound) {
  for (const std::int64_t population : {1, 2, 3, 7, 64, 65, 1000}) {
    const Sampler sampler(1, 0, population, 1, 3);
    for (std::int64_t round = 0; round < 2; ++round) {
      std::set<std::int64_t> seen;
      for (std::int64_t i = 0; i < population; ++i)
        seen.insert(sampler.global_batch(round * population + i)[0]);
      EXPECT_EQ(static_cast<std::int64_t>(seen.size()), population);
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), population - 1);
    }
  }
}

TEST(Sampler, ABatchMayReachAcrossRoundsAndBeyondThePopulation) {
  const Samples batch = Sampler(1, 0, 3, 7, 3).global_batch(0);
  Samples counts(3);
  for (const std::int64_t s : batch) ++counts[static_cast<std::size_t>(s)];
  std::sort(counts.begin(), counts.end());
  EXPECT_EQ(counts, (Samples{2, 2, 3}));
}

TEST(Sampler, RoundsAndSeedsAreShuffledDifferently) {
  Samples in_order(200);
  std::iota(in_order.begin(), in_order.end(), 0);
  const Sampler one(1, 0, 200, 200, 1), two(1, 0, 200, 200, 2);
  const Samples first = one.global_batch(0);
  EXPECT_NE(first, in_order);
  EXPECT_NE(first, one.global_batch(1));
  EXPECT_NE(first, two.global_batch(0));
  EXPECT_EQ(first, Sampler(1, 0, 200, 200, 1).global_batch(0));
  // Shuffled, not merely moved: neighbours of the order stay neighbours about as often as by chance (2 of
  // 199).
  int neighbours = 0;
  for (std::size_t i = 0; i + 1 < first.size(); ++i)
    neighbours += std::abs(first[i + 1] - first[i]) == 1 ? 1 : 0;
  EXPECT_LT(neighbours, 12);
}

// How often each order of `population` samples comes over seeds and rounds.
std::map<Samples, int> orders(std::int64_t population, int seeds, int rounds) {
  std::map<Samples, int> counts;
  for (int seed = 0; seed < seeds; ++seed)
    for (int round = 0; round < rounds; ++round)
      ++counts[Sampler(1, 0, population, population, static_cast<std::uint64_t>(seed)).global_batch(round)];
  return counts;
}

// Pearson's chi-square with n! - 1 degrees of freedom d: its mean is d, its variance 2 d. Seeds are fixed, so
// what comes out is, too.
TEST(Sampler, OrdersOfFewSamplesAreEquallyLikely) {
  for (const auto& [population, kinds] : {std::pair{2, 2}, {3, 6}, {4, 24}, {5, 120}}) {
    const auto counts = orders(population, 400, 30);
    EXPECT_EQ(static_cast<int>(counts.size()), kinds) << population;
    const double expected = 400.0 * 30 / kinds;
    double chi_square = 0;
    for (const auto& [order, count] : counts)
      chi_square += (count - expected) * (count - expected) / expected;
    const double freedom = kinds - 1;
    EXPECT_LT(chi_square, freedom + 4 * std::sqrt(2 * freedom)) << population;
  }
}

bool even(const Samples& order) {
  std::vector<bool> seen(order.size());
  std::size_t cycles = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (!seen[i]) ++cycles;
    for (std::size_t j = i; !seen[j]; j = static_cast<std::size_t>(order[j])) seen[j] = true;
  }
  return (order.size() - cycles) % 2 == 0;
}

// Half of all orders are odd: exchange two samples of an even one. Drawn ones, and, beyond 64, those of the
// network.
TEST(Sampler, OrdersAreEvenAndOddAlike) {
  for (const std::int64_t population : {4, 16, 64, 65, 256, 1024, 4096}) {
    const int tries = population > 100 ? 64 : 2000;
    int evens = 0;
    for (int seed = 0; seed < tries; ++seed) {
      const Samples order =
          Sampler(1, 0, population, population, static_cast<std::uint64_t>(seed)).global_batch(seed % 3);
      EXPECT_EQ(std::set<std::int64_t>(order.begin(), order.end()).size(), order.size());
      evens += even(order) ? 1 : 0;
    }
    EXPECT_NEAR(evens, tries / 2.0, 2 * std::sqrt(tries)) << population;
  }
}

// Each sample in each place, over the boundary between the two kinds of shuffle.
TEST(Sampler, EverySampleComesToEveryPlace) {
  for (const std::int64_t population : {64, 65}) {
    std::vector<int> counts(static_cast<std::size_t>(population * population));
    constexpr int kTries = 4000;
    for (int seed = 0; seed < kTries; ++seed) {
      const Samples order =
          Sampler(1, 0, population, population, static_cast<std::uint64_t>(seed)).global_batch(0);
      for (std::int64_t i = 0; i < population; ++i)
        ++counts[static_cast<std::size_t>(i * population + order[static_cast<std::size_t>(i)])];
    }
    const double expected = static_cast<double>(kTries) / static_cast<double>(population);
    for (const int count : counts) EXPECT_NEAR(count, expected, 5 * std::sqrt(expected));
  }
}

// A batch that begins in a round has the samples that whole rounds have there, on every rank.
TEST(Sampler, BatchesAreWindowsOnOneWalk) {
  for (const std::int64_t population : {5, 16, 64, 65}) {
    Samples walk;
    for (std::int64_t step = 0; step < 3 * population; ++step)
      walk.push_back(Sampler(1, 0, population, 1, 9).global_batch(step)[0]);
    for (int index = 0; index < 2; ++index) {
      const Sampler sampler(2, index, population, 3, 9);
      for (std::int64_t step = 0; 3 * step + 3 <= std::ssize(walk); step += 7) {
        const Samples part = sampler.local_batch(step);
        for (std::int64_t i = 0; i < std::ssize(part); ++i)
          ASSERT_EQ(part[static_cast<std::size_t>(i)],
                    walk[static_cast<std::size_t>(3 * step + sampler.part().offset + i)]);
      }
    }
  }
}

TEST(Sampler, WrongSizesAreNamed) {
  const auto text = [](int parts, std::int64_t population, std::int64_t batch) {
    return std::string(test::error_of([&] { Sampler(parts, 0, population, batch, 0); }).what());
  };
  EXPECT_EQ(text(4, 10, 3), "sampler: a global batch of 3 leaves some of 4 data ranks without a sample");
  EXPECT_EQ(text(1, 0, 3), "sampler: the population is 0; expected at least 1");
  EXPECT_EQ(text(1, 10, 0), "sampler: the global batch is 0; expected at least 1");
  EXPECT_EQ(text(0, 10, 1), "sampler: part 0 of 0");
  EXPECT_STREQ(test::error_of([] { Sampler(3, 3, 10, 3, 0); }).what(),
               "sampler: part 3 of 3; expected 0 to 2");
  EXPECT_STREQ(test::error_of([] { Sampler(3, -1, 10, 3, 0); }).what(),
               "sampler: part -1 of 3; expected 0 to 2");
  EXPECT_STREQ(test::error_of([] { Sampler(1, 0, 10, 1, 0).global_batch(-1); }).what(),
               "sampler: step -1; expected 0 or more");
}

TEST(Sampler, StepsBeyondAnyWalkAreRefused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const auto text = [](std::int64_t batch, std::int64_t step) {
    return std::string(test::error_of([&] { Sampler(1, 0, 10, batch, 7).local_batch(step); }).what());
  };
  EXPECT_EQ(text(4, kMost), "sampler: step 9223372036854775807 of 4 samples each is beyond sample 2^63");
  EXPECT_EQ(text(4, kMost / 4), "sampler: step 2305843009213693951 of 4 samples each is beyond sample 2^63");
  EXPECT_EQ(text(kMost, 1), "sampler: step 1 of 9223372036854775807 samples each is beyond sample 2^63");
  EXPECT_EQ(Sampler(1, 0, 10, 4, 7).global_batch(kMost / 4 - 1).size(), 4u);
}

}  // namespace
}  // namespace weft::sampler_test
