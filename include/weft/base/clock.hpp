// Time as weft uses it: one monotonic clock, durations in nanoseconds, and deadlines. The clock stands still
// while the machine sleeps (suspend to memory or disk). The clock runs while a process is stopped or its
// container is paused. suspended_time() measures that.
#pragma once

#include <chrono>

#include "weft/base/cxx20.hpp"

namespace weft {

using Clock = std::chrono::steady_clock;
using Duration = std::chrono::nanoseconds;

/// The total time for which this process has been suspended, as its waits have measured it. If a wait of weft
/// ends more than 0.1 s late, weft adds the delay to this time. It never decreases. Thread-safe.
Duration suspended_time() noexcept;
/// The part of suspended_time() that lies after `t`. Only the last 256 suspensions are kept. Thread-safe.
Duration suspended_since(Clock::time_point t) noexcept;

namespace detail {
/// The time at which a Deadline for `at`, which was made at `made`, passes in this thread. Suspensions move
/// it to a later time; an Interrupt (interrupt.hpp) moves it to an earlier time.
Clock::time_point end_of_wait(Clock::time_point made, Clock::time_point at) noexcept;
}  // namespace detail

/// A point in time at which a wait ends without success. Cheap to copy; `Deadline::never()` does not pass.
/// Time for which this process is suspended does not count: a suspension moves every Deadline that was made
/// before it to a later time. An Interrupt ends all Deadlines that the interrupted thread has made before.
class Deadline {
 public:
  /// If `d` is too long for the clock, the result never passes.
  static Deadline after(Duration d) {
    const auto now = Clock::now();
    return Deadline(now, d < Clock::time_point::max() - now ? now + d : Clock::time_point::max());
  }
  static Deadline at(Clock::time_point t) { return Deadline(Clock::now(), t); }
  static Deadline never() { return Deadline(Clock::time_point::max(), Clock::time_point::max()); }

  bool passed() const {
    if (at_ == Clock::time_point::max()) return false;
    const auto end = when();  // computed before the clock is read, so that an interrupt counts at once
    return Clock::now() >= end;
  }
  /// The time that is left, never negative. An hour if there is no limit.
  Duration left() const {
    if (at_ == Clock::time_point::max()) return std::chrono::hours(1);
    const auto end = when();
    const auto d = std::chrono::duration_cast<Duration>(end - Clock::now());
    return d < Duration::zero() ? Duration::zero() : d;
  }
  /// The time at which the deadline passes, as far as is known now. The clock's largest value if there is no
  /// limit.
  Clock::time_point when() const {
    return at_ == Clock::time_point::max() ? at_ : detail::end_of_wait(made_, at_);
  }

 private:
  Deadline(Clock::time_point made, Clock::time_point at) : at_(at), made_(made) {}
  Clock::time_point at_, made_;
};

}  // namespace weft
