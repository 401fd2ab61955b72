#include "host/threads/idling.hpp"

#include <gtest/gtest.h>

namespace weft::idling_test {
namespace {

using namespace std::chrono_literals;

// Yields after which the core returned soon and the wait was over: the awaited rank shares the core.
TEST(SpinLimit, SharesOfACoreSpinLess) {
  SpinLimit limit;
  EXPECT_EQ(limit.polls(), kSpins);
  limit.came_in_yield(20us);
  EXPECT_EQ(limit.polls(), kSpins / 4);
  for (int i = 0; i < 20; ++i) limit.came_in_yield(20us);
  EXPECT_EQ(limit.polls(), SpinLimit::kLeast);
}

TEST(SpinLimit, AloneOnACoreItSpinsAgain) {
  SpinLimit limit;
  for (int i = 0; i < 20; ++i) limit.came_in_yield(20us);
  limit.came_while_spinning();
  EXPECT_EQ(limit.polls(), 2 * SpinLimit::kLeast);
  limit.came_in_yield(400ns);  // nobody else ran
  EXPECT_EQ(limit.polls(), 4 * SpinLimit::kLeast);
  for (int i = 0; i < 20; ++i) limit.came_while_spinning();
  EXPECT_EQ(limit.polls(), kSpins);
}

// Next to such a program spinning is right, since each yield costs one of its time slices.
TEST(SpinLimit, AProgramThatComputesDoesNotCount) {
  SpinLimit limit;
  for (int i = 0; i < 20; ++i) limit.came_in_yield(3ms);
  EXPECT_EQ(limit.polls(), kSpins);
  for (int i = 0; i < 20; ++i) limit.came_in_yield(20us);
  limit.came_in_yield(3ms);
  EXPECT_EQ(limit.polls(), SpinLimit::kLeast);
}

TEST(Idling, SpinsThenYieldsThenSleeps) {
  SpinLimit limit;
  Idling idling(limit);
  int spins = 0, yields = 0;
  while (idling.spin()) ++spins;
  EXPECT_EQ(spins, kSpins - 1);
  EXPECT_FALSE(idling.spins());
  while (!idling.spin() && idling.yield()) ++yields;
  EXPECT_EQ(yields, kYields);
  EXPECT_LT(idling.asleep(), 10s);
  const Duration first = idling.asleep();
  EXPECT_GE(idling.asleep(), first);  // since the same moment
  idling.moved();                     // in a sleep: it says nothing of who shares the core
  EXPECT_EQ(limit.polls(), kSpins);
  EXPECT_EQ(idling.polls(), 0);
  EXPECT_TRUE(idling.spin());
}

TEST(Idling, WithMoreRanksThanCoresItYieldsAtOnce) {
  SpinLimit limit;
  Idling idling(limit, false);
  EXPECT_FALSE(idling.spin());
  EXPECT_TRUE(idling.yield());
  idling.moved();
  EXPECT_EQ(limit.polls(), kSpins);
}

TEST(Idling, LearnsOfWaits) {
  SpinLimit limit;
  for (int i = 0; i < 20; ++i) limit.came_in_yield(20us);
  Idling idling(limit);
  idling.moved();  // it had not waited
  EXPECT_EQ(limit.polls(), SpinLimit::kLeast);
  EXPECT_TRUE(idling.spin());
  idling.moved();
  EXPECT_EQ(limit.polls(), 2 * SpinLimit::kLeast);
}

}  // namespace
}  // namespace weft::idling_test
