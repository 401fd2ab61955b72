// Tests what a user's log sink may do: no lock of weft's is held while it runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "support/processes.hpp"
#include "support/recording_backend.hpp"
#include "weft/base/view.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::log_sink_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

ProcessGroup make_group(Context& context, Recording& recording, const std::string& name,
                        Progress progress = Progress::caller) {
  Membership m;
  m.store = make_local_store();
  m.size = 3;
  m.name = name;
  m.progress = progress;
  return ProcessGroup::create(context, recording.factory(), m);
}

/// Calls that never end; those with kWarnsSoon warn after 300 ms, long before they fail.
void stall(Recording& recording) {
  recording.decide({.kind = Fate::never});
  recording.miss({2}, "rank 2 is on holiday");
}

constexpr CallOptions kWarnsSoon{.deadline = 3s};

// A thread in the sink waits for a lock (an interpreter's, for example) that another thread holds. That
// thread calls done(), makes and destroys groups, and logs. Two groups. A line about one group is logged
// while the program waits for the other.
void with_a_lock(Progress progress) {
  const ProcessResult result = run_in_child(
      [progress] {
        Recording recording;
        stall(recording);
        std::mutex interpreter;
        std::atomic<int> in_sink{0};
        std::vector<std::string> lines;
        const auto sink = [&](LogLevel, std::string_view line) {
          ++in_sink;
          const std::lock_guard lock(interpreter);
          lines.emplace_back(line);
        };
        {
          Context context({.log_sink = sink});
          ProcessGroup a = make_group(context, recording, "a", progress),
                       b = make_group(context, recording, "b", progress);
          std::vector<float> x(5);
          Work quick = a.broadcast(view(x), view(x), 2, {.deadline = 60s}),
               other = a.broadcast(view(x), view(x), 2, {.deadline = 60s}),
               slow = b.broadcast(view(x), view(x), 2, kWarnsSoon);
          std::unique_lock lock(interpreter);
          std::thread waiter([&] {
            if (progress == Progress::thread) return;
            while (in_sink == 0) EXPECT_FALSE(other.wait_for(50ms));
          });
          while (in_sink == 0) std::this_thread::yield();
          EXPECT_FALSE(quick.done());
          EXPECT_FALSE(quick.wait_for(1ms));
          context.log().write(LogLevel::error, "from the thread with the lock");
          ProcessGroup c = make_group(context, recording, "c", progress);
          c = ProcessGroup();
          lock.unlock();
          waiter.join();
          recording.let_go();
          quick.wait();
          other.wait();
          slow.wait();
        }
        EXPECT_THAT(lines, testing::Contains(HasSubstr("[group \"b\", rank 0, call 0]")));
        EXPECT_THAT(lines, testing::Contains("[program] from the thread with the lock"));
        return 0;
      },
      20s);
  EXPECT_TRUE(result.ok()) << to_string(result);
}

TEST(LogSink, MayTakeALockThatAThreadHoldsWhichUsesGroups) { with_a_lock(Progress::caller); }

TEST(LogSink, MayDoSoOnTheHelperThread) { with_a_lock(Progress::thread); }

// The sink calls the group to which its line belongs, and destroys another group.
TEST(LogSink, MayUseGroups) {
  const ProcessResult result = run_in_child(
      [] {
        Recording recording;
        std::atomic<bool> acted{false};
        Context* the_context = nullptr;
        ProcessGroup *the_a = nullptr, *the_b = nullptr;
        std::vector<float> x(5), y(5);
        const auto sink = [&](LogLevel, std::string_view line) {
          EXPECT_THAT(line, HasSubstr("rank 2 is on holiday"));
          if (acted.exchange(true)) return;
          recording.decide({.kind = Fate::finish, .polls = 3});
          the_a->send(view(y), 2).wait();
          ProcessGroup c = make_group(*the_context, recording, "c");
          c.broadcast(view(y), view(y), 2).wait();
          c = ProcessGroup();
          *the_b = ProcessGroup();
          EXPECT_EQ(recording.destroyed(), 2);
        };
        Context context({.log_sink = sink});
        the_context = &context;
        stall(recording);
        ProcessGroup a = make_group(context, recording, "a"), b = make_group(context, recording, "b");
        the_a = &a;
        the_b = &b;
        ProcessGroup d = make_group(context, recording, "d");
        Work w = a.all_reduce(view(x), view(x), {.deadline = 20s}), slow = d.send(view(x), 2, kWarnsSoon);
        while (!acted) EXPECT_FALSE(w.wait_for(50ms));
        recording.let_go();
        w.wait();
        slow.wait();
        a = ProcessGroup();
        return 0;
      },
      20s);
  EXPECT_TRUE(result.ok()) << to_string(result);
}

}  // namespace
}  // namespace weft::test::log_sink_test
