// In the middle of a single copy the kernel waits for a page of a peer's memory, and the thread owns the
// group meanwhile. Calls of other threads of that rank on the group do not wait for this thread.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/slow_memory.hpp"
#include "support/values.hpp"

namespace weft::test::stuck_copy_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr std::size_t kBytes = 1 << 20;

// Rank 1 sends memory whose page does not arrive. Rank 0 receives it on a separate thread, and calls
// `meanwhile` once that thread is stuck. `after`: when it has come. With Progress::thread the helper thread
// is stuck, and the Work is destroyed.
void stuck(const std::function<void(Rank&, ProcessGroup&)>& meanwhile,
           const std::function<void(Rank&, ProcessGroup&, const std::string& said)>& after,
           Progress progress = Progress::caller) {
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    Membership m = r.membership("g");
    m.progress = progress;
    ProcessGroup group = ProcessGroup::create(r.context, "shm", m);
    constexpr std::int64_t kCount = kBytes / sizeof(float);
    if (r.rank == 1) {
      SlowMemory slow(kBytes);
      ASSERT_TRUE(slow.there());
      Work sent = group.send(view(static_cast<float*>(slow.data()), kCount), 0);
      std::jthread pages([&] {
        EXPECT_TRUE(slow.somebody_waits(20s));
        r.store->set("stuck", "1");
        r.store->get("resolve", Deadline::after(20s));
        slow.let_come();
      });
      const std::string said = error_text([&] { sent.wait(); });
      pages.join();
      after(r, group, said);
      return;
    }
    std::vector<float> out(kCount, 1.0f);
    Work received = group.recv(view(out), 1);
    std::string said;
    std::jthread receiver;
    if (progress == Progress::caller)
      receiver = std::jthread([&] { said = error_text([&] { received.wait(); }); });
    r.store->get("stuck", Deadline::after(20s));
    if (progress == Progress::thread) received = {};
    meanwhile(r, group);
    r.store->set("resolve", "1");
    if (receiver.joinable()) receiver.join();
    after(r, group, said);
  });
}

class StuckCopy : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_SINGLE_COPY", "pull", 1);  // what auto means depends on the processor
    if (!kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
    if (!SlowMemory::possible()) GTEST_SKIP() << "no userfaultfd here: " << std::strerror(errno);
  }
  void TearDown() override { ::unsetenv("WEFT_SINGLE_COPY"); }
};

TEST_F(StuckCopy, DoesNotHoldUpAnAbort) {
  stuck(
      [](Rank&, ProcessGroup& group) {
        const auto began = Clock::now();
        group.abort("enough");
        EXPECT_LT(Clock::now() - began, 2s);
        EXPECT_THAT(error_text([&] { group.barrier().wait(); }), HasSubstr("aborted by rank 0: enough"));
        EXPECT_FALSE(group.quiesce(20ms)) << "the stuck thread still writes here";
        EXPECT_LT(Clock::now() - began, 5s);
      },
      [](Rank& r, ProcessGroup& group, const std::string& said) {
        EXPECT_THAT(said, HasSubstr("aborted by rank 0: enough"));
        if (r.rank == 0) {
          EXPECT_TRUE(group.quiesce(5s));
        }
      });
}

TEST_F(StuckCopy, DoesNotHoldUpACallBeyondItsDeadline) {
  stuck(
      [](Rank&, ProcessGroup& group) {
        const auto began = Clock::now();
        const Error e = error_of([&] { group.barrier({.deadline = 100ms}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_STREQ(e.what(),
                     "barrier: not begun within 0.1 s: all the time another thread of this rank was in the "
                     "middle of a step; if "
                     "the kernel copies for it, and waits for memory of a peer, WEFT_SINGLE_COPY=off avoids "
                     "this [group "
                     "\"g\", rank 0]");
        EXPECT_THAT(error_text([&] { group.probe(1, {.deadline = 100ms}); }),
                    HasSubstr("wait_message: not begun within 0.1 s: all the time"));
        EXPECT_LT(Clock::now() - began, 5s);
      },
      [](Rank&, ProcessGroup& group, const std::string& said) {
        EXPECT_EQ(said, "no error");
        group.barrier().wait();  // nothing had been sent
      });
}

// The group ends when the stuck thread has returned.
TEST_F(StuckCopy, DoesNotHoldUpADestructor) {
  stuck(
      [](Rank&, ProcessGroup& group) {
        const auto began = Clock::now();
        group = ProcessGroup();
        EXPECT_LT(Clock::now() - began, 8s);
      },
      [](Rank& r, ProcessGroup& group, const std::string& said) {
        EXPECT_EQ(said, "no error");
        if (r.rank == 1) {
          EXPECT_THAT(error_text([&] { group.barrier().wait(); }),
                      HasSubstr("rank 0 left the group without it"));
        }
      });
}

// The helper thread has nobody to give the group to: it stays, and the Context, which ends with the rank,
// does not count it.
TEST_F(StuckCopy, OfTheHelperThreadDoesNotHoldUpAContext) {
  stuck(
      [](Rank&, ProcessGroup& group) {
        const auto began = Clock::now();
        group = ProcessGroup();
        EXPECT_LT(Clock::now() - began, 8s);
      },
      [](Rank& r, ProcessGroup&, const std::string& said) {
        if (r.rank == 1) {
          EXPECT_THAT(said, HasSubstr("rank 0 dropped the Work of a call in flight"));
        }
      },
      Progress::thread);
}

}  // namespace
}  // namespace weft::test::stuck_copy_test
