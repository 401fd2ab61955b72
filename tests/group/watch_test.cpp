// The watch over calls in flight uses the clock: deadlines, deaths and aborts are detected in time whatever
// else makes progress, a wait with a limit ends at its limit, and time in which the whole job was stopped
// does not count.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "host/progress_engine.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/view.hpp"

namespace weft::test::watch_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct Over {
  const char* name;
  Ranks kind;
};
void PrintTo(const Over& over, std::ostream* os) { *os << over.name << " " << to_string(over.kind); }
class Watch : public testing::TestWithParam<Over> {};
INSTANTIATE_TEST_SUITE_P(Of, Watch,
                         testing::Values(Over{"shm", Ranks::threads}, Over{"shm", Ranks::processes},
                                         Over{"gloo", Ranks::processes}),
                         [](const auto& p) {
                           return std::string(p.param.name) + "_" + to_string(p.param.kind);
                         });

#define SKIP_WITHOUT_GLOO() \
  if (GetParam().name == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo"

/// A thread of rank 0 sends small messages to a thread of rank 1 in the group that is stuck, one every
/// `pause`. It does so until the group fails, or for a time that is far beyond what the tests allow.
class Heartbeats {
 public:
  Heartbeats(Rank& r, ProcessGroup& group, Duration pause) {
    if (r.rank > 1) return;
    thread_ = std::thread([&group, pause, rank = r.rank, end = Deadline::after(6s)] {
      try {
        for (float x = 0; !end.passed() && x >= 0;) {
          if (rank == 0) {
            std::this_thread::sleep_for(pause);
            x = end.passed() ? -1.0f : 1.0f;
            group.send(view(&x, 1), 1, {.deadline = 20s, .tag = 9}).wait();
          } else {
            group.recv(view(&x, 1), 0, {.deadline = 20s, .tag = 9}).wait();
          }
        }
      } catch (const Error&) {}  // the group has failed, as it must
    });
  }
  ~Heartbeats() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

// However often the messages arrive: a waiter that sleeps between them, and a waiter that never may sleep.
TEST_P(Watch, TrafficDoesNotHideAnAbsentRank) {
  SKIP_WITHOUT_GLOO();
  RankOptions options;
  options.backend = GetParam().name;
  run_ranks(
      GetParam().kind, 3,
      [](Rank& r) {
        int round = 0;
        for (const Duration pause : {Duration(0), Duration(10ms), Duration(200ms)}) {
          const std::string name = std::to_string(round++);
          ProcessGroup group = ProcessGroup::create(r.context, r.options.backend, r.membership(name));
          group.barrier().wait();
          if (r.rank != 2) {
            const Heartbeats heartbeats(r, group, pause);
            std::vector<float> x(10);
            const auto began = Clock::now();
            const Error e = error_of([&] { group.all_reduce(view(x), view(x), {.deadline = 500ms}).wait(); });
            EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
            EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
            EXPECT_LT(seconds_since(began), 1.5) << "messages every " << pause.count() << " ns";
          }
          r.meet("end of " + name);
        }
      },
      options);
}

// A program that calls done() from time to time, and does other things in between, gets the error no later.
TEST_P(Watch, WhoAsksRarelyHearsInTime) {
  SKIP_WITHOUT_GLOO();
  RankOptions options;
  options.backend = GetParam().name;
  run_ranks(
      GetParam().kind, 3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank != 2) {
          const Heartbeats heartbeats(r, r.group(), 30ms);
          std::vector<float> x(10);
          Work work = r.group().all_reduce(view(x), view(x), {.deadline = 500ms});
          const auto began = Clock::now();
          const Error e = error_of([&] {
            while (!work.done()) std::this_thread::sleep_for(50ms);
          });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
          EXPECT_LT(seconds_since(began), 1.5);
        }
        r.meet("end");
      },
      options);
}

// The answers of the other ranks are out of date when the program polls again.
TEST_P(Watch, WhoAsksEvenMoreRarelyHears) {
  SKIP_WITHOUT_GLOO();
  RankOptions options;
  options.backend = GetParam().name;
  run_ranks(
      GetParam().kind, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 0) {
          std::vector<float> x(10);
          Work work = r.group().recv(view(x), 1, {.deadline = 200ms});
          int asked = 0;
          const Error e = error_of([&] {
            for (; asked < 5 && !work.done(); ++asked) std::this_thread::sleep_for(1400ms);
          });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(ranks_of(e), ElementsAre(1)) << e.what();
        }
        r.meet("end");
      },
      options);
}

// Only the helper thread waits.
TEST_P(Watch, TheHelperThreadSeesItInTime) {
  SKIP_WITHOUT_GLOO();
  RankOptions options;
  options.backend = GetParam().name;
  run_ranks(
      GetParam().kind, 3,
      [](Rank& r) {
        Membership m = r.membership("helped");
        m.progress = Progress::thread;
        ProcessGroup group = ProcessGroup::create(r.context, r.options.backend, m);
        group.barrier().wait();
        if (r.rank != 2) {
          const Heartbeats heartbeats(r, group, 100ms);
          std::vector<float> x(10);
          Work work = group.all_reduce(view(x), view(x), {.deadline = 500ms});
          const auto began = Clock::now();
          while (group.trace_json().find("failed") == std::string::npos && seconds_since(began) < 10)
            std::this_thread::sleep_for(5ms);
          EXPECT_LT(seconds_since(began), 1.5);
          const Error e = error_of([&] { work.wait(); });
          EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
        }
        r.meet("end");
      },
      options);
}

TEST(WatchOfProcesses, TrafficDoesNotHideADeath) {
  RankProcesses ranks(3, [](Rank& r) {
    ProcessGroup& group = r.group();
    group.barrier().wait();
    r.store->set("ready/" + std::to_string(r.rank), "");
    if (r.rank == 2) std::this_thread::sleep_for(60s);
    const Heartbeats heartbeats(r, group, 10ms);
    std::vector<float> x(10);
    Work work = group.all_reduce(view(x), view(x), {.deadline = 20s});
    EXPECT_FALSE(work.wait_for(200ms));
    r.store->set("waits/" + std::to_string(r.rank), "");
    r.store->get("killed", Deadline::after(20s));
    const auto began = Clock::now();
    const Error e = error_of([&] { work.wait(); });
    EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
    EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
    EXPECT_LT(seconds_since(began), 1.0);
  });
  for (const char* key : {"ready/2", "waits/0", "waits/1"}) ranks.store().get(key, Deadline::after(30s));
  ranks[2].kill(SIGKILL);
  ranks.store().set("killed", "");
  ranks.finish({2});
}

// ---- Waits with a limit ----

/// Another group of this rank, in which calls make progress for `span`.
class Moving final : public Driven {
 public:
  Moving(ProgressEngine& list, Duration span) : list_(list), end_(Deadline::after(span)) { list_.add(this); }
  ~Moving() override { list_.remove(this); }
  bool drive() noexcept override {
    ++drives;
    return !end_.passed();
  }
  void announce_sleep(bool) noexcept override {}
  std::atomic<int> drives{0};

 private:
  ProgressEngine& list_;
  const Deadline end_;
};

struct Alone {
  Recording recording;
  Context context;
  ProcessGroup group;
  std::vector<float> x = std::vector<float>(5);
  Alone() {
    recording.decide({.kind = Fate::never});
    Membership m;
    m.store = make_local_store();
    m.size = 3;
    group = ProcessGroup::create(context, recording.factory(), m);
  }
};

TEST(WatchOfOne, WaitForEndsWhileAnotherGroupMoves) {
  Alone a;
  Work w = a.group.broadcast(view(a.x), view(a.x), 2);
  const Moving other(progress_of(a.context, 0), 3s);
  const auto began = Clock::now();
  EXPECT_FALSE(w.wait_for(1ms));
  EXPECT_LT(seconds_since(began), 1.0);
  a.recording.let_go();
  w.wait();
}

TEST(WatchOfOne, WaitForNothingTakesOneStep) {
  Alone a;
  Work w = a.group.broadcast(view(a.x), view(a.x), 2);
  Moving other(progress_of(a.context, 0), 0s);
  const int polls = a.recording.polls();
  EXPECT_FALSE(w.wait_for(Duration::zero()));
  EXPECT_EQ(a.recording.polls() - polls, 1);
  EXPECT_EQ(other.drives, 1);  // as done()
  EXPECT_FALSE(w.wait_for(-1s));
  EXPECT_FALSE(w.done());
  EXPECT_EQ(a.recording.polls() - polls, 3);
  EXPECT_EQ(other.drives, 3);
  // A wait with a short limit must not spin on.
  EXPECT_FALSE(w.wait_for(1ns));
  EXPECT_LE(a.recording.polls() - polls, 3 + 20);
  a.recording.let_go();
  EXPECT_TRUE(w.wait_for(Duration::zero()));
}

// No other thread makes progress on the group.
TEST(WatchOfOne, DoneLooksByTheClock) {
  Alone a;
  a.recording.miss({2}, "rank 2 is on holiday");
  Work w = a.group.broadcast(view(a.x), view(a.x), 2, {.deadline = 300ms});
  const auto began = Clock::now();
  const Error e = error_of([&] {
    while (!w.done()) std::this_thread::sleep_for(50ms);
  });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_LT(seconds_since(began), 1.3);
}

// A program may poll only every second: its calls still end at their deadline, or at the next poll after it.
TEST(WatchOfOne, GapsThatComeEachTimeCount) {
  Alone a;
  Work w = a.group.broadcast(view(a.x), view(a.x), 2, {.deadline = 900ms});
  int asked = 0;
  const Error e = error_of([&] {
    for (; !w.done(); ++asked) std::this_thread::sleep_for(300ms);
  });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_GE(asked, 3);
  EXPECT_LE(asked, 8);
}

// A program that waits a little, several polls long, and computes in between, is no different. Those polls do
// not make each gap a new one.
TEST(WatchOfOne, GapsBetweenShortWaitsCount) {
  Alone a;
  const Moving other(progress_of(a.context, 0), 20s);  // keeps the waiter awake
  Work w = a.group.broadcast(view(a.x), view(a.x), 2, {.deadline = 300ms});
  int asked = 0;
  const Error e = error_of([&] {
    for (; asked < 20 && !w.wait_for(10ms); ++asked) std::this_thread::sleep_for(250ms);
  });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_LE(asked, 6);
}

TEST(WatchOfOne, ACallWithoutRoomEndsAtItsDeadlineWhileAnotherGroupMoves) {
  Alone a;
  std::vector<Work> works;
  for (int i = 0; i < 64; ++i) works.push_back(a.group.broadcast(view(a.x), view(a.x), 2, {.deadline = 20s}));
  const Moving other(progress_of(a.context, 0), 3s);
  const auto began = Clock::now();
  const Error e =
      error_of([&] { static_cast<void>(a.group.broadcast(view(a.x), view(a.x), 2, {.deadline = 50ms})); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), HasSubstr("broadcast: 64 calls in flight and none finished within 0.05 s"));
  EXPECT_LT(seconds_since(began), 1.0);
  a.recording.let_go();
  for (Work& w : works) w.wait();
}

// ---- A job that is stopped as a whole ----

class Suspended : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, Suspended, testing::Values("shm", "gloo"),
                         [](const auto& p) { return std::string(p.param); });

// Ranks 0 and 1 wait for rank 2 in ways of their own: in wait(), by done(), by the helper thread.
TEST_P(Suspended, TimeInWhichNobodyRanDoesNotCount) {
  if (GetParam() == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  RankOptions options;
  options.backend = GetParam();
  RankProcesses ranks(
      3,
      [](Rank& r) {
        for (const Progress progress : {Progress::caller, Progress::thread}) {
          const std::string name = progress == Progress::thread ? "helped" : "plain";
          Membership m = r.membership(name);
          m.progress = progress;
          ProcessGroup group = ProcessGroup::create(r.context, r.options.backend, m);
          group.barrier().wait();
          std::vector<float> x(10, 1.0f);
          if (r.rank == 2) {
            r.store->set(name + "/2", "");
            r.store->get(name + "/go", Deadline::after(20s));
          }
          Work work = group.all_reduce(view(x), view(x), {.deadline = 800ms});
          if (r.rank == 0) {
            EXPECT_FALSE(work.wait_for(100ms));
          } else if (r.rank == 1) {
            EXPECT_FALSE(work.done());
          }
          r.store->set(name + "/" + std::to_string(r.rank), "");
          if (r.rank == 1)
            while (!work.done()) std::this_thread::sleep_for(5ms);
          work.wait();
          EXPECT_EQ(x[9], 3.0f);
          r.meet("end of " + name);
        }
      },
      options);
  for (const std::string name : {"plain", "helped"}) {
    for (const char* rank : {"/0", "/1", "/2"}) ranks.store().get(name + rank, Deadline::after(30s));
    for (int r = 0; r < 3; ++r) ranks[r].stop();
    std::this_thread::sleep_for(1500ms);
    // Ranks do not continue all at once. The first rank waits for the others, and not only for the remaining
    // part of its deadline.
    ranks[0].resume();
    ranks[1].resume();
    std::this_thread::sleep_for(150ms);
    ranks[2].resume();
    ranks.store().set(name + "/go", "");
  }
  ranks.finish();
}

// A rank that is stopped while the others run is named at their deadline.
TEST_P(Suspended, ARankThatIsStoppedAloneIsNamedAtTheDeadline) {
  if (GetParam() == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  RankOptions options;
  options.backend = GetParam();
  RankProcesses ranks(
      3,
      [](Rank& r) {
        r.group().barrier().wait();
        r.store->set("ready/" + std::to_string(r.rank), "");
        r.store->get("stopped", Deadline::after(20s));
        std::vector<float> x(10, 1.0f);
        const auto began = Clock::now();
        const Error e = error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 500ms}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
        EXPECT_LT(seconds_since(began), 1.5);
        r.store->set("told/" + std::to_string(r.rank), "");
      },
      options);
  for (const char* rank : {"ready/0", "ready/1", "ready/2"}) ranks.store().get(rank, Deadline::after(30s));
  ranks[2].stop();
  ranks.store().set("stopped", "");
  for (const char* rank : {"told/0", "told/1"}) ranks.store().get(rank, Deadline::after(30s));
  ranks[2].kill(SIGKILL);
  ranks.finish({2});
}

// While a group is made, too: rank 2 joins only after the others have gone on.
TEST_P(Suspended, AGroupIsMadeAfterIt) {
  if (GetParam() == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  RankOptions options;
  options.backend = GetParam();
  options.deadline = 1s;
  RankProcesses ranks(
      3,
      [](Rank& r) {
        r.store->set("here/" + std::to_string(r.rank), "");
        if (r.rank == 2) r.store->get("go", Deadline::after(20s));
        r.group().barrier().wait();
        r.meet("end");
      },
      options);
  for (const char* rank : {"here/0", "here/1", "here/2"}) ranks.store().get(rank, Deadline::after(30s));
  std::this_thread::sleep_for(100ms);  // by now they wait, or will after it, which must do as well
  for (int r = 0; r < 3; ++r) ranks[r].stop();
  std::this_thread::sleep_for(1500ms);
  for (int r = 0; r < 3; ++r) ranks[r].resume();
  ranks.store().set("go", "");
  ranks.finish();
}

}  // namespace
}  // namespace weft::test::watch_test
