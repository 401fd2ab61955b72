// Progress::thread: calls make progress while the program computes, and the helper thread exists as long as
// groups that request it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::progress_thread_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kLarge = 3'000'000;  // many chunks

Deadline soon() { return Deadline::after(seconds(20)); }

ProcessGroup make_group(Rank& rank, Progress progress, const std::string& name = "world") {
  Membership m = rank.membership(name);
  m.progress = progress;
  return ProcessGroup::create(rank.context, rank.options.backend, m);
}

Tensor filled(Context& context, std::int64_t count, float value) {
  Tensor t(context, Shape{count}, DType::f32);
  std::fill(t.f32().begin(), t.f32().end(), value);
  return t;
}

int helper_threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream name(task.path() / "comm");
    std::string text;
    std::getline(name, text);
    count += text == "weft-progress" ? 1 : 0;
  }
  return count;
}

/// The number of threads once it is the expected one, within the time that the system takes to forget a
/// thread. A joined thread is still in /proc for a moment.
int helper_threads_at_last(int expected) {
  const Deadline deadline = soon();
  while (helper_threads() != expected && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
  return helper_threads();
}

/// Waits until the recorder shows the expected state; reading the recorder makes no progress on calls.
bool trace_comes_to_hold(const ProcessGroup& group, const std::string& text) {
  for (const Deadline deadline = soon(); !deadline.passed();) {
    if (group.trace_json().find(text) != std::string::npos) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

class ProgressThread : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ProgressThread, ::testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

// Posts an all_reduce of a large tensor, rank 0 before rank 1. Two ranks that post at one moment may each do
// all of their part while posting, and then nothing is left that waits for rank 0 to come back.
Work post_in_turn(ProcessGroup& group, Rank& rank, const Tensor& t) {
  if (rank.rank == 1) rank.store->get("posted", soon());
  Work work = group.all_reduce(t, t);
  if (rank.rank == 0) rank.store->set("posted", "");
  return work;
}

// Rank 0 posts and then makes no call before its peers have finished.
TEST_P(ProgressThread, PeersFinishWhileARankComputes) {
  run_ranks(GetParam(), 3, [](Rank& rank) {
    ProcessGroup group = make_group(rank, Progress::thread);
    const Tensor t = filled(rank.context, kLarge, static_cast<float>(rank.rank + 1));
    Work work = group.all_reduce(t, t);
    if (rank.rank == 0) {
      for (int peer = 1; peer < rank.size; ++peer)
        EXPECT_EQ(rank.store->get(fmt::format("finished/{}", peer), soon()), "6");
    }
    work.wait();
    EXPECT_EQ(t.f32()[kLarge - 1], 6.0f);
    rank.store->set(fmt::format("finished/{}", rank.rank), fmt::format("{}", t.f32()[0]));
  });
}

// Without the thread the same peers time out, so the thread is the cause of the progress in the test above.
TEST_P(ProgressThread, WithoutItTheyTimeOut) {
  RankOptions options;
  options.deadline = milliseconds(400);
  run_ranks(
      GetParam(), 2,
      [](Rank& rank) {
        ProcessGroup group = make_group(rank, Progress::caller);
        const Tensor t = filled(rank.context, kLarge, 1);
        Work work = post_in_turn(group, rank, t);
        if (rank.rank == 0) rank.store->get("gave up", soon());
        EXPECT_EQ(error_of([&] { work.wait(); }).code(), ErrorCode::timeout);
        rank.store->set("gave up", "");
        rank.store->set(fmt::format("done/{}", rank.rank), "");
        rank.store->get(fmt::format("done/{}", 1 - rank.rank), soon());
      },
      options);
}

// Waits until its calls are done by others than this thread.
void await_without_driving(const ProcessGroup& group) {
  for (const Deadline deadline = soon();
       group.trace_json().find("pending") != std::string::npos && !deadline.passed();)
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_THAT(group.trace_json(), Not(HasSubstr("pending")));
}

// The rank's own call is done, too, without a look at its Work.
TEST_P(ProgressThread, ALargeAllReduceOverlaps) {
  run_ranks(GetParam(), 2, [](Rank& rank) {
    ProcessGroup group = make_group(rank, Progress::thread);
    for (int round = 0; round < 5; ++round) {
      const Tensor t = filled(rank.context, kLarge, static_cast<float>(rank.rank + round));
      Work work = group.all_reduce(t, t);
      await_without_driving(group);
      work.wait();
      EXPECT_EQ(t.f32()[7], static_cast<float>(1 + 2 * round));
    }
  });
}

// A helper thread makes no progress on groups that did not request it.
TEST_P(ProgressThread, OtherGroupsAreLeftAlone) {
  RankOptions options;
  options.deadline = milliseconds(400);
  run_ranks(
      GetParam(), 2,
      [](Rank& rank) {
        ProcessGroup helped = make_group(rank, Progress::thread, "helped");
        ProcessGroup group = make_group(rank, Progress::caller, "alone");
        const Tensor t = filled(rank.context, kLarge, 1);
        Work work = post_in_turn(group, rank, t);
        // By the helper alone, since a wait of this thread would drive all groups of its rank.
        Work barrier = helped.barrier();
        await_without_driving(helped);
        barrier.wait();
        if (rank.rank == 0) rank.store->get("gave up", soon());
        EXPECT_EQ(error_of([&] { work.wait(); }).code(), ErrorCode::timeout);
        rank.store->set("gave up", "");
        helped.barrier({.deadline = seconds(20)}).wait();
      },
      options);
}

// Threads of the program and the helper at the same groups: small calls and large, waited for and polled.
TEST_P(ProgressThread, ManyCallsFromSeveralThreads) {
  run_ranks(GetParam(), 2, [](Rank& rank) {
    const auto work_on = [&](const std::string& name) {
      ProcessGroup group = make_group(rank, Progress::thread, name);
      for (int i = 0; i < 300; ++i) {
        const std::int64_t count = i % 50 == 0 ? 300'000 : 8;
        const Tensor t = filled(rank.context, count, static_cast<float>(rank.rank + i));
        std::vector<Work> more;
        Tensor small[3];
        for (Tensor& s : small) {
          s = filled(rank.context, 4, 1);
          more.push_back(group.all_reduce(s, s));
        }
        Work work = group.all_reduce(t, t);
        switch (i % 3) {
          case 0: work.wait(); break;
          case 1:
            while (!work.done()) std::this_thread::yield();
            break;
          case 2:
            while (!work.wait_for(std::chrono::microseconds(50))) {}
            break;
        }
        EXPECT_EQ(t.f32()[static_cast<std::size_t>(count - 1)], static_cast<float>(1 + 2 * i));
        for (Work& w : more) w.wait();
        EXPECT_EQ(small[2].f32()[3], 2.0f);
      }
    };
    std::thread other(work_on, "a");
    work_on("b");
    other.join();
  });
}

TEST(ProgressThreadLife, OnePerRankFromTheFirstGroupToTheLast) {
  const auto result = run_in_child([] {
    EXPECT_EQ(helper_threads(), 0);
    run_ranks(Ranks::threads, 2, [](Rank& rank) {
      {
        ProcessGroup one_rank = [&] {
          Membership m;
          m.process_rank = rank.rank;
          m.progress = Progress::thread;
          m.name = "alone";
          return ProcessGroup::create(rank.context, "shm", m);
        }();
        rank.meet("alone");
        EXPECT_EQ(helper_threads(), 0) << "nobody to wait for";
        rank.meet("looked");
        ProcessGroup a = make_group(rank, Progress::thread, "a");
        ProcessGroup b = make_group(rank, Progress::thread, "b");
        rank.meet("two groups");
        EXPECT_EQ(helper_threads(), 2) << "one per rank";
        rank.meet("counted");
        std::this_thread::sleep_for(milliseconds(20));  // they sleep by now
        a = ProcessGroup();
        rank.meet("one group");
        EXPECT_EQ(helper_threads(), 2);
        b.barrier().wait();
        rank.meet("used");
      }
      rank.meet("no group");
      EXPECT_EQ(helper_threads_at_last(0), 0);
      rank.meet("counted again");
      ProcessGroup again = make_group(rank, Progress::thread, "again");
      again.barrier().wait();
    });
    EXPECT_EQ(helper_threads_at_last(0), 0);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

// A group that is destroyed while its helper sleeps on a call that has failed.
TEST(ProgressThreadLife, DestroyedBesideAPeerThatNeverCame) {
  RankOptions options;
  options.deadline = milliseconds(200);
  run_ranks(
      Ranks::threads, 2,
      [](Rank& rank) {
        ProcessGroup group = make_group(rank, Progress::thread);
        const Tensor t = filled(rank.context, 100, 1);
        if (rank.rank == 0) {
          Work work = group.all_reduce(t, t);
          EXPECT_TRUE(trace_comes_to_hold(group, "failed"));
          EXPECT_EQ(error_of([&] { work.wait(); }).code(), ErrorCode::timeout);
        }
        rank.meet("end");
      },
      options);
}

TEST(ProgressThreadLife, AForkedChildHasNoneAndSaysSo) {
  const auto result = run_in_child([] {
    run_ranks(Ranks::threads, 2, [](Rank& rank) {
      ProcessGroup group = make_group(rank, Progress::thread);
      group.barrier().wait();
      if (rank.rank == 0) {
        auto child = ChildProcess::fork([&] {
          EXPECT_EQ(helper_threads(), 0);
          const Error error = error_of([&] { group.barrier().wait(); });
          EXPECT_EQ(error.code(), ErrorCode::unsupported);
          EXPECT_THAT(error.what(), HasSubstr("this process was forked"));
          group = ProcessGroup();
          return 0;
        });
        EXPECT_EQ(child.wait(seconds(20)), (ExitStatus{0, 0}));
      }
      group.barrier().wait();
    });
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

// Rank 1 dies while rank 0's helper thread makes progress: the failure is known before the program polls.
TEST(ProgressThreadLife, AFailureWhileItDrivesIsKept) {
  RankProcesses ranks(2, [](Rank& rank) {
    ProcessGroup group = make_group(rank, Progress::thread);
    const Tensor t = filled(rank.context, kLarge, 1);
    group.all_reduce(t, t).wait();
    rank.store->set(fmt::format("ready/{}", rank.rank), "");
    if (rank.rank == 1) std::this_thread::sleep_for(seconds(60));
    Work work = group.all_reduce(t, t);
    EXPECT_TRUE(trace_comes_to_hold(group, "failed"));
    const Error error = error_of([&] { work.wait(); });
    EXPECT_EQ(error.code(), ErrorCode::peer_lost) << error.what();
    EXPECT_EQ(error_of([&] { static_cast<void>(group.barrier()); }).code(), ErrorCode::peer_lost);
  });
  ranks.store().get("ready/0", soon());
  ranks.store().get("ready/1", soon());
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

}  // namespace
}  // namespace weft::test::progress_thread_test
