// Groups made from groups, by color and as duplicates. Groups of one rank. Several groups of the same ranks,
// from several threads. (subgroup_test.cpp: subgroups by name.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "support/garbled_store.hpp"
#include "support/random_calls.hpp"
#include "support/recording_backend.hpp"
#include "support/shm_settings.hpp"

namespace weft::test::groups_test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

// The ranks in the world for the ranks of `g`.
std::vector<int> members(Rank& r, ProcessGroup& g) {
  std::vector<int> all(static_cast<std::size_t>(g.size()));
  g.all_gather(view(&r.rank, 1), view(all)).wait();
  return all;
}

class Groups : public OnShm {};
INSTANTIATE_TEST_SUITE_P(Shm, Groups, testing::ValuesIn(shm_settings()),
                         [](const auto& setting) { return to_string(setting.param); });

// split ----------------------------------------------------------------------------------------------------

TEST_P(Groups, SplitByColor) {
  run(5, [](Rank& r) {
    ProcessGroup g = r.group().split(r.rank % 2);
    EXPECT_EQ(members(r, g), r.rank % 2 ? (std::vector<int>{1, 3}) : (std::vector<int>{0, 2, 4}));
    EXPECT_EQ(g.rank(), r.rank / 2);
    EXPECT_EQ(g.name(), "world/split" + std::to_string(r.rank % 2));
    r.group().barrier().wait();
  });
}

TEST_P(Groups, SplitOrdersByKeyThenRank) {
  run(4, [](Rank& r) {
    const int turned[] = {3, -2, 3, INT_MIN};  // rank 3, rank 1, then 0 and 2, which are equal
    ProcessGroup g = r.group().split(7, turned[r.rank]);
    EXPECT_THAT(members(r, g), ElementsAre(3, 1, 0, 2));
    ProcessGroup same = g.split(INT_MAX);  // equal keys: in the order of g, not of the world
    EXPECT_THAT(members(r, same), ElementsAre(3, 1, 0, 2));
    ProcessGroup back = g.split(0, r.rank);
    EXPECT_THAT(members(r, back), ElementsAre(0, 1, 2, 3));
  });
}

TEST_P(Groups, ColorMinusOneIsNoGroup) {
  run(3, [](Rank& r) {
    ProcessGroup g = r.group().split(r.rank == 1 ? -1 : 4);
    EXPECT_EQ(static_cast<bool>(g), r.rank != 1);
    if (g) {
      EXPECT_THAT(members(r, g), ElementsAre(0, 2));
    }
    EXPECT_FALSE(r.group().split(-1));  // nobody's
    r.group().barrier().wait();
  });
}

// Two calls of split() with one color make two groups.
TEST_P(Groups, SplitAgain) {
  run(3, [](Rank& r) {
    ProcessGroup a = r.group().split(0), b = r.group().split(0);
    int x = 1, y = 10;
    Work first = (r.rank ? a : b).all_reduce(view(r.rank ? &x : &y, 1), view(r.rank ? &x : &y, 1));
    Work second = (r.rank ? b : a).all_reduce(view(r.rank ? &y : &x, 1), view(r.rank ? &y : &x, 1));
    second.wait();
    first.wait();
    EXPECT_EQ(x, 3);
    EXPECT_EQ(y, 30);
    if (r.rank == 0) a.abort("a is over");
    EXPECT_EQ(error_of([&] { a.barrier().wait(); }).code(), ErrorCode::aborted);
    EXPECT_THAT(members(r, b), ElementsAre(0, 1, 2));
  });
}

TEST_P(Groups, SplitInGroupsOfGroups) {
  run(6, [](Rank& r) {
    ProcessGroup half = r.group().split(r.rank / 3);
    ProcessGroup pair = half.split(half.rank() < 2 ? 0 : 1);
    const int first = r.rank / 3 * 3;
    EXPECT_EQ(members(r, pair),
              half.rank() < 2 ? (std::vector<int>{first, first + 1}) : (std::vector<int>{first + 2}));
    const std::vector<int> turned{1, 0};
    if (pair.size() == 2) {
      ProcessGroup deepest = pair.subgroup("turned", turned).duplicate();
      EXPECT_THAT(members(r, deepest), ElementsAre(first + 1, first));
    }
    half = ProcessGroup();  // the inner one does not need it
    EXPECT_EQ(members(r, pair).size(), pair.size() == 2 ? 2u : 1u);
    r.group().barrier().wait();
  });
}

TEST_P(Groups, ANegativeColorIsRefusedBeforeAnythingIsSent) {
  run(2, [](Rank& r) {
    for (const int color : {-2, INT_MIN}) {
      const Error e = error_of([&] { r.group().split(color); });
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_EQ(e.what(), "split: color is " + std::to_string(color) +
                              "; expected 0 or more, or -1 for no group [group \"world\", rank " +
                              std::to_string(r.rank) + "]");
    }
    EXPECT_EQ(r.group().split(0).size(), 2);
  });
}

TEST_P(Groups, SplitBesideAnotherCallIsAMismatch) {
  run(2, [](Rank& r) {
    const Error e = error_of([&] {
      if (r.rank == 0)
        r.group().split(0);
      else
        r.group().barrier().wait();
    });
    EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    EXPECT_THAT(e.what(), AllOf(HasSubstr("all_gather i32 x2 [call 0]"), HasSubstr("barrier [call 0]")));
    if (r.rank == 0) {
      EXPECT_THAT(e.what(), StartsWith("split: the exchange of colors (an all_gather): "));
    }
    EXPECT_EQ(error_of([&] { r.group().split(0); }).code(), ErrorCode::mismatch);  // the group has failed
  });
}

TEST_P(Groups, SplitWithoutARankIsATimeout) {
  RankOptions options;
  options.deadline = 300ms;
  run(
      3,
      [](Rank& r) {
        r.group();
        if (r.rank != 2) {
          const Error e = error_of([&] { r.group().split(0); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.what(), StartsWith("split: the exchange of colors (an all_gather): "));
          EXPECT_THAT(e.ranks(), ElementsAre(2));
        }
        r.meet("end");
      },
      options);
}

// duplicate ------------------------------------------------------------------------------------------------

TEST_P(Groups, DuplicatesAreIndependent) {
  run(3, [](Rank& r) {
    ProcessGroup& g = r.group();
    ProcessGroup d = g.duplicate(), e = d.duplicate();
    EXPECT_EQ(d.name(), "world/duplicate");
    EXPECT_EQ(d.rank(), g.rank());
    EXPECT_EQ(d.size(), g.size());
    EXPECT_EQ(d.backend(), g.backend());
    // Each group has a different number of calls, posted in a different order on each rank.
    std::vector<int> x(12, 1);
    std::vector<Work> works;
    for (int k = 0; k < 12; ++k) {
      ProcessGroup* const turn[] = {&g, &d, &e};
      works.push_back(turn[(k + r.rank) % 3]->all_reduce(view(&x[k], 1), view(&x[k], 1)));
    }
    d.barrier().wait();
    for (std::size_t k = works.size(); k-- > 0;) works[k].wait();
    EXPECT_EQ(x, std::vector<int>(12, 3));
  });
}

TEST_P(Groups, FailureOfADuplicateLeavesTheOther) {
  run(2, [](Rank& r) {
    ProcessGroup d = r.group().duplicate();
    if (r.rank == 1) d.abort("enough of it");
    const Error e = error_of([&] { d.barrier().wait(); });
    EXPECT_EQ(e.code(), ErrorCode::aborted);
    EXPECT_THAT(e.what(), HasSubstr("enough of it [group \"world/duplicate\""));
    EXPECT_TRUE(d.quiesce(5s));
    EXPECT_THAT(members(r, r.group()), ElementsAre(0, 1));
    ProcessGroup again = d.duplicate();  // of a group that has failed: its ranks are as good as before
    EXPECT_THAT(members(r, again), ElementsAre(0, 1));
  });
}

// Each group is named after its parent, but their keys in the store stay short.
TEST_P(Groups, AHundredDuplicatesOfDuplicates) {
  run(3, [](Rank& r) {
    ProcessGroup g = r.group().duplicate();
    for (int k = 0; k < 100; ++k) g = g.duplicate();
    EXPECT_THAT(members(r, g), ElementsAre(0, 1, 2));
  });
}

// A transport of a device cannot gather numbers in host memory, so split() exchanges them through the store.
TEST(GroupsOfDevices, SplitByTheStore) {
  const auto store = make_local_store();
  Context context;
  Recording recording;
  recording.move_device_memory();
  std::vector<std::thread> threads;
  const auto group = [&](int rank, Duration deadline) {
    Membership m;
    m.store = store;
    m.rank = rank;
    m.size = 3;
    m.name = "gpus";
    m.deadline = deadline;
    return ProcessGroup::create(context, recording.factory(), m);
  };
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      ProcessGroup g = group(rank, 10s);
      ProcessGroup s = g.split(rank == 1 ? -1 : 5, -rank);
      EXPECT_EQ(static_cast<bool>(s), rank != 1);
      if (s) {
        EXPECT_EQ(s.size(), 2);
        EXPECT_EQ(s.rank(), rank == 2 ? 0 : 1);
      }
      EXPECT_EQ(g.split(0).size(), 3);  // the second time over new keys
    });
  for (std::thread& t : threads) t.join();
  EXPECT_TRUE(recording.posted().empty());

  ProcessGroup alone = group(0, 50ms);  // the second "gpus", to which nobody else comes
  const Error e = error_of([&] { alone.split(0); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_STREQ(e.what(), "split: rank 1 did not call it within 0.05 s [group \"gpus\", rank 0]");
  EXPECT_THAT(e.ranks(), ElementsAre(1));
}

// The stores of a program are independent, so the first "world" in each has the same key. One process may be
// in both.
TEST(GroupsOfStores, OneNameInTwoStoresOfOneContext) {
  Context context;
  std::vector<std::thread> threads;
  for (int store_number = 0; store_number < 2; ++store_number) {
    const auto store = make_local_store();
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&context, store, store_number, rank] {
        Membership m;
        m.store = store;
        m.rank = rank;
        m.size = 2;
        m.deadline = 10s;
        ProcessGroup first = ProcessGroup::create(context, "shm", m);
        ProcessGroup second = ProcessGroup::create(context, "shm", m);
        for (ProcessGroup* g : {&first, &second}) {
          std::vector<std::int32_t> x(3, 10 * store_number + rank);
          g->all_reduce(x).wait();
          EXPECT_THAT(x, testing::Each(20 * store_number + 1));
        }
      });
  }
  for (std::thread& t : threads) t.join();
}

// A foreign text in the key for a rank's color and key.
TEST(GroupsOfDevices, GarbageInSplitsKeysIsNamed) {
  Context context;
  Recording recording;
  recording.move_device_memory();
  for (const std::string garbage :
       {"", "7", "x y", "1 2 3", "-2 0", "1  2", "99999999999 1", "0x1 0", "1.5 0"}) {
    Membership m;
    m.store = std::make_shared<GarbledStore>(make_local_store(), "gather", garbage);
    m.size = 2;
    m.name = "gpus";
    ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
    const Error e = error_of([&] { g.split(0); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    EXPECT_THAT(e.what(),
                AllOf(StartsWith("split: key \""),
                      HasSubstr("/0\" holds \"" + garbage +
                                "\"; expected a color of -1 or more and a key [group \"gpus\", rank 0]")));
    EXPECT_THAT(e.ranks(), ElementsAre(0));
  }
}

// One rank -------------------------------------------------------------------------------------------------

class OneRank : public testing::Test {
 protected:
  OneRank() : group(ProcessGroup::create(context, recording.factory(), Membership{})) {}
  ~OneRank() override { EXPECT_TRUE(recording.posted().empty()) << "the transport was asked"; }

  // Finished before wait(): there is nothing to wait for.
  static void expect_done(Work work) {
    EXPECT_FALSE(work.valid());
    EXPECT_TRUE(work.done());
    work.wait();
  }

  Context context;
  Recording recording;
  ProcessGroup group;
  std::vector<float> in{1, 2, 3, 4}, out = std::vector<float>(4, 9);
  const std::vector<float> expected{1, 2, 3, 4};
};

TEST_F(OneRank, EveryOperationCopies) {
  const auto check = [&](Work work, const char* what) {
    SCOPED_TRACE(what);
    expect_done(std::move(work));
    EXPECT_EQ(out, expected);
    out.assign(4, 9);
  };
  check(group.all_reduce(view(in), view(out)), "all_reduce");
  check(group.reduce(view(in), view(out), 0), "reduce");
  check(group.broadcast(view(in), view(out), 0), "broadcast");
  check(group.all_gather(view(in), view(out)), "all_gather");
  check(group.reduce_scatter(view(in), view(out)), "reduce_scatter");
  check(group.gather(view(in), view(out), 0), "gather");
  check(group.scatter(view(in), view(out), 0), "scatter");
  check(group.all_to_all(view(in), view(out)), "all_to_all");
  check(group.coalesced({call::barrier(), call::broadcast(view(in), view(out), 0)}), "coalesced");
  expect_done(group.barrier());
  // In place, and of nothing.
  expect_done(group.all_reduce(view(in), view(in)));
  expect_done(group.all_gather(view(in), view(in)));
  expect_done(group.scatter(view(in), view(in), 0));
  EXPECT_EQ(in, expected);
  const TensorView nothing = view(static_cast<float*>(nullptr), 0);
  expect_done(group.all_reduce(nothing, nothing));
  expect_done(group.all_to_all(nothing, nothing));
}

TEST_F(OneRank, BlocksWithOffsets) {
  const std::vector<std::int64_t> two{2}, four{4}, zero{0}, one{1}, at_two{2};
  const TensorView first = view(in.data(), 2);
  expect_done(group.all_gather_v(first, view(out), {two, at_two}));
  EXPECT_THAT(out, ElementsAre(9, 9, 1, 2));
  expect_done(group.all_gather_v(view(in), view(out), {four}));
  EXPECT_EQ(out, expected);
  out.assign(4, 9);
  expect_done(group.reduce_scatter_v(view(in), view(out.data(), 2), {two, at_two}));
  EXPECT_THAT(out, ElementsAre(3, 4, 9, 9));
  out.assign(4, 9);
  expect_done(group.all_to_all_v(view(in), view(out), {two, one}, {two, at_two}));
  EXPECT_THAT(out, ElementsAre(9, 9, 2, 3));
  expect_done(group.all_to_all_v(view(in), view(out), {zero, at_two}, {zero, one}));
  EXPECT_THAT(out, ElementsAre(9, 9, 2, 3));
  expect_done(group.all_gather_v(view(in.data() + 2, 2), view(in), {two, at_two}));  // in place
  EXPECT_EQ(in, expected);
}

TEST_F(OneRank, Reductions) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max}) {
    expect_done(group.all_reduce(view(in), view(out), {.op = op, .order = Order::canonical}));
    EXPECT_EQ(out, expected) << name(op);
  }
  float odd = -std::numeric_limits<float>::quiet_NaN(), quiet = 0;
  expect_done(group.all_reduce(view(&odd, 1), view(&quiet, 1), {.op = ReduceOp::max}));
  EXPECT_TRUE(std::isnan(quiet) && !std::signbit(quiet));  // the one quiet NaN
}

TEST_F(OneRank, ReductionsThatChangeASingleValue) {
  expect_done(group.all_reduce(view(in), view(out), {.op = ReduceOp::prod}));
  EXPECT_EQ(out, expected);
  expect_done(group.all_reduce(view(in), view(out), {.op = ReduceOp::premul_sum(0.5)}));
  EXPECT_THAT(out, ElementsAre(0.5, 1, 1.5, 2));
  expect_done(group.reduce_scatter(view(in), view(in), {.op = ReduceOp::premul_sum(2)}));
  EXPECT_THAT(in, ElementsAre(2, 4, 6, 8));
  const UserReduction never{"never", [](const void*, const void*, void*, std::int64_t, DType) {
                              ADD_FAILURE() << "there is nothing to combine with";
                            }};
  expect_done(group.all_reduce(view(in), view(out), {.op = ReduceOp::of(never)}));
  EXPECT_EQ(out, in);

  std::vector<std::int32_t> bits{6, 0, -1}, truths(3);
  expect_done(group.all_reduce(view(bits), view(truths), {.op = ReduceOp::bit_xor}));
  EXPECT_EQ(truths, bits);
  for (const ReduceOp op : {ReduceOp::logical_and, ReduceOp::logical_or, ReduceOp::logical_xor}) {
    expect_done(group.all_reduce(view(bits), view(truths), {.op = op}));
    EXPECT_THAT(truths, ElementsAre(1, 0, 1)) << name(op);
  }
}

TEST_F(OneRank, ChecksAndFailuresHold) {
  EXPECT_THAT(error_of([&] { group.broadcast(view(in), view(out), 1).wait(); }).what(),
              HasSubstr("broadcast: root is 1; expected 0 to 0 (group size 1)"));
  EXPECT_THAT(error_of([&] { group.all_reduce(view(in), view(out.data(), 3)).wait(); }).what(),
              HasSubstr("out has 3 elements; expected 4 (in)"));
  ProcessGroup other = group.duplicate();
  ProcessGroup third = group.split(3);
  EXPECT_FALSE(group.split(-1));
  group.abort("enough");
  EXPECT_THAT(error_of([&] { group.barrier().wait(); }).what(), HasSubstr("aborted by rank 0: enough"));
  expect_done(other.all_reduce(view(in), view(out)));
  EXPECT_EQ(out, expected);
  EXPECT_EQ(third.size(), 1);
  expect_done(third.barrier());
}

// A message of a rank to itself goes through the transport, like other messages.
TEST(OneRankOnShm, SendsToItself) {
  Context context;
  ProcessGroup group = ProcessGroup::create(context, "shm", {});
  const std::vector<int> in{1, 2, 3};
  std::vector<int> out(3);
  group.send_recv(view(in), 0, view(out), 0, {.tag = 5}).wait();
  EXPECT_EQ(out, in);
}

// Threads --------------------------------------------------------------------------------------------------

// Two seeds: one that all ranks share, and one for this rank only.
void at_random(Rank& r, ProcessGroup& g, int calls, unsigned which) {
  Variety v;
  v.many = {700, 5000, 20011};
  calls_at_random(r, g, calls, std::mt19937(which),
                  std::mt19937(1000 * which + static_cast<unsigned>(r.rank)), v, Groups::GetParam().memory);
}

TEST_P(Groups, TwoOverlappingGroupsOfTheSameRanksInterleavedFromTwoThreads) {
  run(3, [](Rank& r) {
    const std::vector<int> all{0, 1, 2};
    ProcessGroup a = r.group().subgroup("same", all), b = r.group().subgroup("same", all);
    std::thread other([&] { at_random(r, b, 120, 2); });
    at_random(r, a, 120, 1);
    other.join();
    r.group().barrier().wait();
  });
}

// Threads alternate between both groups. A call on one group is posted and waited for between calls of the
// other. A peer that waits in one group calls the other only after this rank has done its part in the first.
TEST_P(Groups, AskingInOneGroupDrivesTheOthers) {
  run(2, [](Rank& r) {
    ProcessGroup other = r.group().duplicate();
    std::vector<float> in(50000, 1), out(100000);
    Work here = r.group().all_gather(view(in), view(out));
    if (r.rank == 0) here.wait();
    Work there = other.barrier();
    const Deadline limit = Deadline::after(10s);
    while (!there.done()) ASSERT_FALSE(limit.passed()) << "the other rank never came";
    if (r.rank == 1) here.wait();
  });
}

TEST_P(Groups, TwoThreadsTakeTurnsOnTwoGroups) {
  run(2, [](Rank& r) {
    ProcessGroup groups[] = {r.group().duplicate(), r.group().duplicate()};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t)
      threads.emplace_back([&, t] {
        for (int k = 0; k < 100; ++k) {
          // Messages are ordered per tag only, so both threads may use both groups.
          const int out = 1000 * r.rank + 10 * k + t;
          int in[2] = {-1, -1};
          Work w[2];
          for (int g = 0; g < 2; ++g)
            w[g] = groups[(g + k) % 2].send_recv(view(&out, 1), 1 - r.rank, view(&in[g], 1), 1 - r.rank,
                                                 {.tag = t});
          w[k % 2].wait();
          w[1 - k % 2].wait();
          const int expected = 1000 * (1 - r.rank) + 10 * k + t;
          ASSERT_THAT(in, ElementsAre(expected, expected));
        }
      });
    for (std::thread& t : threads) t.join();
    groups[0].barrier().wait();
  });
}

// Two threads make groups at the same time, each from its own parent.
TEST_P(Groups, MadeFromTwoThreads) {
  run(2, [](Rank& r) {
    ProcessGroup parents[] = {r.group().duplicate(), r.group().duplicate()};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t)
      threads.emplace_back([&, t] {
        for (int k = 0; k < 10; ++k) {
          ProcessGroup g = k % 2 ? parents[t].split(t, -r.rank) : parents[t].duplicate();
          ASSERT_EQ(members(r, g), k % 2 ? (std::vector<int>{1, 0}) : (std::vector<int>{0, 1}));
        }
      });
    for (std::thread& t : threads) t.join();
  });
}

TEST_P(Groups, FourRanksOnTwoCoresComplete) {
  run(4, [](Rank& r) {
    ProcessGroup halves = r.group().split(r.rank % 2), all = r.group().duplicate();
    for (unsigned round = 0; round < 3; ++round) {
      at_random(r, r.group(), 40, 10 + round);
      at_random(r, all, 40, 20 + round);
      ASSERT_EQ(members(r, halves), r.rank % 2 ? (std::vector<int>{1, 3}) : (std::vector<int>{0, 2}));
    }
  });
}

}  // namespace
}  // namespace weft::test::groups_test
