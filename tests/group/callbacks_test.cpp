// Work::then(): when, with which argument and on which thread the callback runs, and what it may do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::callbacks_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const Fate kNever{.kind = Fate::never};

class Callbacks : public testing::Test {
 protected:
  ProcessGroup make(int size = 3, Progress progress = Progress::caller) {
    Membership m;
    m.store = store;
    m.size = size;
    m.name = "x";
    m.deadline = 10s;
    m.progress = progress;
    return ProcessGroup::create(context, recording.factory(), m);
  }
  Call add() { return call::all_reduce(a, b); }
  // Notes the arguments of its calls.
  auto note(std::string name) {
    return [this, name](const Error* e) { said.push_back(name + (e ? std::string(": ") + e->what() : "")); };
  }

  std::mutex mutex;
  std::vector<std::string> warnings;
  Context context{{.log_sink = [this](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    warnings.emplace_back(line);
  }}};
  std::shared_ptr<Store> store = make_local_store();
  Recording recording;
  std::vector<float> a = std::vector<float>(12, 1.f), b = std::vector<float>(12, 2.f);
  std::vector<std::string> said;
  const std::thread::id main_thread = std::this_thread::get_id();
};

TEST_F(Callbacks, CalledOnceWhenTheCallHasEnded) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.submit(add());
  w.then(note("first"));
  w.then(note("second"));
  EXPECT_FALSE(w.done());
  EXPECT_THAT(said, IsEmpty());
  recording.let_go();
  w.wait();
  EXPECT_THAT(said, ElementsAre("first", "second"));
  EXPECT_FALSE(w.valid());
  w.wait();
  EXPECT_THAT(said, ElementsAre("first", "second"));
}

TEST_F(Callbacks, GivenWhereTheWorkIsMade) {
  ProcessGroup g = make();
  Work w = g.submit(add()).then(note("called"));
  EXPECT_TRUE(w.wait_for(5s));
  EXPECT_THAT(said, ElementsAre("called"));
}

TEST_F(Callbacks, OfACallThatHasEndedIsCalledAtOnce) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.submit(add());
  w.then(note("early"));
  recording.let_go();
  recording.decide(Fate{});
  g.barrier().wait();  // finishes both
  EXPECT_THAT(said, ElementsAre("early"));
  w.then(note("late"));
  EXPECT_THAT(said, ElementsAre("early", "late"));
  w.wait();
  w.then(note("invalid"));
  EXPECT_THAT(said, ElementsAre("early", "late", "invalid"));
  EXPECT_FALSE(w.valid());
  Work empty;
  empty.then(note("empty"));
  ProcessGroup alone = make(1);
  Work of_one = alone.all_reduce(a).then(note("alone"));
  EXPECT_THAT(said, ElementsAre("early", "late", "invalid", "empty", "alone"));
  EXPECT_THROW(of_one.then([](const Error*) { throw std::runtime_error("here"); }), std::runtime_error);
}

TEST_F(Callbacks, AnyCallOfTheRankThatMakesProgressCallsIt) {
  ProcessGroup g = make();
  ProcessGroup other = make();
  recording.decide(
      [](const OpState& s) { return s.op == Op::barrier ? Fate{.polls = 200} : Fate{.polls = 2}; });
  Work w = g.submit(add()).then(note("called"));
  other.barrier().wait();
  EXPECT_THAT(said, ElementsAre("called"));
  w.wait();
}

TEST_F(Callbacks, OfCoalescedCallsWhenAllHaveEnded) {
  ProcessGroup g = make();
  recording.decide([](const OpState& s) { return s.call == 1 ? kNever : Fate{}; });
  for (const bool late : {false, true}) {
    said.clear();
    std::vector<float> c(a.size());
    Work w = g.coalesced(std::vector<Call>{add(), call::send(a, 1), call::barrier(), call::recv(c, 1)});
    if (late) {  // some have ended when it is given
      EXPECT_FALSE(w.done());
    }
    w.then(note("all"));
    EXPECT_FALSE(w.wait_for(2ms));
    EXPECT_THAT(said, IsEmpty());
    recording.let_go();
    w.wait();
    EXPECT_THAT(said, ElementsAre("all"));
    recording.decide([](const OpState& s) { return s.op == Op::recv ? kNever : Fate{}; });
  }
}

TEST_F(Callbacks, AFailureIsTold) {
  ProcessGroup g = make();
  recording.decide({.kind = Fate::fail,
                    .polls = 3,
                    .why = {.code = ErrorCode::peer_lost, .text = "rank 1 died", .ranks = {1}}});
  Work first = g.submit(add());
  Work second = g.submit(add());
  first.then([&](const Error* e) {
    ASSERT_NE(e, nullptr);
    EXPECT_EQ(e->code(), ErrorCode::peer_lost);
    EXPECT_THAT(ranks_of(*e), ElementsAre(1));
    said.push_back(e->what());
  });
  second.then(note("second"));
  EXPECT_EQ(error_of([&] { first.wait(); }).code(), ErrorCode::peer_lost);
  EXPECT_EQ(error_of([&] { second.wait(); }).code(), ErrorCode::peer_lost);
  EXPECT_THAT(said,
              testing::UnorderedElementsAre("all_reduce: rank 1 died [group \"x\", rank 0, call 0]",
                                            "second: all_reduce: rank 1 died [group \"x\", rank 0, call 1]"));
  EXPECT_FALSE(first.valid());
}

TEST_F(Callbacks, OfAGroupThatHasFailedIsToldAtOnce) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.submit(add());
  w.then(note("early"));
  g.abort("enough");
  w.then(note("late"));
  const std::string text = ": all_reduce: aborted by rank 0: enough [group \"x\", rank 0, call 0]";
  EXPECT_THAT(said, ElementsAre("early" + text, "late" + text));
  EXPECT_EQ(error_of([&] { w.wait(); }).code(), ErrorCode::aborted);
  EXPECT_EQ(said.size(), 2u);
}

TEST_F(Callbacks, OfADroppedWorkIsTold) {
  ProcessGroup g = make();
  recording.decide(kNever);
  { const Work w = g.submit(add()).then(note("dropped")); }
  EXPECT_THAT(said, ElementsAre("dropped: all_reduce: rank 0 dropped the Work of a "
                                "call in flight [group \"x\", rank 0, call 0]"));
}

TEST_F(Callbacks, OfADroppedWorkWhoseCallHasEnded) {
  ProcessGroup g = make();
  { const Work w = g.submit(add()).then(note("dropped")); }
  EXPECT_THAT(said, ElementsAre("dropped"));
  EXPECT_THAT(recording.failed(), IsEmpty());
  recording.decide(kNever);
  Work w = g.submit(add()).then(note("assigned over"));
  w = Work();
  EXPECT_THAT(said, ElementsAre("dropped", HasSubstr("assigned over: all_reduce: rank 0 dropped")));
}

TEST_F(Callbacks, TheGroupMayGoBeforeTheWork) {
  Work w;
  {
    ProcessGroup g = make();
    recording.decide({.polls = 5});
    w = g.submit(add()).then(note("called"));
  }
  w.wait();
  EXPECT_THAT(said, ElementsAre("called"));
}

TEST_F(Callbacks, WhatTheyThrowIsThrownByTheWait) {
  ProcessGroup g = make();
  for (const int way : {0, 1, 2}) {
    Work w = g.submit(add());
    w.then([](const Error*) { throw std::runtime_error("seven"); });
    w.then(note("next"));
    w.then([](const Error*) { throw std::logic_error("eight"); });
    try {
      if (way == 0) w.wait();
      if (way == 1) w.wait_for(5s);
      while (way == 2 && !w.done()) {}
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "seven");
    }
    EXPECT_FALSE(w.valid());
    w.wait();
    EXPECT_THAT(warnings, ElementsAre(HasSubstr("the callback of all_reduce [group \"x\", rank 0, call ")));
    EXPECT_THAT(warnings.at(0), HasSubstr("threw: eight"));
    warnings.clear();
  }
  EXPECT_EQ(said.size(), 3u);
  g.barrier().wait();  // the group is as it was
}

TEST_F(Callbacks, WhatTheyThrowIsLoggedWhereTheCallFails) {
  ProcessGroup g = make();
  recording.decide(kNever);
  {
    const Work w = g.submit(add()).then([](const Error*) { throw std::runtime_error("seven"); });
  }
  EXPECT_THAT(warnings, testing::Contains(HasSubstr("the callback of all_reduce [group "
                                                    "\"x\", rank 0, call 0] threw: seven")));
}

TEST_F(Callbacks, TheyMaySubmitAndAskButNotWaitForTheirGroup) {
  ProcessGroup g = make();
  ProcessGroup other = make();
  Work next;
  Work w = g.submit(add());
  w.then([&](const Error*) {
    next = g.submit(add());
    said.push_back(error_text([&] { next.wait(); }));
    said.push_back(error_text([&] { next.wait_for(1s); }));
    EXPECT_TRUE(next.valid());
    other.barrier().wait();
    said.push_back(next.done() ? "done" : "pending");  // that barrier drove it
  });
  w.wait();
  const std::string text =
      "bad_argument: wait: this thread is in a callback of the same group, "
      "which may not wait for its calls; call done(), or wait in another thread [group \"x\", rank 0]";
  EXPECT_THAT(said, ElementsAre(text, text, testing::AnyOf("done", "pending")));
  next.wait();
  EXPECT_THAT(recording.failed(), IsEmpty());
}

TEST_F(Callbacks, AChainOfCallsThatEachBeginsTheNext) {
  ProcessGroup g = make();
  std::vector<Work> works(100);
  std::function<void(std::size_t)> begin = [&](std::size_t i) {
    works[i] = g.submit(add());
    if (i + 1 < works.size())
      works[i].then([&begin, i](const Error* e) {
        if (e == nullptr) begin(i + 1);
      });
  };
  begin(0);
  for (Work& w : works) w.wait();
  EXPECT_EQ(recording.posted().size(), 100u);
}

TEST_F(Callbacks, WhatTheyHoldIsLetGo) {
  ProcessGroup g = make();
  const auto held = std::make_shared<int>(7);
  auto unique = std::make_unique<int>(8);  // may be moved only
  Work w = g.submit(add()).then([held, unique = std::move(unique)](const Error*) { EXPECT_EQ(*unique, 8); });
  EXPECT_EQ(held.use_count(), 2);
  w.wait();
  EXPECT_EQ(held.use_count(), 1);
}

TEST_F(Callbacks, WaitReturnsAfterTheHelperThreadHasCalledIt) {
  ProcessGroup g = make(3, Progress::thread);
  for (int i = 0; i < 50; ++i) {
    bool called = false;  // of this turn alone: a late call would be seen by the
                          // sanitizers
    std::thread::id by;
    recording.decide({.polls = 20});
    Work w = g.submit(add()).then([&](const Error*) {
      by = std::this_thread::get_id();
      if (i % 8 == 0) std::this_thread::sleep_for(1ms);
      called = true;
    });
    if (i % 2 == 0) std::this_thread::sleep_for(1ms);
    if (i % 3 == 0) {
      while (!w.done()) std::this_thread::yield();
    } else {
      w.wait();
    }
    EXPECT_TRUE(called);
  }
}

TEST_F(Callbacks, WithoutAWaitTheHelperThreadCallsThem) {
  ProcessGroup g = make(3, Progress::thread);
  std::atomic<int> called{0}, by_helper{0};
  std::vector<Work> works;
  recording.decide({.polls = 3});
  for (int i = 0; i < 10; ++i)
    works.push_back(g.submit(add()).then([&](const Error*) {
      if (std::this_thread::get_id() != main_thread) ++by_helper;  // else its call had ended before then()
      ++called;
    }));
  const Deadline limit = Deadline::after(10s);
  while (called < 10 && !limit.passed()) std::this_thread::yield();
  EXPECT_EQ(called, 10);
  EXPECT_GT(by_helper, 0);
  for (Work& w : works) w.wait();
}

class CallbacksOf : public testing::TestWithParam<Progress> {};
INSTANTIATE_TEST_SUITE_P(All, CallbacksOf, testing::Values(Progress::caller, Progress::thread),
                         [](const auto& p) { return p.param == Progress::caller ? "caller" : "thread"; });

// Two threads of a rank, each with a group; the wait of each makes progress on both groups.
TEST_P(CallbacksOf, ManyThreads) {
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    Membership m = r.membership("many");
    m.progress = GetParam();
    ProcessGroup g = ProcessGroup::create(r.context, "shm", m);
    ProcessGroup h = g.duplicate();
    const auto rounds = [&](ProcessGroup& group) {
      for (int i = 0; i < 200; ++i) {
        int x = r.rank, y = 0;
        Work w = group.all_reduce(x).then([&](const Error* e) { y = e == nullptr ? x : -1; });
        if (i % 3 == 0)
          while (!w.done()) std::this_thread::yield();
        w.wait();
        ASSERT_EQ(y, 1);
      }
    };
    std::thread other([&] { rounds(h); });
    rounds(g);
    other.join();
  });
}

// ---- wait_all ----

TEST_F(Callbacks, WaitAllWaitsForAll) {
  ProcessGroup g = make();
  ProcessGroup other = make();
  recording.decide({.polls = 4});
  Work x = g.submit(add()), y = other.barrier(), none;
  wait_all(x, y, none);
  EXPECT_FALSE(x.valid() || y.valid());
  std::vector<Work> works;
  for (int i = 0; i < 5; ++i) works.push_back(g.submit(add()));
  wait_all(works);
  for (const Work& w : works) EXPECT_FALSE(w.valid());
  wait_all(std::span<Work>{});
}

TEST_F(Callbacks, WaitAllThrowsTheFirstErrorWhenAllHaveEnded) {
  ProcessGroup good = make(), bad = make(), worse = make();
  int group = 0;
  recording.decide([&](const OpState& s) {
    if (s.op == Op::barrier) return Fate{.polls = 300};
    return Fate{
        .kind = Fate::fail,
        .polls = 2,
        .why = {.code = ErrorCode::peer_lost, .text = "died" + std::to_string(group++), .ranks = {1}}};
  });
  Work one = good.barrier(), two = bad.submit(add()), three = worse.submit(add()), four = bad.submit(add()),
       five = good.barrier();
  EXPECT_THAT(error_text([&] { wait_all(one, two, three, four, five); }),
              HasSubstr("peer_lost: all_reduce: died0"));
  for (const Work* w : {&one, &two, &three, &four, &five}) EXPECT_FALSE(w->valid());
  EXPECT_THAT(recording.failed(), IsEmpty()) << "none was dropped";
}

TEST_F(Callbacks, WaitAllForLeavesWhatIsPending) {
  ProcessGroup g = make(), other = make();
  recording.decide([](const OpState& s) { return s.op == Op::barrier ? Fate{} : kNever; });
  std::vector<Work> works;
  works.push_back(g.barrier());
  works.push_back(other.submit(add()));
  works.push_back(other.submit(add()));
  EXPECT_FALSE(wait_all_for(works, 5ms));
  EXPECT_FALSE(works[0].valid());
  EXPECT_TRUE(works[1].valid() && works[2].valid());
  recording.let_go();
  EXPECT_TRUE(wait_all_for(works, 5s));
  EXPECT_FALSE(works[1].valid() || works[2].valid());
  recording.decide([](const OpState& s) {
    return s.op == Op::barrier ? Fate{.kind = Fate::fail,
                                      .polls = 1,
                                      .why = {.code = ErrorCode::peer_lost, .text = "died", .ranks = {1}}}
                               : kNever;
  });
  works[0] = g.barrier();
  works[1] = other.submit(add());
  EXPECT_THAT(error_text([&] { wait_all_for(works, 5ms); }), HasSubstr("peer_lost: barrier: died"));
  EXPECT_TRUE(works[1].valid()) << "still pending, and still the caller's";
  recording.let_go();
  works[1].wait();
}

// A list of calls that are not submitted yet does not compile.
template <class... W>
concept WaitsForAll = requires(W&&... w) {
  wait_all(std::forward<W>(w)...);
};
static_assert(WaitsForAll<Work&> && WaitsForAll<Work&, Work&, Work&> && WaitsForAll<std::vector<Work>&>);
static_assert(!WaitsForAll<Work> && !WaitsForAll<Work, Work> && !WaitsForAll<Work&, Work>);

}  // namespace
}  // namespace weft::test::callbacks_test
