// The last call of a group: leave() compares the calls of all ranks, and the destructor compares the calls
// that it knows without waiting.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::leave_test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kOfLeave = "leave: the comparison of all calls (a barrier): ";

class Leave : public testing::TestWithParam<Ranks> {
 protected:
  void run(int n, const std::function<void(Rank&)>& body) { run_ranks(GetParam(), n, body); }
};
INSTANTIATE_TEST_SUITE_P(Kinds, Leave, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

// A call of a root to all, of `each` elements for each rank.
void from_root(Rank& r, Op op, int root, std::int64_t each = 2) {
  std::vector<float> one(static_cast<std::size_t>(each)), all(static_cast<std::size_t>(each * r.size));
  (op == Op::scatter ? r.group().scatter(all, one, root) : r.group().broadcast(one, root)).wait();
}

TEST_P(Leave, IsTheLastCall) {
  run(3, [](Rank& r) {
    from_root(r, Op::broadcast, 2);
    ProcessGroup g = std::move(r.group());
    g.leave();
    EXPECT_FALSE(g);
    const Error e = error_of([&] { g.leave(); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_THAT(e.what(), HasSubstr("leave: empty ProcessGroup"));
  });
}

TEST_P(Leave, NeedsAllRanksWithinItsDeadline) {
  run(2, [](Rank& r) {
    const Error wrong = error_of([&] { r.group().leave(-1ns); });
    EXPECT_EQ(wrong.code(), ErrorCode::bad_argument);
    EXPECT_THAT(wrong.what(),
                HasSubstr("leave: deadline is -1e-09 s; expected 0 or more [group \"world\", rank "));
    if (r.rank == 0) {
      const Error e = error_of([&] { r.group().leave(100ms); });
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(e.what(), AllOf(HasSubstr(kOfLeave), HasSubstr("rank 1 had not arrived")));
      EXPECT_TRUE(r.group()) << "it is as it was, and can be shrunk";
    }
    r.meet("end");
  });
}

// Two ranks each called as the root and did not have to wait: no other check would find this mismatch.
TEST_P(Leave, TwoRootsAreAMismatchOnAllRanks) {
  for (const Op op : {Op::broadcast, Op::scatter})
    for (const std::int64_t each : {2, 5000})
      run(3, [&](Rank& r) {
        for (int k = 0; k < 5; ++k) from_root(r, op, 0);
        const Error e = error_of([&] {
          from_root(r, op, r.rank == 1 ? 1 : 0, each);
          r.group().leave();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), AllOf(HasSubstr(fmt::format("{} f32 x{} root 1 [call 5]", name(op), each)),
                                    HasSubstr(fmt::format("{} f32 x{} root 0 [call 5]", name(op), each))));
      });
}

TEST_P(Leave, ACallThatARankLeavesOutIsAMismatchOnAllRanks) {
  for (const Op op : {Op::broadcast, Op::scatter})
    run(3, [&](Rank& r) {
      const Error e = error_of([&] {
        for (int k = 0; k < 7; ++k)
          if (r.rank != 1 || k != 3) from_root(r, op, 0);
        r.group().leave();
      });
      EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
      EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 1"), HasSubstr("barrier [call 6]"),
                                  HasSubstr(fmt::format("{} f32 x2 root 0 [call 6]", name(op)))));
    });
}

// A rank compares its calls before it is further ahead than the length of the ring of lines.
TEST_P(Leave, ManyCallsOfRootsAreComparedOnTheWay) {
  for (const bool left_out : {false, true})
    run(3, [&](Rank& r) {
      int done = 0;
      const Error e = error_of([&] {
        for (; done < 100; ++done)
          if (r.rank != 1 || done != 3 || !left_out)
            from_root(r, Op::broadcast, r.rank == 1 && done == 3 ? 1 : 0, 1 + done);
      });
      EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
      EXPECT_LT(done, 3 + 33) << "not beyond the ring";
    });
}

// A context that keeps what is logged.
struct Listening {
  std::mutex mutex;
  std::string said;
  Context context{[this] {
    ContextOptions options;
    options.log_sink = [this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex);
      said += std::string(line) + "\n";
    };
    return options;
  }()};
  std::string heard() {
    const std::lock_guard lock(mutex);
    return said;
  }
};

// The rank that leaves last reports it. If both leave at once, at least one of them does.
TEST_P(Leave, TheDestructorWarnsOfACallThatWasLeftOut) {
  for (const int first : {0, 1}) {
    for (const Op op : {Op::broadcast, Op::scatter}) {
      run(3, [&](Rank& r) {
        Listening here;
        Rank me(r.rank, r.size, here.context, r.store, r.options);
        ProcessGroup g = ProcessGroup::create(here.context, "shm", me.membership());
        g.barrier().wait();
        std::vector<float> one(10), all(30);
        if (r.rank != 1) (op == Op::scatter ? g.scatter(all, one, 0) : g.broadcast(one, 0)).wait();
        r.meet("called");
        if (r.rank == first) g = ProcessGroup();
        r.meet("left");
        if (r.rank == 1 - first) g = ProcessGroup();
        r.meet("both have left");
        g = ProcessGroup();
        const std::string what = fmt::format(
            "mismatch, found when the group was left: rank {} called {} f32 x10 root 0 [call 1], "
            "rank 1 left the group without it [group \"world\", rank {}]",
            r.rank == 1 ? 0 : r.rank, name(op), r.rank);
        if (r.rank == 0 && first == 0) {
          EXPECT_EQ(here.heard(), "") << "rank 1 might still have called it";
        } else {
          EXPECT_THAT(here.heard(), HasSubstr(what));
        }
      });
    }
  }
}

// It knows why.
TEST_P(Leave, ARankThatAnExceptionEndsDoesNotWarn) {
  run(2, [](Rank& r) {
    Listening here;
    Rank me(r.rank, r.size, here.context, r.store, r.options);
    try {
      ProcessGroup g = ProcessGroup::create(here.context, "shm", me.membership());
      std::vector<float> one(10);
      if (r.rank == 0) g.broadcast(one, 0).wait();
      r.meet("called");
      if (r.rank == 1) throw std::runtime_error("the program's own");
      r.meet("end");
    } catch (const std::runtime_error&) {
      r.meet("end");
    }
    if (r.rank == 1) {
      EXPECT_THAT(here.heard(), IsEmpty());
    }
  });
}

// A group that was left without a mismatch logs nothing, however many calls of roots were its last calls.
TEST_P(Leave, NobodyWarnsAfterEqualCalls) {
  run(3, [](Rank& r) {
    Listening here;
    Rank me(r.rank, r.size, here.context, r.store, r.options);
    for (const bool together : {true, false}) {
      ProcessGroup g = ProcessGroup::create(here.context, "shm", me.membership());
      std::vector<float> one(10);
      for (int k = 0; k < 40; ++k) g.broadcast(one, k % 3).wait();
      if (together) g.leave();
    }
    EXPECT_EQ(here.heard(), "");
  });
}

// The messages of a rank that has left can be received, even if the receiver has not taken the last one yet.
TEST(LeaveOfProcesses, ASenderMayLeaveBeforeItsLastChunksAreTaken) {
  ::setenv("WEFT_SINGLE_COPY", "off", 1);
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    std::vector<float> x(32 << 10, static_cast<float>(r.rank + 1));  // two chunks of 64 KiB
    ProcessGroup g = std::move(r.group());
    if (r.rank == 0) {
      Work sent = g.send(x, 1);
      r.meet("posted");
      r.meet("granted");
      sent.wait();
      g = ProcessGroup();
      r.meet("left");
    } else {
      r.meet("posted");
      Work received = g.recv(x, 0);
      for (int looks = 0; looks < 5; ++looks) EXPECT_FALSE(received.done());
      r.meet("granted");
      r.meet("left");
      for (bool done = false; !done; done = received.done())  // each looks who is there, and takes a chunk
        std::this_thread::sleep_for(20ms);
      EXPECT_EQ(x.back(), 1.f);
    }
  });
  ::unsetenv("WEFT_SINGLE_COPY");
}

// ---- Works that are dropped

TEST_P(Leave, ADroppedWorkIsLoggedAtOnce) {
  run(2, [](Rank& r) {
    Listening here;
    Rank me(r.rank, r.size, here.context, r.store, r.options);
    ProcessGroup g = ProcessGroup::create(here.context, "shm", me.membership());
    std::vector<float> x(5000);  // so many that a call needs both ranks to its end
    if (r.rank == 1) {
      static_cast<void>(g.all_reduce(x));
      EXPECT_EQ(here.heard(),
                "[group] all_reduce: rank 1 dropped the Work of a call in flight; its result is undefined, "
                "and the group "
                "has failed [group \"world\", rank 1, call 0]\n");
      EXPECT_EQ(error_of([&] { g.all_reduce(x).wait(); }).code(), ErrorCode::aborted);
    }
    r.meet("dropped");
    if (r.rank == 0) {
      // The rank's own call fails for that reason; if its Work is destroyed, too, the log says so.
      try {
        const Work unasked = g.all_reduce(x);
      } catch (const Error&) {  // the group has failed before it began
        return r.meet("end");
      }
      EXPECT_THAT(
          here.heard(),
          HasSubstr(
              "all_reduce: a call that failed was dropped before the program asked for its result; its "
              "result is undefined: "
              "all_reduce: rank 1 dropped the Work of a call in flight [group \"world\", rank 0, call 0]\n"));
    }
    r.meet("end");
  });
}

TEST_P(Leave, WhatTheProgramKnowsIsNotLogged) {
  run(2, [](Rank& r) {
    Listening here;
    Rank me(r.rank, r.size, here.context, r.store, r.options);
    std::vector<float> x(5000), y(5000);
    {
      ProcessGroup g = ProcessGroup::create(here.context, "shm", me.membership());
      if (r.rank == 0) {  // it has got the Error
        Work a = g.all_reduce(x), b = g.all_reduce(y);
        EXPECT_EQ(error_of([&] { a.wait(); }).code(), ErrorCode::aborted);
      } else {  // it has ended the group itself
        const Work a = g.all_reduce(x), b = g.all_reduce(y);
        g.abort("enough");
      }
    }
    EXPECT_EQ(here.heard(), "");
    r.meet("end");
  });
}

}  // namespace
}  // namespace weft::test::leave_test
