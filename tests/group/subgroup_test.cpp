// Groups within groups, and several groups over the same ranks: each independent of the others, in any order
// and from any thread.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "support/sanitizers.hpp"
#include "support/shm_settings.hpp"
#include "support/values.hpp"

namespace weft::test::subgroup_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class Subgroup : public OnShm {
 protected:
  // f32; every element says who gave it.
  static Tensor of_rank(Rank& r, std::int64_t count) {
    const Tensor t(r.context, Shape{count}, DType::f32, GetParam().memory);
    for (std::int64_t i = 0; i < count; ++i) store(t, i, (1 << r.rank) + value(0, i));
    return t;
  }

  // The sum over `g` of what of_rank() gives must be that of these ranks of the world, and they in this
  // order.
  static void expect_members(Rank& r, ProcessGroup& g, const std::vector<int>& ranks) {
    ASSERT_EQ(g.size(), static_cast<int>(ranks.size()));
    ASSERT_EQ(ranks[static_cast<std::size_t>(g.rank())], r.rank);
    for (const std::int64_t count : {1, 700, 5000}) {
      const Tensor in = of_rank(r, count), sum = of_rank(r, count), all = of_rank(r, count * g.size());
      Work reduce = g.all_reduce(in, sum), gather = g.all_gather(in, all);
      reduce.wait();
      gather.wait();
      int who = 0;
      for (const int rank : ranks) who += 1 << rank;
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(load(sum, i), who + g.size() * value(0, i)) << g.name() << " [" << i << "]";
        for (int m = 0; m < g.size(); ++m)
          ASSERT_EQ(load(all, m * count + i), (1 << ranks[static_cast<std::size_t>(m)]) + value(0, i));
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Shm, Subgroup, testing::ValuesIn(shm_settings()),
                         [](const auto& setting) { return to_string(setting.param); });

TEST_P(Subgroup, RowsAndColumns) {
  for (const int columns : {2, 3}) {
    run(2 * columns, [columns](Rank& r) {
      std::vector<int> row, column;
      for (int c = 0; c < columns; ++c) row.push_back(r.rank / columns * columns + c);
      for (int k = 0; k < 2; ++k) column.push_back(k * columns + r.rank % columns);
      ProcessGroup rows = r.group().subgroup("row", row), cols = r.group().subgroup("column", column);
      for (int round = 0; round < 3; ++round) {
        expect_members(r, rows, row);
        expect_members(r, cols, column);
        r.group().barrier().wait();
      }
    });
  }
}

TEST_P(Subgroup, OverlappingGroups) {
  run(4, [](Rank& r) {
    const std::vector<int> low{0, 1, 2}, high{1, 2, 3}, all{0, 1, 2, 3};
    ProcessGroup a, b;
    if (r.rank != 3) a = r.group().subgroup("s", low);  // the same name over other ranks
    if (r.rank != 0) b = r.group().subgroup("s", high);
    ProcessGroup c = r.group().subgroup("s", all);
    for (int round = 0; round < 3; ++round) {
      if (a) expect_members(r, a, low);
      expect_members(r, c, all);
      if (b) expect_members(r, b, high);
    }
  });
}

TEST_P(Subgroup, TheSameNameTwiceIsTwoGroups) {
  run(3, [](Rank& r) {
    const std::vector<int> ranks{0, 1, 2};
    ProcessGroup a = r.group().subgroup("twin", ranks), b = r.group().subgroup("twin", ranks);
    const Tensor x = of_rank(r, 4000), y = of_rank(r, 4000);
    // Each rank makes the groups in another order: the groups are independent.
    Work w[2];
    w[r.rank % 2] = (r.rank % 2 ? b : a).all_reduce(x, x);
    w[1 - r.rank % 2] = (r.rank % 2 ? a : b).all_reduce(y, y);
    w[0].wait();
    w[1].wait();
    a = ProcessGroup();  // and one may go
    expect_members(r, b, ranks);
    r.group().barrier().wait();
  });
}

TEST_P(Subgroup, RanksInTheOrderGiven) {
  run(4, [](Rank& r) {
    r.group();
    if (r.rank == 1) return;
    const std::vector<int> ranks{3, 0, 2};
    ProcessGroup g = r.group().subgroup("turned", ranks);
    expect_members(r, g, ranks);
    const Tensor t = of_rank(r, 3000);
    g.broadcast(t, t, 0).wait();
    EXPECT_EQ(load(t, 0), 8 + value(0, 0));  // from rank 3 of the world
    const std::vector<int> inner{2, 1};      // of the turned group: 2, 0 of the world
    if (g.rank() != 0) {
      ProcessGroup h = g.subgroup("inner", inner);
      expect_members(r, h, {2, 0});
    }
  });
}

TEST_P(Subgroup, OnlyMembersCall) {
  run(4, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 0 || r.rank == 3) {
      const std::vector<int> ranks{0, 3};
      ProcessGroup g = r.group().subgroup("pair", ranks);
      expect_members(r, g, ranks);
      r.meet("pair is done");
    } else {  // no calls of weft at all
      r.meet("pair is done");
    }
  });
}

TEST_P(Subgroup, AMemberThatDoesNotComeIsNamed) {
  RankOptions options;
  options.deadline = 400ms;
  run(
      3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank != 1) {
          const int ranks[] = {2, 1, 0};
          const Error e = error_of([&] { r.group().subgroup("s", ranks); });
          EXPECT_EQ(e.code(), ErrorCode::timeout);
          EXPECT_THAT(e.what(), HasSubstr("group \"s\": rank 1 did not join within "));
          EXPECT_THAT(e.ranks(), testing::ElementsAre(1));
        }
        if (r.rank == 2) {  // its caller knows the parent's numbers
          const int ranks[] = {0, 2};
          const Error e = error_of([&] { r.group().subgroup("t", ranks); });
          EXPECT_THAT(e.what(), HasSubstr("group \"t\": rank 0 did not join within "));
          EXPECT_THAT(e.ranks(), testing::ElementsAre(0));
        }
        if (r.rank == 2) {
          const int ranks[] = {2, 0};
          const Error e = error_of([&] { r.group().subgroup("u", ranks); });
          EXPECT_THAT(e.what(), HasSubstr("group \"u\": rank 1 did not join within "));
          EXPECT_THAT(e.what(), HasSubstr(" (in group \"world\": rank 0)"));
          EXPECT_THAT(e.ranks(), testing::ElementsAre(0));
        }
        r.meet("end");
        r.group().barrier().wait();  // the parent is none the worse
      },
      options);
}

TEST_P(Subgroup, OfOneRank) {
  run(3, [](Rank& r) {
    const std::vector<int> me{r.rank};
    ProcessGroup g = r.group().subgroup("alone", me);
    expect_members(r, g, me);
    const Tensor out = of_rank(r, 6000), in = of_rank(r, 6000);
    for (std::int64_t i = 0; i < 6000; ++i) store(in, i, 0);
    Work send = g.send(out, 0), recv = g.recv(in, 0);
    send.wait();
    recv.wait();
    EXPECT_EQ(load(in, 5999), (1 << r.rank) + value(0, 5999));
    r.group().barrier().wait();
  });
}

TEST_P(Subgroup, WaitsInOppositeOrder) {
  run(3, [](Rank& r) {
    const std::vector<int> ranks{0, 1, 2};
    ProcessGroup a = r.group().subgroup("a", ranks), b = r.group().subgroup("b", ranks);
    for (int round = 0; round < 20; ++round) {
      const std::int64_t count = round % 2 ? 100 : 300000;
      const Tensor x = of_rank(r, count), y = of_rank(r, count);
      // Post in opposite orders, wait in opposite orders.
      Work first, second;
      if ((r.rank + round) % 2) {
        first = a.all_reduce(x, x);
        second = b.all_reduce(y, y);
      } else {
        first = b.all_reduce(y, y);
        second = a.all_reduce(x, x);
      }
      if (round % 3) {
        first.wait();
        second.wait();
      } else {
        second.wait();
        first.wait();
      }
      for (std::int64_t i = 0; i < count; i += 97) {
        ASSERT_EQ(load(x, i), 7 + 3 * value(0, i));
        ASSERT_EQ(load(y, i), 7 + 3 * value(0, i));
      }
    }
  });
}

// One group waits when the world fails. The other group continues.
TEST_P(Subgroup, FailureOfOneGroupLeavesTheOthersAlone) {
  run(2, [](Rank& r) {
    const std::vector<int> ranks{0, 1};
    ProcessGroup a = r.group().subgroup("a", ranks), b = r.group().subgroup("b", ranks);
    if (r.rank == 0) a.abort("a is over");
    EXPECT_THAT(error_of([&] { a.barrier().wait(); }).what(),
                HasSubstr("aborted by rank 0: a is over [group \"a\""));
    expect_members(r, b, ranks);
    r.group().barrier().wait();
  });
}

// Two threads per rank, each with its own group, at different speeds.
TEST_P(Subgroup, TwoThreadsTwoGroups) {
  // A block that the peer frees in one thread and exposes in the other is used again if no rank here notices
  // it.
  if (GetParam().kind == Ranks::processes && !kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  run(2, [](Rank& r) {
    const std::vector<int> ranks{0, 1};
    ProcessGroup groups[] = {r.group().subgroup("a", ranks), r.group().subgroup("b", ranks)};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 sizes(static_cast<unsigned>(t)), pace(static_cast<unsigned>(10 * r.rank + t));
        std::vector<std::pair<Tensor, Work>> open;
        const auto close = [&](std::size_t left) {
          while (open.size() > left) {
            auto& [tensor, work] = open.front();
            work.wait();
            for (std::int64_t i = 0; i < tensor.count(); i += 31)
              ASSERT_EQ(load(tensor, i), 3 + 2 * value(0, i));
            open.erase(open.begin());
          }
        };
        for (int k = 0; k < 150; ++k) {
          const std::int64_t count = sizes() % 4 == 0 ? 20000 + sizes() % 1000 : sizes() % 500;
          Tensor x = of_rank(r, count);
          open.emplace_back(x, groups[t].all_reduce(x, x));
          if (pace() % 3 == 0) std::this_thread::yield();
          if (pace() % 20 == 0) std::this_thread::sleep_for(1ms);
          close(pace() % 6);
        }
        close(0);
      });
    }
    for (std::thread& t : threads) t.join();
  });
}

// Works of one group, each waited for by a thread of its own.
TEST_P(Subgroup, ManyThreadsWaitForOneGroup) {
  run(2, [](Rank& r) {
    for (int round = 0; round < 20; ++round) {
      constexpr int kThreads = 6;
      std::vector<Tensor> tensors;
      std::vector<Work> works;
      for (int k = 0; k < kThreads; ++k) {
        tensors.push_back(of_rank(r, k % 2 ? 40000 : 10 + k));
        works.push_back(r.group().all_reduce(tensors.back(), tensors.back()));
      }
      std::vector<std::thread> threads;
      for (std::size_t k = 0; k < kThreads; ++k)
        threads.emplace_back([&, k] {
          works[k].wait();
          for (std::int64_t i = 0; i < tensors[k].count(); i += 13)
            ASSERT_EQ(load(tensors[k], i), 3 + 2 * value(0, i));
        });
      for (std::thread& t : threads) t.join();
    }
  });
}

// Messages of one group, sent and received by several threads of each rank, a tag each.
TEST_P(Subgroup, ManyThreadsSendThroughOneGroup) {
  run(2, [](Rank& r) {
    std::vector<std::thread> threads;
    ProcessGroup& g = r.group();
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (int k = 0; k < 60; ++k) {
          const std::int64_t count = k % 5 == 0 ? 5000 : 20;
          const Tensor out = of_rank(r, count), in = of_rank(r, count);
          Work send = g.send(out, 1 - r.rank, {.tag = t}), recv = g.recv(in, 1 - r.rank, {.tag = t});
          recv.wait();
          send.wait();
          for (std::int64_t i = 0; i < count; i += 7)
            ASSERT_EQ(load(in, i), (1 << (1 - r.rank)) + value(0, i));
        }
      });
    }
    for (std::thread& t : threads) t.join();
    g.barrier().wait();
  });
}

// n descriptors and no more, until it goes: those below a limit that are free are taken.
class FewDescriptors {
 public:
  explicit FewDescriptors(int n) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few{256, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
    for (int fd = 0; (fd = ::dup(0)) >= 0;) taken_.push_back(fd);
    for (; n > 0; --n, taken_.pop_back()) ::close(taken_.back());
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() {
    for (const int fd : taken_) ::close(fd);
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }

 private:
  rlimit before_{};
  std::vector<int> taken_;
};

// With one descriptor left rank 0 has memory for the group, but cannot accept connections that ask for it.
class SplitsWithFewDescriptors : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Of, SplitsWithFewDescriptors, testing::Values(0, 1),
                         [](const auto& p) { return "rank_" + std::to_string(p.param); });

TEST_P(SplitsWithFewDescriptors, NameTheLimit) {
  RankProcesses ranks(2, [who = GetParam()](Rank& r) {
    Membership m = r.membership("parent");
    m.deadline = 8s;
    ProcessGroup parent = ProcessGroup::create(r.context, "shm", m), child;
    parent.barrier().wait();
    int refusals = 0;
    for (int left = 0; !child && left < 16; ++left) {
      {
        std::optional<FewDescriptors> few;
        if (r.rank == who) few.emplace(left);
        parent.barrier().wait();
        const auto began = Clock::now();
        try {
          child = parent.split(0, 0);
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("Too many open files (ulimit -n is 256)"));
          if (r.rank != who) {
            EXPECT_THAT(e.what(), HasSubstr(fmt::format("rank {} cannot make it: ", who)));
          }
          EXPECT_LT(Clock::now() - began, 4s);
          ++refusals;
        }
      }
      parent.barrier().wait();
    }
    EXPECT_GT(refusals, 0);
    ASSERT_TRUE(child);
    child.barrier().wait();
  });
  ranks.finish();
}

// Gloo does not report why it cannot resolve an address.
TEST(Gloo, ASplitWithoutDescriptorsNamesTheLimit) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  if (!kTypesWithoutDescriptors) GTEST_SKIP() << kNoTypesWithoutDescriptors;
  RankOptions options;
  options.backend = "gloo";
  RankProcesses ranks(
      2,
      [](Rank& r) {
        r.group().barrier().wait();
        std::optional<FewDescriptors> none;
        if (r.rank == 1) none.emplace(0);
        const Error e = error_of([&] { r.group().split(0, 0); });
        none.reset();
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("Too many open files (ulimit -n is 256)"));
        if (r.rank == 0) {
          EXPECT_THAT(e.what(), HasSubstr("rank 1 cannot make it: "));
        }
        r.group().split(0, 0).barrier().wait();
      },
      options);
  ranks.finish();
}

}  // namespace
}  // namespace weft::test::subgroup_test
