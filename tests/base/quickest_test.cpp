// Tests the choice among several ways by their measured times.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>

#include "base/quickest.hpp"

namespace weft::quickest_test {
namespace {

enum class Way : std::uint8_t { first, second, third };
using Ways = Quickest<Way, 3>;

constexpr std::array kAll{Way::first, Way::second, Way::third};

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

TEST(Quickest, AllAreTriedAtFirstAndTheQuickestIsUsed) {
  for (const Way quickest : kAll) {
    Ways ways;
    Costs costs{{Way::first, 130}, {Way::second, 150}, {Way::third, 140}};
    costs[quickest] = 100;
    for (const auto& [way, times] : run(ways, costs, kAtFirst)) EXPECT_EQ(times, Ways::kTries);
    auto used = run(ways, costs, static_cast<int>(Ways::kSoon) - kAtFirst);
    EXPECT_EQ(used.size(), 1U);
    EXPECT_EQ(used.begin()->first, quickest);
    EXPECT_EQ(ways.best(kAll), quickest);
  }
}

TEST(Quickest, TheOthersAreTriedAgainAndSlowOnesSeldom) {
  Ways ways;
  const Costs costs{{Way::first, 100}, {Way::second, 190}, {Way::third, 300}};
  constexpr int kRounds = 32;
  const auto used = run(ways, costs, kRounds * static_cast<int>(Ways::kAgain));
  constexpr auto kTries = static_cast<double>(Ways::kTries);
  // After 128, 256, ... and then each 2048 or 16384.
  EXPECT_NEAR(used.at(Way::second), kTries * (1 + 4 + kRounds), 2 * kTries);
  EXPECT_NEAR(used.at(Way::third), kTries * (1 + 7 + kRounds * Ways::kAgain / Ways::kSeldom), 2 * kTries);
}

TEST(Quickest, WhatBecomesQuickerIsUsed) {
  Ways ways;
  run(ways, {{Way::first, 100}, {Way::second, 120}, {Way::third, 130}}, 1000);
  EXPECT_EQ(ways.best(kAll), Way::first);
  run(ways, {{Way::first, 200}, {Way::second, 300}, {Way::third, 130}}, static_cast<int>(3 * Ways::kAgain));
  EXPECT_EQ(ways.best(kAll), Way::third);
}

// The caches get used to a way: the first tries of a row take longer, and do not count.
TEST(Quickest, TheFirstTriesDoNotCount) {
  Ways ways;
  std::map<Way, int> tries;
  for (int i = 0; i < kAtFirst; ++i) {
    const Ways::Next next = ways.next(kAll);
    const int before = tries[next.way]++;
    const std::uint64_t warm = next.way == Way::third ? 90 : 100;
    if (next.timed) ways.took(next.way, before < 5 ? 500 : warm);
  }
  EXPECT_EQ(ways.best(kAll), Way::third);
}

TEST(Quickest, OneSlowTryDoesNotCount) {
  Ways ways;
  run(ways, {{Way::first, 100}, {Way::second, 120}, {Way::third, 130}}, 100);
  ways.took(Way::first, 100'000);
  EXPECT_EQ(ways.best(kAll), Way::first);
}

// If a sequence of tries is interrupted, because its way is possible only from time to time, the next one
// does not begin at once.
TEST(Quickest, WhatIsPossibleNowAndThenIsNotTriedForEver) {
  Ways ways;
  constexpr std::array kTwo{Way::first, Way::second};
  const Costs costs{{Way::first, 100}, {Way::second, 110}, {Way::third, 1000}};
  int third = 0;
  for (int i = 0; i < 10'000; ++i) {
    const Ways::Next next = i % 2 == 0 ? ways.next(kTwo) : ways.next(kAll);
    third += next.way == Way::third ? 1 : 0;
    if (next.timed) ways.took(next.way, costs.at(next.way));
  }
  EXPECT_LT(third, 100);
}

TEST(Quickest, WhatIsNotPossibleIsNotUsed) {
  Ways ways;
  constexpr std::array kOne{Way::first};
  for (int i = 0; i < 20; ++i) {
    const Ways::Next next = ways.next(kOne);
    EXPECT_EQ(next.way, Way::first);
    EXPECT_FALSE(next.timed);
  }
  // The quickest way was possible, and then is not.
  run(ways, {{Way::first, 120}, {Way::second, 110}, {Way::third, 100}}, 600);
  constexpr std::array kTwo{Way::first, Way::second};
  for (int i = 0; i < 600; ++i) EXPECT_NE(ways.next(kTwo).way, Way::third);
  EXPECT_EQ(ways.best(kTwo), Way::second);
}

}  // namespace
}  // namespace weft::quickest_test
