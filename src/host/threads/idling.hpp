// How long a thread that waits spins before it yields its core, and what it has learnt about that. Any
// thread.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>

#include "weft/base/clock.hpp"

namespace weft {

/// How often an idle waiter polls at most before it reads a clock, yields and sleeps. A poll is some 10 to 50
/// nanoseconds, so spinning lasts at most some 20 to 100 µs, and yielding about as long as a few scheduler
/// turns.
inline constexpr int kSpins = 2000;
inline constexpr int kYields = 200;

inline void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// How many polls are worth spinning for one rank: kSpins, unless the ranks that it waits for run on its own
/// core.
///
/// Ranks that are not bound may share a core while another core idles, for milliseconds, or for as long as a
/// third program keeps that one busy. Then all that a waiter spins is taken from the rank that it waits for,
/// and a call takes as long as all its waits spin: hundreds of microseconds in place of ten. It is
/// recognised so: nothing came while this thread spun; it yielded, others ran for a while, gave the core back
/// before their time slice was over, and what it waited for is there. Each such wait divides the number of
/// polls; each wait that ends with nobody else on the core doubles it again. A program that computes keeps
/// the core for a whole slice, so it does not count: to spin beside it is right, since every yield costs a
/// slice.
class SpinLimit {
 public:
  static constexpr int kLeast = 16;
  /// A yield takes less if nobody else runs.
  static constexpr Duration kAlone = std::chrono::nanoseconds(1500);
  static constexpr Duration kSlice = std::chrono::microseconds(500);  ///< schedulers' time slices are longer

  int polls() const noexcept { return polls_.load(std::memory_order_relaxed); }
  /// The event that a thread waited for came while it spun, without a yield.
  void came_while_spinning() noexcept {
    if (const int now = polls(); now < kSpins) [[unlikely]]
      set(std::min(2 * now, kSpins));
  }
  /// It came in a yield of that length.
  void came_in_yield(Duration length) noexcept {
    if (length <= kAlone) return came_while_spinning();
    if (length < kSlice) set(std::max(polls() / 4, kLeast));
  }

 private:
  void set(int polls) noexcept { polls_.store(polls, std::memory_order_relaxed); }
  std::atomic<int> polls_{kSpins};  // threads of a rank that wait at once may lose each other's changes
};

/// One thread that waits: after each poll without success it calls spin(), where that says no yield(), and
/// where that says no it sleeps.
class Idling {
 public:
  explicit Idling(SpinLimit& limit, bool spins = true) noexcept : limit_(limit), spins_(spins) {}
  void may_spin(bool spins) noexcept { spins_ = spins; }
  /// Something has moved, or the wait is over.
  void moved() noexcept {
    if (polls_ == 0) return;
    if (spins_ && yields_ == 0) limit_.came_while_spinning();
    if (spins_ && in_yield_ > Duration::zero()) limit_.came_in_yield(in_yield_);
    restart();
  }
  /// As if nothing had been waited for yet.
  void restart() noexcept {
    polls_ = yields_ = 0;
    in_yield_ = {};
  }
  /// Polls without success since something moved.
  int polls() const noexcept { return polls_; }
  bool spins() const noexcept { return spins_ && polls_ < limit_.polls(); }
  /// A poll was without success. True: it has paused; false: this thread has spun long enough.
  bool spin() noexcept {
    ++polls_;
    if (!spins()) return false;
    pause();
    return true;
  }
  /// True: it has yielded the core; false: this thread has yielded often enough.
  bool yield() noexcept {
    if (yields_ >= kYields) {
      in_yield_ = {};  // what comes from now on comes in a sleep
      return false;
    }
    ++yields_;
    const auto before = spins_ ? Clock::now() : Clock::time_point();
    sched_yield();
    if (spins_) in_yield_ = Clock::now() - before;
    return true;
  }
  /// Since yield() first said no.
  Duration asleep() noexcept {
    const auto now = Clock::now();
    if (yields_ == kYields) {
      ++yields_;
      asleep_since_ = now;
    }
    return now - asleep_since_;
  }

 private:
  SpinLimit& limit_;
  bool spins_;
  int polls_ = 0, yields_ = 0;
  Duration in_yield_{};  // the length of the yield before the last poll
  Clock::time_point asleep_since_;
};

}  // namespace weft
