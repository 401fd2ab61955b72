// How this process learns that it was suspended: stopped by a signal (Ctrl-Z, a scheduler), or in a container
// that was paused. The system does not report it; but a timed wait then ends long after its time.
//
// So every wait of weft that a Deadline may end is cut into short waits, each inside a TimedWait. A
// suspension counts once, however many threads notice it, and moves every Deadline (weft/base/clock.hpp).
// Thread-safe.
#pragma once

#include <algorithm>
#include <functional>

#include "weft/base/clock.hpp"
#include "weft/base/interrupt.hpp"

namespace weft {

/// A wake-up that is late by less than this counts as the machine's load.
inline constexpr Duration kLateWake = std::chrono::milliseconds(100);
/// A wait in pieces of this length notices nearly all of a suspension.
inline constexpr Duration kWaitPiece = std::chrono::milliseconds(200);
/// The length of the pieces of a wait in this thread: where an Interrupt may end it, a shorter one.
inline Duration wait_piece() noexcept {
  constexpr Duration kShort = std::chrono::milliseconds(20);
  return Interruptible::current() == nullptr ? kWaitPiece : kShort;
}

/// Lives as long as one wait in the kernel, which asked to be woken after `asked` at the latest.
class TimedWait {
 public:
  explicit TimedWait(Duration asked) noexcept;
  ~TimedWait();
  TimedWait(const TimedWait&) = delete;
  TimedWait& operator=(const TimedWait&) = delete;

 private:
  static constexpr Duration kLongest = std::chrono::hours(24 * 365);
  Clock::time_point due_;
};

/// While it lives, every TimedWait of this thread begins with a call of `f`: so `f` is called several times a
/// second while the thread waits, whatever for. `f` must not throw. The thread may hold locks then: `f` must
/// not wait for a lock that others hold while they wait. The waits of `f` itself do not call it.
class CalledInWaits {
 public:
  explicit CalledInWaits(std::function<void()> f) noexcept;
  ~CalledInWaits();
  CalledInWaits(const CalledInWaits&) = delete;
  CalledInWaits& operator=(const CalledInWaits&) = delete;

 private:
  friend class TimedWait;
  const std::function<void()> f_;
  CalledInWaits* const outer_;  // the one before, which is not called as long as this one lives
};

/// Sleeps for `span`, in pieces.
void sleep_noticing(Duration span) noexcept;

}  // namespace weft
