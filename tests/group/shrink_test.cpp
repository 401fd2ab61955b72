// The survivors of a group continue in a smaller group: which ranks are in it, which ranks get the error that
// they are not, and that no rank waits forever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "support/garbled_store.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::shrink_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int> parents_of(const ProcessGroup& g) {
  return {g.parent_ranks().begin(), g.parent_ranks().end()};
}

// Calls over `g` give the right results.
void expect_works(ProcessGroup& g) {
  for (const std::int64_t count : {std::int64_t{7}, std::int64_t{70001}}) {
    std::vector<std::int32_t> data(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i)
      data[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % 100 + g.rank());
    g.all_reduce(view(data), view(data)).wait();
    const int n = g.size();
    for (std::int64_t i = 0; i < count; ++i)
      ASSERT_EQ(data[static_cast<std::size_t>(i)], i % 100 * n + n * (n - 1) / 2) << "element " << i;
  }
  std::vector<std::int32_t> all(static_cast<std::size_t>(g.size()));
  const std::int32_t mine = g.parent_ranks().empty() ? g.rank() : g.parent_ranks()[g.rank()];
  g.all_gather(view(&mine, 1), view(all)).wait();
  EXPECT_EQ(all, parents_of(g));
}

// A failed call of the old group, with any error.
Error failed_call(ProcessGroup& g) {
  return error_of([&] {
    for (;;) g.barrier().wait();
  });
}

void skip_if_absent(const std::string& backend) {
  if (backend == "gloo" && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
}

class Shrink : public testing::TestWithParam<std::tuple<const char*, Ranks>> {
 protected:
  void SetUp() override { skip_if_absent(backend()); }
  std::string backend() const { return std::get<0>(GetParam()); }
  Ranks kind() const { return std::get<1>(GetParam()); }
  RankOptions options() const {
    RankOptions o;
    o.backend = backend();
    o.deadline = 10s;
    return o;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Over, Shrink,
    testing::Values(std::tuple("shm", Ranks::threads), std::tuple("shm", Ranks::processes),
                    std::tuple("gloo", Ranks::threads), std::tuple("gloo", Ranks::processes)),
    [](const auto& p) { return std::string(std::get<0>(p.param)) + "_" + to_string(std::get<1>(p.param)); });

TEST_P(Shrink, AHealthyGroup) {
  run_ranks(
      kind(), 3,
      [](Rank& r) {
        r.group().barrier().wait();
        ProcessGroup all = r.group().shrink();
        EXPECT_EQ(all.size(), 3);
        EXPECT_EQ(all.rank(), r.rank);
        EXPECT_EQ(all.name(), "world/shrunk");
        EXPECT_THAT(parents_of(all), ElementsAre(0, 1, 2));
        expect_works(all);
        r.group().barrier().wait();  // nobody was left out: it is as before
        ProcessGroup again = r.group().shrink();
        expect_works(again);
        ProcessGroup third = again.shrink();
        EXPECT_EQ(third.name(), "world/shrunk2");
        expect_works(third);
      },
      options());
}

TEST_P(Shrink, AfterAnAbort) {
  run_ranks(
      kind(), 3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 1) r.group().abort("once more");
        EXPECT_EQ(failed_call(r.group()).code(), ErrorCode::aborted);
        ProcessGroup all = r.group().shrink();
        r.group() = ProcessGroup();
        expect_works(all);
      },
      options());
}

// A rank that has destroyed its group, perhaps because of an exception, has left, and no rank waits for it.
// First rank 0 leaves, then another of the remaining ranks.
TEST_P(Shrink, RanksThatLeft) {
  run_ranks(
      kind(), 4,
      [](Rank& r) {
        ProcessGroup g = std::move(r.group());
        g.barrier().wait();
        const auto began = Clock::now();
        for (int left : {0, 2}) {  // the second was rank 3
          if (g.rank() == left) {
            g = ProcessGroup();
            break;
          }
          const Error e = failed_call(g);
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
          EXPECT_THAT(ranks_of(e), ElementsAre(left));
          g = g.shrink();
          EXPECT_EQ(g.size(), left == 0 ? 3 : 2);
          expect_works(g);
        }
        EXPECT_LT(Clock::now() - began, 5s);  // nobody waited for a deadline
        r.meet("end");
      },
      options());
}

// The others wait for an absent rank up to the limit. It gets an error when it arrives: in a call of the old
// group and in shrink.
TEST_P(Shrink, WhoComesTooLateIsOut) {
  run_ranks(
      kind(), 3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 1) {
          r.store->get("made", Deadline::after(30s));
          const Error call = failed_call(r.group());
          EXPECT_THAT(ranks_of(call), ElementsAre(1)) << call.what();
          for (int k = 0; k < 2; ++k) {
            const Error e = error_of([&] { r.group().shrink(); });
            EXPECT_EQ(e.code(), ErrorCode::peer_lost);
            EXPECT_THAT(ranks_of(e), ElementsAre(1));
            EXPECT_STREQ(e.what(),
                         "shrink: rank 1 is not in the new group, which the others, ranks 0, 2, have made "
                         "without it: it arrived too late, or the others considered it dead [group "
                         "\"world\", rank 1]");
          }
        } else {
          const auto began = Clock::now();
          ProcessGroup rest = r.group().shrink(1s);  // before any failure
          EXPECT_GE(Clock::now() - began, 900ms);
          EXPECT_THAT(parents_of(rest), ElementsAre(0, 2));
          expect_works(rest);
          const Error e = failed_call(r.group());
          EXPECT_EQ(e.code(), ErrorCode::peer_lost);
          EXPECT_THAT(ranks_of(e), ElementsAre(1));
          EXPECT_THAT(e.what(), HasSubstr("shrink: the group continues as ranks 0, 2 without rank 1"));
          r.store->set("made", "1");
        }
        r.meet("end");
      },
      options());
}

TEST_P(Shrink, DownToOne) {
  run_ranks(
      kind(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 0) {
          r.group() = ProcessGroup();
          return;
        }
        failed_call(r.group());
        ProcessGroup alone = r.group().shrink();
        EXPECT_EQ(alone.size(), 1);
        EXPECT_THAT(parents_of(alone), ElementsAre(1));
        expect_works(alone);
        ProcessGroup still = alone.shrink();
        expect_works(still);
      },
      options());
}

// If one rank cannot make the group, the others make it without that rank.
TEST(ShrinkOnThreads, ARankThatCannotIsLeftOut) {
  run_ranks(Ranks::threads, 3, [](Rank& r) {
    int made = 0;
    const BackendFactory plain = load_backend(r.context, "shm");
    const BackendFactory factory = [&](const GroupInit& b) {
      if (made++ > 0 && r.rank == 2) throw Error(ErrorCode::system, "out of something");
      return plain(b);
    };
    ProcessGroup g = ProcessGroup::create(r.context, factory, r.membership());
    g.barrier().wait();
    if (r.rank == 2) {
      EXPECT_EQ(error_text([&] { g.shrink(5s); }), "system: out of something");
    } else {
      const auto began = Clock::now();
      ProcessGroup rest = g.shrink(5s);
      EXPECT_THAT(parents_of(rest), ElementsAre(0, 1));
      expect_works(rest);
      EXPECT_LT(Clock::now() - began, 15s);
    }
    r.meet("end");
  });
}

// A foreign text in the keys by which ranks agree is an Error that names the key.
TEST(ShrinkOnThreads, GarbageInTheStoreIsNamed) {
  for (const std::string garbage : {"open 0 x", "open 99999999999999999999", "closed 0 2", "open -",
                                    "closed 1 1", "shut", "open 0x1", "closed 1.5"}) {
    run_ranks(Ranks::threads, 2, [&](Rank& r) {
      Membership m = r.membership();
      if (r.rank == 0) m.store = std::make_shared<GarbledStore>(m.store, "shrink0/roll", garbage);
      ProcessGroup g = ProcessGroup::create(r.context, "shm", m);
      if (r.rank == 0) {
        const std::string text = error_text([&] { g.shrink(1s); });
        EXPECT_THAT(text, testing::StartsWith("mismatch: shrink: key \""));
        EXPECT_THAT(text, HasSubstr("shrink0/roll\" holds \"" + garbage +
                                    "\"; expected \"open\" or \"closed\" and ranks from 0 to 1, each once"));
      }
      r.meet("end");
    });
  }
}

TEST(ShrinkOnThreads, Arguments) {
  Context context;
  ProcessGroup one = ProcessGroup::create(context, "shm", Membership{});
  expect_error(ErrorCode::bad_argument, "shrink: limit is -1 s; expected 0 or more [group \"world\", rank 0]",
               [&] { one.shrink(-1s); });
  ProcessGroup again = one.shrink();
  EXPECT_EQ(again.size(), 1);
  EXPECT_TRUE(one.parent_ranks().empty());
  const int ranks[] = {0};
  EXPECT_THAT(parents_of(one.subgroup("sub", ranks)), ElementsAre(0));
}

class ShrinkProcesses : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { skip_if_absent(GetParam()); }
  RankOptions options() const {
    RankOptions o;
    o.backend = GetParam();
    o.deadline = 10s;
    return o;
  }
};
INSTANTIATE_TEST_SUITE_P(Over, ShrinkProcesses, testing::Values("shm", "gloo"),
                         [](const auto& p) { return std::string(p.param); });

// Ranks are killed in mid call: the first, the last, two at once. Memory of the failed call is safe after
// quiesce, and the old group goes without a word.
TEST_P(ShrinkProcesses, KilledRanks) {
  for (const std::vector<int>& killed : {std::vector{0}, std::vector{3}, std::vector{0, 2}}) {
    const auto dies = [&](int r) { return std::count(killed.begin(), killed.end(), r) > 0; };
    std::vector<int> left;
    for (int r = 0; r < 4; ++r)
      if (!dies(r)) left.push_back(r);
    RankProcesses ranks(
        4,
        [&](Rank& r) {
          r.group().barrier().wait();
          r.meet("ready");
          if (dies(r.rank)) raise(SIGKILL);
          const Error e = failed_call(r.group());
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
          EXPECT_TRUE(r.group().quiesce(5s));
          ProcessGroup rest = r.group().shrink(2s);
          EXPECT_EQ(parents_of(rest), left);
          r.group() = ProcessGroup();
          expect_works(rest);
        },
        options());
    ranks.finish({killed.front(), killed.back()});
  }
}

// One more rank dies while the others make the group of the survivors, after it has signed and before it has
// connected to the others.
TEST_P(ShrinkProcesses, KilledDuringShrink) {
  RankProcesses ranks(
      4,
      [&](Rank& r) {
        int made = 0;
        BackendFactory plain = load_backend(r.context, GetParam());
        const BackendFactory factory = [&](const GroupInit& b) {
          if (made++ > 0 && r.rank == 2) raise(SIGKILL);
          return plain(b);
        };
        ProcessGroup g = ProcessGroup::create(r.context, factory, r.membership());
        g.barrier().wait();
        r.meet("ready");
        if (r.rank == 0) raise(SIGKILL);
        failed_call(g);
        ProcessGroup rest = g.shrink(1s);
        EXPECT_THAT(parents_of(rest), ElementsAre(1, 3));
        expect_works(rest);
      },
      options());
  ranks.finish({0, 2});
}

// A stopped rank is left out at the limit. When it continues, it gets this error in its call and in shrink().
TEST_P(ShrinkProcesses, AStoppedRankThatComesBackIsOut) {
  RankOptions o = options();
  o.deadline = 500ms;
  RankProcesses ranks(
      3,
      [&](Rank& r) {
        r.group().barrier({.deadline = 10s}).wait();
        if (r.rank == 1) {
          r.store->set("ready", "1");
          std::vector<float> one(1);
          const Error e = error_of([&] { r.group().recv(view(one), 0, {.deadline = 30s}).wait(); });
          EXPECT_THAT(ranks_of(e), ElementsAre(1)) << e.what();
          const Error out = error_of([&] { r.group().shrink(); });
          EXPECT_EQ(out.code(), ErrorCode::peer_lost);
          EXPECT_THAT(out.what(), HasSubstr("shrink: rank 1 is not in the new group"));
          r.store->set("told", "1");
          return;
        }
        r.store->get("stopped", Deadline::after(10s));
        const Error e = failed_call(r.group());
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(ranks_of(e), ElementsAre(1));
        ProcessGroup rest = r.group().shrink(1s);
        EXPECT_THAT(parents_of(rest), ElementsAre(0, 2));
        expect_works(rest);
        if (r.rank == 0) r.store->set("made", "1");
        r.store->get("told", Deadline::after(20s));
        expect_works(rest);  // whatever the other did
      },
      o);
  ranks.store().get("ready", Deadline::after(10s));
  ranks[1].stop();
  ranks.store().set("stopped", "1");
  ranks.store().get("made", Deadline::after(20s));
  ranks[1].resume();
  ranks.finish();
}

// A rank is stopped after it has signed the roll. The others wait until the limit, then make the group
// without it. When it continues, it is in no group.
TEST_P(ShrinkProcesses, StoppedDuringShrink) {
  RankProcesses ranks(
      3,
      [&](Rank& r) {
        int made = 0;
        BackendFactory plain = load_backend(r.context, GetParam());
        const BackendFactory factory = [&](const GroupInit& b) {
          if (made++ == 1 && r.rank == 0) raise(SIGSTOP);
          return plain(b);
        };
        ProcessGroup g = ProcessGroup::create(r.context, factory, r.membership());
        g.barrier().wait();
        if (r.rank == 0) {
          const Error e = error_of([&] { g.shrink(1s); });
          EXPECT_THAT(e.what(), HasSubstr("shrink: rank 0 is not in the new group"));
          EXPECT_THAT(ranks_of(e), ElementsAre(0));
          return;
        }
        ProcessGroup rest = g.shrink(1s);
        EXPECT_THAT(parents_of(rest), ElementsAre(1, 2));
        expect_works(rest);
        if (r.rank == 1) r.store->set("made", "1");
      },
      options());
  ranks.store().get("made", Deadline::after(20s));
  ranks[0].resume();
  ranks.finish();
}

// All ranks use a store that rank 0's process serves, as under torchrun.
ProcessGroup group_in_the_store_of_rank_zero(Rank& r, std::unique_ptr<TcpStoreServer>& server) {
  if (r.rank == 0) {
    server = std::make_unique<TcpStoreServer>(r.context.log());
    r.store->set("port", std::to_string(server->port()));
  }
  Membership m = r.membership();
  m.store = make_tcp_store("127.0.0.1",
                           static_cast<std::uint16_t>(std::stoi(r.store->get("port", Deadline::after(10s)))),
                           Deadline::after(10s));
  return ProcessGroup::create(r.context, "shm", m);
}

// The process that served the store has died: the ranks cannot agree, and the error says so.
TEST(ShrinkOnProcesses, TheStoreIsLost) {
  RankProcesses ranks(3, [&](Rank& r) {
    std::unique_ptr<TcpStoreServer> server;
    ProcessGroup g = group_in_the_store_of_rank_zero(r, server);
    g.barrier().wait();
    r.meet("ready");
    if (r.rank == 0) raise(SIGKILL);
    const Error call = failed_call(g);
    EXPECT_THAT(ranks_of(call), ElementsAre(0));
    const auto began = Clock::now();
    const Error e = error_of([&] { g.shrink(5s); });
    EXPECT_LT(Clock::now() - began, 4s);
    EXPECT_EQ(e.code(), ErrorCode::peer_lost);
    EXPECT_THAT(e.what(),
                HasSubstr("shrink: the store is lost, and without it the remaining ranks cannot agree: "
                          "store: key \"weft/world#1/shrink0/roll\": the server at 127.0.0.1:"));
    EXPECT_THAT(e.what(), HasSubstr("[group \"world\", rank " + std::to_string(r.rank) + "]"));
  });
  ranks.finish({0});
}

// A rank is stopped instead. shrink reports that in time, too.
TEST(ShrinkOnProcesses, TheStoreIsStopped) {
  const RankOptions options;
  RankProcesses ranks(
      2,
      [&](Rank& r) {
        std::unique_ptr<TcpStoreServer> server;
        ProcessGroup g = group_in_the_store_of_rank_zero(r, server);
        g.barrier().wait();
        if (r.rank == 0) {
          raise(SIGSTOP);
          return;
        }
        const Error call = error_of([&] { g.barrier({.deadline = 300ms}).wait(); });
        EXPECT_THAT(ranks_of(call), ElementsAre(0)) << call.what();
        const auto began = Clock::now();
        EXPECT_THAT(
            error_text([&] { g.shrink(1s); }),
            HasSubstr("shrink: the store is lost, and without it the remaining ranks cannot agree: "));
        EXPECT_LT(Clock::now() - began, 10s);
        r.store->set("told", "1");
      },
      options);
  ranks.store().get("told", Deadline::after(30s));
  ranks[0].resume();
  ranks.finish();
}

}  // namespace
}  // namespace weft::test::shrink_test
