#include "weft/base/interrupt.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "base/waits/suspension.hpp"

namespace weft::test::interrupt_test {
namespace {

using namespace std::chrono_literals;

TEST(Interrupt, PassesTheDeadlinesThatWereMadeBefore) {
  Interrupt interrupt;
  const Deadline outside = Deadline::after(1h);
  {
    const Interruptible here(interrupt);
    const Deadline before = Deadline::after(1h), soon = Deadline::after(0s), never = Deadline::never();
    EXPECT_FALSE(before.passed());
    EXPECT_FALSE(interrupted());
    interrupt.raise();
    const Deadline unseen = Deadline::after(1h);  // nobody has looked since: the next wait would be missed
    EXPECT_FALSE(interrupted());
    EXPECT_EQ(before.left(), Duration::zero());
    EXPECT_TRUE(interrupted() && here.interrupted());
    EXPECT_TRUE(before.passed() && unseen.passed() && outside.passed());
    EXPECT_LE(soon.when(), before.when());
    EXPECT_FALSE(never.passed());
    EXPECT_EQ(never.when(), Clock::time_point::max());

    const Deadline after = Deadline::after(1h);
    EXPECT_FALSE(after.passed());
    EXPECT_GT(after.left(), 59min);
    std::thread([&] { EXPECT_FALSE(before.passed() || interrupted()); }).join();  // another thread
  }
  EXPECT_FALSE(outside.passed());
  EXPECT_FALSE(interrupted());
}

TEST(Interrupt, TheInnermostCounts) {
  Interrupt outer, inner;
  const Interruptible around(outer);
  const Deadline deadline = Deadline::after(1h);
  {
    const Interruptible within(inner);
    EXPECT_EQ(Interruptible::current(), &within);
    outer.raise();
    EXPECT_FALSE(deadline.passed());
  }
  EXPECT_EQ(Interruptible::current(), &around);
  EXPECT_TRUE(deadline.passed());
}

TEST(Interrupt, EndsASleep) {
  Duration least = 1h;  // of three: other tests run, too
  for (int i = 0; i < 3; ++i) {
    Interrupt interrupt;
    Clock::time_point raised;
    std::thread other([&] {
      std::this_thread::sleep_for(100ms);
      raised = Clock::now();
      interrupt.raise();
    });
    {
      const Interruptible here(interrupt);
      sleep_noticing(20s);
    }
    const auto ended = Clock::now();
    other.join();
    least = std::min<Duration>(least, ended - raised);
  }
  EXPECT_LT(least, 100ms);
}

}  // namespace
}  // namespace weft::test::interrupt_test
