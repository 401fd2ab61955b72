// Tests what a transport knows of the ranks on its host: their doorbells, and whether they are alive.
#include "weft/backends/host_ranks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/roll_call_messages.hpp"

namespace weft::test::host_ranks_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

GroupInit group_of(Rank& r) {
  return {.context = r.context,
          .store = r.store,
          .token = "host_ranks",
          .name = "g",
          .rank = r.rank,
          .size = r.size,
          .process_rank = r.rank,
          .deadline = Deadline::after(20s)};
}

HostRanks meet(Rank& r) {
  const GroupInit b = group_of(r);
  return HostRanks(b, join(b, "host_ranks", HostRanks::address(b), 1));
}

class HostRanksOf : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(All, HostRanksOf, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

// Each rank sleeps until the one before it has woken it.
TEST_P(HostRanksOf, WakeOneAnother) {
  run_ranks(GetParam(), 3, [](Rank& r) {
    const HostRanks ranks = meet(r);
    const Doorbell own = own_doorbell(group_of(r));
    const std::uint32_t before = own.read();
    r.meet("all have looked");
    if (r.rank > 0) {
      const Deadline deadline = Deadline::after(20s);
      while (own.read() == before && !deadline.passed()) own.sleep(before, deadline.left());
      EXPECT_NE(own.read(), before);
    }
    if (r.rank + 1 < r.size) {
      ASSERT_TRUE(ranks.doorbell(r.rank + 1));
      ranks.doorbell(r.rank + 1).ring();
    }
    for (int other = 0; other < r.size; ++other) EXPECT_TRUE(ranks.alive(other));
    r.meet("end");
  });
}

TEST(HostRanks, OfNoRanks) {
  const HostRanks none;
  none.ring_all();
  for (const int rank : {-1, 0, 7}) {
    EXPECT_FALSE(none.is_here(rank));
    EXPECT_TRUE(none.alive(rank));
    EXPECT_FALSE(none.doorbell(rank));
  }
  const Doorbell bell = none.doorbell(0);
  EXPECT_EQ(bell.read(), 0u);
  bell.ring();
  bell.sleep(0, 1ms);
}

TEST(RollCallMessages, RanksOfOtherGroupsAreLeftOut) {
  std::vector<std::byte> pong = RollCallMessages::encode(std::vector<int>{-1, 1, 9, 10, -2147483647}, 10);
  pong.erase(pong.begin(), pong.begin() + RollCallMessages::kLastCallBytes);
  EXPECT_EQ(pong, (std::vector<std::byte>{std::byte{2}, std::byte{2}}));
}

TEST(HostRanks, ADeadProcessIsNoticed) {
  RankProcesses ranks(2, [](Rank& r) {
    const HostRanks others = meet(r);
    r.store->set("met/" + std::to_string(r.rank), "1");
    if (r.rank == 1) {
      r.store->get("met/0", Deadline::after(20s));
      raise(SIGKILL);
    }
    const Deadline deadline = Deadline::after(20s);
    while (others.alive(1) && !deadline.passed()) std::this_thread::yield();
    EXPECT_FALSE(others.alive(1));
    EXPECT_TRUE(others.alive(0));
    others.ring_all();  // of one that is not there any more: nothing happens
  });
  ranks.finish({1});
}

TEST(HostRanks, WhatIsNoAddressIsRefused) {
  run_ranks(Ranks::threads, 1, [](Rank& r) {
    const std::vector<std::string> garbage = {"seven"};
    const Error e = error_of([&] { HostRanks(group_of(r), garbage); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_THAT(e.what(), HasSubstr("group \"g\": rank 0: it gave \"seven\"; expected the address of a rank "
                                    "on its host [rank 0]"));
  });
}

// A rank on another host counts as alive, since nothing is known of it, and nobody can wake it.
TEST(HostRanks, RanksOfOtherHostsHaveNoDoorbell) {
  run_ranks(Ranks::threads, 1, [](Rank& r) {
    std::string address = HostRanks::address(group_of(r));
    // "number weft1 host socket …"
    const std::size_t host = address.find("weft1 ") + 6;
    address.insert(host, "elsewhere-");
    const std::vector<std::string> addresses = {address};
    const HostRanks ranks(group_of(r), addresses);
    EXPECT_FALSE(ranks.doorbell(0));
    EXPECT_TRUE(ranks.alive(0));
  });
}

}  // namespace
}  // namespace weft::test::host_ranks_test
