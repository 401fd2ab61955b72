// Detects that this process was suspended: stopped by a signal (Ctrl-Z, a scheduler), or in a container that
// was paused. The system does not report a suspension; but a timed wait then ends long after its time.
//
// So every wait of weft that a Deadline may end is cut into short waits, each inside a TimedWait. A
// suspension counts once, however many threads notice it, and extends every Deadline (weft/base/clock.hpp).
// Thread-safe.
#pragma once

#include <algorithm>
#include <functional>

#include "weft/base/clock.hpp"
#include "weft/base/interrupt.hpp"

namespace weft {

/// A wake-up that is late by less than this is attributed to the machine's load.
inline constexpr Duration kLateWake = std::chrono::milliseconds(100);
/// The length of the short waits: with it nearly all of a suspension is noticed.
inline constexpr Duration kWaitPiece = std::chrono::milliseconds(200);
/// The length of the short waits in this thread; they are shorter if an Interrupt may end the wait.
inline Duration wait_piece() noexcept {
  constexpr Duration kShort = std::chrono::milliseconds(20);
  return Interruptible::current() == nullptr ? kWaitPiece : kShort;
}

/// Exists during one wait in the kernel. The thread has requested to be woken after `asked` at the latest.
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

/// While this object exists, every TimedWait of this thread begins with a call of `f`. So `f` is called
/// several times a second during every wait of the thread. `f` must not throw. The thread may hold locks
/// then, so `f` must not wait for a lock that other threads hold while they wait. Waits inside `f` do not
/// call `f`.
class CalledInWaits {
 public:
  explicit CalledInWaits(std::function<void()> f) noexcept;
  ~CalledInWaits();
  CalledInWaits(const CalledInWaits&) = delete;
  CalledInWaits& operator=(const CalledInWaits&) = delete;

 private:
  friend class TimedWait;
  const std::function<void()> f_;
  CalledInWaits* const outer_;  // the object before this one, which is not called while this object exists
};

/// Sleeps for `span` in short waits, so that a suspension is noticed.
void sleep_noticing(Duration span) noexcept;

}  // namespace weft
