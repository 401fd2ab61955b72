// Tests which deadlines a late wake-up moves, without a stopped process. A TimedWait that is held too long is
// a late wake-up.
#include "base/waits/suspension.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

namespace weft::test::suspension_test {
namespace {

using namespace std::chrono_literals;

// A wait that returns `span` after its time; `within` runs before that is noticed.
template <class F>
void late_by(Duration span, const F& within) {
  std::optional<TimedWait> wait;
  wait.emplace(Duration::zero());
  std::this_thread::sleep_for(span);
  within();
  wait.reset();
}

TEST(Suspension, MovesDeadlinesThatWereMadeBefore) {
  const Deadline before = Deadline::after(10s);
  const Duration known = suspended_time();
  late_by(500ms, [] {});
  EXPECT_GE(suspended_time() - known, 500ms);
  EXPECT_GE(before.left(), 9800ms);
  late_by(500ms, [] {});
  EXPECT_GE(before.left(), 9700ms);
}

// The first thread that continues makes a Deadline before the suspension is noticed: wait_for(1 ms) after a
// night's suspension must not take a night.
TEST(Suspension, DoesNotMoveDeadlinesThatWereMadeAfterIt) {
  std::optional<Deadline> after;
  late_by(2s, [&] { after = Deadline::after(1ms); });
  EXPECT_LT(after->left(), 1s);
  EXPECT_EQ(Deadline::never().when(), Clock::time_point::max());
}

}  // namespace
}  // namespace weft::test::suspension_test
