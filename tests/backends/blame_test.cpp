// Tests which rank is named if a call makes no progress: the stopped or absent rank, and none of the ranks
// that only wait for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "backends/shm/group.hpp"
#include "store/forwarding_store.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "support/values.hpp"
#include "weft/base/tensor.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::blame_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

// The deadline of a rank that is many ranks away from the one that holds it up. Under a sanitizer the others
// may take longer to get there.
constexpr auto kSoon = test::kEveryKernel ? 300ms : 1000ms;
constexpr const char* kSoonText = test::kEveryKernel ? "0.3 s" : "1 s";
constexpr auto kLater = 10s;  // of the others

Tensor made(Rank& r, std::int64_t count, Memory memory) {
  Tensor t(r.context, Shape{count}, DType::f32, memory);
  for (std::int64_t i = 0; i < count; ++i) store(t, i, value(r.rank, i));
  return t;
}

// Ends the stopped rank when all others have reported that they are done, or after half a minute.
void kill_when_others_are_through(RankProcesses& ranks, int stopped, int others) {
  const Deadline end = Deadline::after(30s);
  while (ranks.store().add("through", 0, Deadline::after(10s)) < others && !end.passed())
    std::this_thread::sleep_for(5ms);
  EXPECT_FALSE(end.passed());
  ranks[stopped].kill(SIGKILL);
  ranks.finish({stopped});
}

// Ranks as processes. `victim` stops itself after a first barrier, and is killed when the others, which run
// `body`, have finished.
void with_a_stopped_rank(int n, int victim, const std::function<void(Rank&)>& body,
                         const std::string& backend = "shm") {
  RankOptions options;
  options.backend = backend;
  RankProcesses ranks(
      n,
      [&](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == victim) {
          raise(SIGSTOP);
          return;
        }
        body(r);
        r.store->add("through", 1, Deadline::after(10s));
      },
      options);
  kill_when_others_are_through(ranks, victim, n - 1);
}

class RootedCalls : public testing::TestWithParam<std::tuple<Op, Memory>> {};
INSTANTIATE_TEST_SUITE_P(Shm, RootedCalls,
                         testing::Combine(testing::Values(Op::broadcast, Op::scatter),
                                          testing::Values(Memory::shared, Memory::local)),
                         [](const auto& p) {
                           return std::string(name(std::get<0>(p.param))) +
                                  (std::get<1>(p.param) == Memory::shared ? "_shared" : "_local");
                         });

// The receivers wait for the root, and the root waits for the stopped receiver.
TEST_P(RootedCalls, TheReceiverThatIsStoppedIsNamedAndNotTheRoot) {
  const auto [op, memory] = GetParam();
  with_a_stopped_rank(6, 3, [op = op, memory = memory](Rank& r) {
    constexpr std::int64_t kCount = 1200000;  // many rounds of staging
    const Tensor one = made(r, op == Op::scatter ? kCount / 6 : kCount, memory),
                 all = made(r, kCount, memory);
    const CallOptions options{.deadline = r.rank == 5 ? Duration(kSoon) : Duration(kLater)};
    const auto began = Clock::now();
    const Error e = error_of([&] {
      (op == Op::scatter ? r.group().scatter(all, one, 0, options)
                         : r.group().broadcast(one, one, 0, options))
          .wait();
      r.group().barrier(options).wait();
    });
    EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
    EXPECT_THAT(ranks_of(e), ElementsAre(3)) << e.what();
    EXPECT_LT(Clock::now() - began, 2s + kSoon);
  });
}

// Each rank receives from its left before it sends to its right, so all wait in a chain behind the stopped
// rank.
void chain(Rank& r) {
  const Tensor in = made(r, 100000, Memory::local), out = made(r, 100000, Memory::local);
  const CallOptions options{.deadline = r.rank == 1 ? Duration(kSoon) : Duration(kLater)};
  const int left = (r.rank + r.size - 1) % r.size, right = (r.rank + 1) % r.size;
  const Error e = error_of([&] {
    r.group().recv(in, left, options).wait();
    r.group().send(out, right, options).wait();
  });
  EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
  EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
  EXPECT_THAT(e.what(),
              HasSubstr(std::string("recv: not finished within ") + kSoonText +
                        ": rank 0 has not sent it (tag 0); rank 0 waits, too; rank 2 does not answer"));
}
TEST(Messages, TheRankAtTheEndOfAChainIsNamed) { with_a_stopped_rank(5, 2, chain); }

// Rank 2 has posted two receives: from rank 1, which waits for rank 2, and from the stopped rank. The
// deadline of the first one passes first.
void circle(Rank& r) {
  const Tensor in = made(r, 10, Memory::local), other = made(r, 10, Memory::local);
  const CallOptions options{.deadline = r.rank == 2 ? Duration(kSoon) : Duration(kLater)};
  const Error e = error_of([&] {
    if (r.rank == 1) {
      r.group().recv(in, 2, options).wait();
      r.group().send(in, 2, options).wait();
    } else {
      Work from_one = r.group().recv(in, 1, options), from_stopped = r.group().recv(other, 0, options);
      from_one.wait();
      from_stopped.wait();
    }
  });
  EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
  EXPECT_THAT(ranks_of(e), ElementsAre(0)) << e.what();
  EXPECT_THAT(e.what(),
              HasSubstr(": rank 1 has not sent it (tag 0); rank 1 waits, too; rank 0 does not answer"));
}
TEST(Messages, TheRankBesideACircleIsNamed) { with_a_stopped_rank(3, 0, circle); }
TEST(Messages, OverGlooTheRankBesideACircleIsNamed) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  with_a_stopped_rank(3, 0, circle, "gloo");
}

TEST(Messages, AThreadThatHasNotComeIsNamedAtTheEndOfAChain) {
  run_ranks(Ranks::threads, 5, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank != 2) chain(r);
    r.meet("end");
  });
}

// Rank 2 of a 2 x 2 mesh ends before it makes the groups of its row and its column. The others are notified
// at once. Rank 1 waits for rank 0, which does not call because of rank 2.
void a_rank_ends_before_subgroups(const std::string& backend, bool killed) {
  RankOptions options;
  options.backend = backend;
  options.deadline = 20s;  // so it is not the deadline that tells
  RankProcesses ranks(
      4,
      [killed](Rank& r) {
        r.group().barrier().wait();
        r.meet("all are through");
        if (r.rank == 2 && killed) raise(SIGKILL);
        if (r.rank == 2) return;
        const auto began = Clock::now();
        const Error e = error_of([&] {
          const int row[] = {r.rank % 2, r.rank % 2 + 2};
          const ProcessGroup rows = r.group().subgroup("dp", row);
          const int column[] = {r.rank / 2 * 2, r.rank / 2 * 2 + 1};
          const ProcessGroup columns = r.group().subgroup("tp", column);
        });
        EXPECT_LT(Clock::now() - began, 5s);
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
        EXPECT_THAT(e.what(),
                    HasSubstr(std::string("subgroup \"") + (r.rank == 0 ? "dp" : "tp") + "\": rank 2"));
        EXPECT_THAT(e.what(), HasSubstr("[group \"world\", rank " + std::to_string(r.rank) + "]"));
        // The survivors can make groups of it.
        r.store->add("through", 1, Deadline::after(10s));
        while (r.store->add("through", 0, Deadline::after(10s)) < 3) std::this_thread::sleep_for(1ms);
        const int survivors[] = {0, 1, 3};
        r.group().subgroup("survivors", survivors).barrier().wait();
      },
      options);
  ranks.finish({2});
}
TEST(Subgroups, ARankThatIsKilledBeforeTheyAreMadeIsNamed) { a_rank_ends_before_subgroups("shm", true); }
TEST(Subgroups, ARankThatLeavesBeforeTheyAreMadeIsNamed) { a_rank_ends_before_subgroups("shm", false); }
TEST(Subgroups, OverGlooARankThatIsKilledBeforeTheyAreMadeIsNamed) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  a_rank_ends_before_subgroups("gloo", true);
}

// Rank 1 is the last to arrive when a group is made. It ends when it has published its own information, but
// has not put together that of all ranks. This is not two seconds later, when the others would fail because
// the parent has failed.
TEST(Subgroups, TheLastToComeIsNamedAtOnceThoughItHasToldItsPart) {
  RankProcesses ranks(3, [](Rank& r) {
    bool making = false;
    Membership m = r.membership();
    m.deadline = 20s;
    m.store =
        std::make_shared<ObservedStore>(r.store, [&](StoreRequest request, std::string_view key, Deadline) {
          if (!making || !key.ends_with("/all")) return;
          if (request == StoreRequest::set) _exit(0);
          if (request == StoreRequest::get) r.store->set("waits/" + std::to_string(r.rank), "");
        });
    ProcessGroup world = ProcessGroup::create(r.context, "shm", m);
    world.barrier().wait();
    making = true;
    if (r.rank == 1) {
      for (const char* who : {"waits/0", "waits/2"}) r.store->get(who, Deadline::after(20s));
      world.duplicate();
      return;
    }
    const auto began = Clock::now();
    const Error e = error_of([&] { world.duplicate(); });
    EXPECT_LT(Clock::now() - began, 1900ms) << e.what();
    EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
    EXPECT_THAT(ranks_of(e), ElementsAre(1)) << e.what();
  });
  ranks.finish({1});
}

// A rank that waits in another group has not arrived either; but it answers.
TEST(Subgroups, WhoWaitsInAnotherGroupIsNotNamed) {
  RankProcesses ranks(4, [](Rank& r) {
    const std::vector<int> pair{2, 3};
    ProcessGroup two;
    if (r.rank >= 2) two = r.group().subgroup("two", pair);
    r.group().barrier().wait();
    if (r.rank == 3) {
      raise(SIGSTOP);
      return;
    }
    const auto began = Clock::now();
    ProcessGroup& waits = r.rank == 2 ? two : r.group();
    const Error e = error_of(
        [&] { waits.barrier({.deadline = r.rank == 0 ? Duration(kSoon) : Duration(kLater / 5)}).wait(); });
    EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
    EXPECT_THAT(ranks_of(e), ElementsAre(r.rank == 2 ? 1 : 3)) << e.what();
    if (r.rank < 2) {
      EXPECT_THAT(e.what(), HasSubstr("rank 3 had not arrived"));
      EXPECT_THAT(e.what(), HasSubstr("; rank 2 waits, too"));
      EXPECT_LT(Clock::now() - began, 1200ms + kSoon);
    }
    r.store->add("through", 1, Deadline::after(10s));
  });
  kill_when_others_are_through(ranks, 3, 3);
}

// A rank that waits while a group is made is not named either, even if the process that serves the store is
// the stopped one.
class GroupsBeingMade : public testing::TestWithParam<std::tuple<const char*, bool>> {};
INSTANTIATE_TEST_SUITE_P(Subgroups, GroupsBeingMade,
                         testing::Values(std::tuple{"shm", false}, std::tuple{"shm", true},
                                         std::tuple{"gloo", false}),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)) +
                                  (std::get<1>(p.param) ? "_store_stopped" : "");
                         });

TEST_P(GroupsBeingMade, WhoWaitsThereIsNotNamed) {
  const auto [backend, serves] = GetParam();
  if (backend == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  RankOptions options;
  options.backend = backend;
  RankProcesses ranks(
      4,
      [serves = serves](Rank& r) {
        std::unique_ptr<TcpStoreServer> server;
        Membership m = r.membership("parent");
        m.deadline = kLater / 5;  // of the making of groups
        if (serves) {
          if (r.rank == 3) {
            server = std::make_unique<TcpStoreServer>(r.context.log(), TcpStoreOptions{});
            r.store->set("port", std::to_string(server->port()), Deadline::after(10s));
          }
          const std::string port = r.store->get("port", Deadline::after(10s));
          m.store =
              make_tcp_store("127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)), Deadline::after(10s));
        }
        ProcessGroup parent = ProcessGroup::create(r.context, r.options.backend, m);
        parent.barrier().wait();
        if (r.rank == 3) {
          raise(SIGSTOP);
          return;
        }
        const auto began = Clock::now();
        const Error e = error_of([&] {
          if (r.rank == 2) {
            parent.subgroup("pair", {2, 3});
          } else {
            parent.barrier({.deadline = r.rank == 0 ? Duration(kSoon) : Duration(kLater)}).wait();
          }
        });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        if (r.rank < 2) {
          EXPECT_THAT(ranks_of(e), ElementsAre(3)) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("rank 3 had not arrived"));
          EXPECT_THAT(e.what(), testing::ContainsRegex("; rank 2 (waits, too|answers)"));
          EXPECT_LT(Clock::now() - began, 2s + kSoon);
        } else if (!serves) {
          EXPECT_THAT(ranks_of(e), ElementsAre(3)) << e.what();
        }
        r.store->add("through", 1, Deadline::after(10s));
      },
      options);
  kill_when_others_are_through(ranks, 3, 3);
}

TEST(Subgroups, WhoShrinksAnotherGroupIsNotNamed) {
  RankProcesses ranks(4, [](Rank& r) {
    const std::vector<int> pair{2, 3};
    ProcessGroup two;
    if (r.rank >= 2) two = r.group().subgroup("two", pair);
    r.group().barrier().wait();
    if (r.rank == 3) {
      raise(SIGSTOP);
      return;
    }
    if (r.rank == 2) {
      two.abort("it goes on without a rank that does not come");
      EXPECT_EQ(two.shrink(kLater / 5).size(), 1);
    } else {
      const Error e = error_of(
          [&] { r.group().barrier({.deadline = r.rank == 0 ? Duration(kSoon) : Duration(kLater)}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(ranks_of(e), ElementsAre(3)) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("; rank 2 waits, too"));
    }
    r.store->add("through", 1, Deadline::after(10s));
  });
  kill_when_others_are_through(ranks, 3, 3);
}

// This is so although the rank never sleeps: it polls, and other groups make progress meanwhile.
TEST(Subgroups, WhoPollsInAnotherGroupIsNotNamed) {
  RankProcesses ranks(4, [](Rank& r) {
    const std::vector<int> stuck_pair{2, 3}, moving_pair{1, 2};
    ProcessGroup stuck, moving;
    if (r.rank >= 2) stuck = r.group().subgroup("stuck", stuck_pair);
    if (r.rank == 1 || r.rank == 2) moving = r.group().subgroup("moving", moving_pair);
    r.group().barrier().wait();
    if (r.rank == 2) stuck.barrier().wait();
    if (r.rank == 3) {
      stuck.barrier().wait();
      raise(SIGSTOP);
      return;
    }
    const Error e = error_of([&] {
      if (r.rank == 0) r.group().barrier({.deadline = kSoon}).wait();
      Work waits = (r.rank == 1 ? r.group() : stuck).barrier({.deadline = 2s});
      for (Work beat; !waits.done();)
        if (beat.done()) beat = moving.barrier();
    });
    if (r.rank < 2) {
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(ranks_of(e), ElementsAre(3)) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("rank 3 had not arrived"));
      EXPECT_THAT(e.what(), HasSubstr("; rank 2 waits, too"));
    }
    r.store->add("through", 1, Deadline::after(10s));
  });
  kill_when_others_are_through(ranks, 3, 3);
}

// The answer of a rank when a warning was due, at a tenth of the deadline, does not count at the deadline.
TEST(Messages, WhoIsStoppedAfterItHasAnsweredIsNamed) {
  RankProcesses ranks(3, [](Rank& r) {
    ProcessGroup& g = r.group();
    const Tensor t = made(r, 10, Memory::local);
    g.barrier().wait();
    if (r.rank == 0) {
      const Error e = error_of([&] { g.recv(t, 1, {.deadline = 1s}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(ranks_of(e), ElementsAre(1)) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("rank 1 has not sent it (tag 0)"));
      EXPECT_THAT(e.what(), testing::Not(HasSubstr("waits, too")));
      r.store->set("through", "1", Deadline::after(10s));
    } else if (r.rank == 1) {
      g.recv(t, 2).wait();  // for longer than the warning and its answers take
      raise(SIGSTOP);
    } else {
      std::this_thread::sleep_for(550ms);
      g.send(t, 1).wait();
      r.store->get("through", Deadline::after(20s));  // it computes
    }
  });
  ranks.store().get("through", Deadline::after(20s));
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

// The error has all of them, however many they are; its text has the first ones.
TEST(ManyRanks, AllThatAreAbsentAreInTheError) {
  run_ranks(Ranks::threads, 80, [](Rank& r) {
    r.group();
    r.meet("made");
    if (r.rank == 40) {
      const Error e = error_of([&] { r.group().barrier({.deadline = 100ms}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      ASSERT_EQ(e.ranks().size(), 79u);
      for (int i = 0; i < 79; ++i) EXPECT_EQ(e.ranks()[static_cast<std::size_t>(i)], i < 40 ? i : i + 1);
      EXPECT_THAT(e.what(), HasSubstr("within 0.1 s: ranks 0, 1, 2, 3, "));
      EXPECT_THAT(e.what(), HasSubstr(", 30, 31 and 47 more had not arrived; last calls: "));
    }
    r.meet("end");
  });
}

// While a rank rewrites the list of ranks for which it waits, a reader sees the old or the new list, but
// never an empty one, because a rank that waits for nobody may be named.
TEST(RollCall, RanksThatAreWrittenAnewAreNeverGone) {
  std::atomic<std::uint64_t> word{0};
  shm::RankSet set(&word, 64);
  set.store(std::vector<int>{1, 2});
  std::atomic<bool> ended{false};
  std::thread writer([&] {
    const std::vector<int> few{1}, more{0, 1, 2, 63};
    while (!ended) {
      set.store(few);
      set.store(more);
    }
  });
  int gone = 0;
  for (const Deadline end = Deadline::after(200ms); !end.passed();)
    for (int i = 0; i < 1000; ++i) gone += set.has(1) ? 0 : 1;
  ended = true;
  writer.join();
  EXPECT_EQ(gone, 0);
}

// A rank that is about to report a failure, but does not run because others have its core, has neither died
// nor stopped.
TEST(FirstCause, OfARankThatDoesNotRunForAWhileIsWaitedFor) {
  Context context;
  HostPeers& here = host_peers_of(context);
  shm::Group group(context);
  group.size = 2;
  group.region = here.offer("first cause", shm::Control::bytes(2));
  group.control = shm::Control(group.region->data, 2);
  group.processes.assign(2, here.meet(here.self(), Deadline::after(1s)));
  shm::AbortRecord& record = group.control.abort();
  const std::uint32_t claim = 1 + 1;  // by rank 1
  record.state.store(claim);
  std::thread claimer([&] {
    std::this_thread::sleep_for(300ms);
    record.code = ErrorCode::aborted;
    std::strcpy(record.text, "words");
    group.control.blamed().store(std::vector<int>{0});
    record.state.store(claim | shm::AbortRecord::kSealed);
  });
  const Failure why = shm::first_cause(group);
  claimer.join();
  EXPECT_EQ(why.code, ErrorCode::aborted);
  EXPECT_EQ(why.text, "words");
  EXPECT_THAT(why.ranks, ElementsAre(0));
}

// A rank that came in between, and has nothing more to do with the group, is not named, though it computes.
TEST(Messages, WhoOwesNothingIsNotNamed) {
  run_ranks(Ranks::threads, 4, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank < 2) {
      const Tensor t = made(r, 10, Memory::local);
      const Error e =
          error_of([&] { r.group().recv(t, r.rank + 1, {.deadline = r.rank == 0 ? 200ms : 10s}).wait(); });
      EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();  // and not 3
    }
    r.meet("end");
  });
}

// The system reports the end of the process only when the core file is written.
TEST(Processes, ARankThatDumpsItsCoreIsNamedBeforeItIsWritten) {
  if (!kProcesses) GTEST_SKIP() << "not with a sanitizer, whose processes write no core";
  std::string pattern;
  std::getline(std::ifstream("/proc/sys/kernel/core_pattern") >> std::ws, pattern);
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const TemporaryFolder folder;
  if (pattern.empty() || pattern.find_first_of("|/") != std::string::npos)
    GTEST_SKIP() << "cores go to \"" << pattern << "\", not to the process's folder";
  if (std::filesystem::space(folder.path()).available < 4 * kBytes)
    GTEST_SKIP() << "no room for a core in " << folder.path();
  RankProcesses ranks(2, [&](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 1) {
      std::filesystem::current_path(folder.path());
      const rlimit all{RLIM_INFINITY, RLIM_INFINITY};
      ::setrlimit(RLIMIT_CORE, &all);
      void* const memory =
          ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      std::memset(memory, 1, kBytes);
      r.store->set("aborts", "1");
      ::signal(SIGABRT, SIG_DFL);
      std::abort();
    }
    const Error e = error_of([&] { r.group().barrier().wait(); });
    r.store->set("told", "1");
    EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
    EXPECT_THAT(e.what(), HasSubstr("barrier: rank 1 (process "));
    EXPECT_THAT(ranks_of(e), ElementsAre(1));
    EXPECT_TRUE(r.group().quiesce(100ms));
  });
  ranks.store().get("aborts", Deadline::after(30s));
  const auto began = Clock::now();
  bool told = false, ended = false;
  while (!told && !ended) {
    told = ranks.store().try_get("told").has_value();
    ended = ranks[1].wait(5ms).has_value();
  }
  const auto took = Clock::now() - began;
  const bool dumps = !std::filesystem::is_empty(folder.path());
  ranks[1].kill(SIGKILL);  // the rest of the core is of no use
  ranks.finish({1});
  if (!dumps) GTEST_SKIP() << "the system has written no core";
  if (ended && took < 1s) GTEST_SKIP() << "the core was written at once";
  EXPECT_FALSE(ended);
  EXPECT_LT(took, 1s);
}

}  // namespace
}  // namespace weft::test::blame_test
