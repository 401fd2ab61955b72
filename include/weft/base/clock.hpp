// Time as weft uses it: one monotonic clock, durations in nanoseconds, and deadlines.
#pragma once

#include <chrono>

namespace weft {

using Clock = std::chrono::steady_clock;
using Duration = std::chrono::nanoseconds;

/// A point in time after which a wait gives up. Cheap to copy; `Deadline::never()` does not pass.
class Deadline {
 public:
  /// A duration that leads past the end of the clock: never.
  static Deadline after(Duration d) {
    const auto now = Clock::now();
    return Deadline(d < Clock::time_point::max() - now ? now + d : Clock::time_point::max());
  }
  static Deadline at(Clock::time_point t) { return Deadline(t); }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool passed() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }
  /// Time left, never negative; an hour where there is no limit.
  Duration left() const {
    if (at_ == Clock::time_point::max()) return std::chrono::hours(1);
    const auto d = std::chrono::duration_cast<Duration>(at_ - Clock::now());
    return d < Duration::zero() ? Duration::zero() : d;
  }
  Clock::time_point when() const { return at_; }

 private:
  explicit Deadline(Clock::time_point t) : at_(t) {}
  Clock::time_point at_;
};

}  // namespace weft
