// Which way bytes go between ranks that do not share memory, by what each took (mesh/window/links/ways.hpp).
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>

#include "mesh/window/links/ways.hpp"

namespace weft::window_ways_test {
namespace {

using windows::Way;
using windows::Ways;

constexpr std::array kAll{Way::gathered, Way::by_runs, Way::by_kernel};

using Costs = std::map<Way, std::uint64_t>;
// How often each way is used in so many exchanges.
std::map<Way, int> run(Ways& ways, const Costs& costs, int exchanges) {
  std::map<Way, int> used;
  for (int i = 0; i < exchanges; ++i) {
    const Ways::Next next = ways.next(kAll);
    ++used[next.way];
    if (next.timed) ways.took(next.way, costs.at(next.way));
  }
  return used;
}

constexpr int kAtFirst = static_cast<int>(kAll.size() * Ways::kTries);

TEST(Ways, AllAreTriedAtFirstAndTheQuickestIsUsed) {
  for (const Way quickest : kAll) {
    Ways ways;
    Costs costs{{Way::gathered, 130}, {Way::by_runs, 150}, {Way::by_kernel, 140}};
    costs[quickest] = 100;
    for (const auto& [way, times] : run(ways, costs, kAtFirst)) EXPECT_EQ(times, Ways::kTries);
    auto used = run(ways, costs, static_cast<int>(Ways::kAgain) - kAtFirst);
    EXPECT_EQ(used.size(), 1U);
    EXPECT_EQ(used.begin()->first, quickest);
    EXPECT_EQ(ways.best(kAll), quickest);
  }
}

TEST(Ways, TheOthersAreTriedAgainAndSlowOnesSeldom) {
  Ways ways;
  const Costs costs{{Way::gathered, 100}, {Way::by_runs, 190}, {Way::by_kernel, 300}};
  constexpr int kRounds = 32;
  const auto used = run(ways, costs, kRounds * static_cast<int>(Ways::kAgain));
  EXPECT_NEAR(used.at(Way::by_runs), Ways::kTries + 2 * kRounds, 4);
  EXPECT_NEAR(used.at(Way::by_kernel), Ways::kTries + 2.0 * kRounds * Ways::kAgain / Ways::kSeldom, 4);
}

TEST(Ways, WhatBecomesQuickerIsUsed) {
  Ways ways;
  run(ways, {{Way::gathered, 100}, {Way::by_runs, 120}, {Way::by_kernel, 130}}, 1000);
  EXPECT_EQ(ways.best(kAll), Way::gathered);
  run(ways, {{Way::gathered, 200}, {Way::by_runs, 300}, {Way::by_kernel, 130}},
      static_cast<int>(3 * Ways::kAgain));
  EXPECT_EQ(ways.best(kAll), Way::by_kernel);
}

TEST(Ways, OneSlowTryDoesNotCount) {
  Ways ways;
  run(ways, {{Way::gathered, 100}, {Way::by_runs, 120}, {Way::by_kernel, 130}}, 100);
  ways.took(Way::gathered, 100'000);
  EXPECT_EQ(ways.best(kAll), Way::gathered);
}

TEST(Ways, WhatIsNotPossibleIsNotUsed) {
  Ways ways;
  constexpr std::array kOne{Way::gathered};
  for (int i = 0; i < 20; ++i) {
    const Ways::Next next = ways.next(kOne);
    EXPECT_EQ(next.way, Way::gathered);
    EXPECT_FALSE(next.timed);
  }
  // Found quickest where it was possible, and then it is not: as memory that the kernel does not read.
  run(ways, {{Way::gathered, 120}, {Way::by_runs, 110}, {Way::by_kernel, 100}}, 600);
  constexpr std::array kPacked{Way::gathered, Way::by_runs};
  for (int i = 0; i < 600; ++i) EXPECT_NE(ways.next(kPacked).way, Way::by_kernel);
  EXPECT_EQ(ways.best(kPacked), Way::by_runs);
}

}  // namespace
}  // namespace weft::window_ways_test
