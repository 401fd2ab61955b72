// How long a waiting thread spins before it yields its core, and the adaptation of this time. Any thread.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>

#include "weft/base/clock.hpp"

namespace weft {

/// How often an idle waiting thread polls at most before it reads a clock, yields and sleeps. A poll is some
/// 10 to 50 nanoseconds, so spinning lasts at most some 20 to 100 µs, and yielding about as long as a few
/// scheduler turns.
inline constexpr int kSpins = 2000;
inline constexpr int kYields = 200;

inline void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// The number of polls for which a rank should spin: kSpins, unless the ranks for which it waits run on its
/// own core.
///
/// Ranks that are not bound may share a core while another core idles, for milliseconds, or for as long as a
/// third program keeps that other core busy. Then the time that a waiting rank spins is lost to the rank for
/// which it waits. A call takes as long as all its waits spin: hundreds of microseconds instead of ten. weft
/// recognises this as follows. Nothing arrived while this thread spun. It yielded, others ran for a while and
/// gave the core back before their time slice was over, and then the awaited event was there. Each such wait
/// divides the number of polls. Each wait that ends with nobody else on the core doubles the number again. A
/// program that computes keeps the core for a complete slice, so such a wait does not count. Next to such a
/// program a rank should spin, because every yield costs a slice.
class SpinLimit {
 public:
  static constexpr int kLeast = 16;
  /// A yield takes less than this if nobody else runs.
  static constexpr Duration kAlone = std::chrono::nanoseconds(1500);
  static constexpr Duration kSlice = std::chrono::microseconds(500);  ///< schedulers' time slices are longer

  int polls() const noexcept { return polls_.load(std::memory_order_relaxed); }
  /// Call this if the awaited event arrived while the thread spun, without a yield.
  void came_while_spinning() noexcept {
    if (const int now = polls(); now < kSpins) [[unlikely]]
      set(std::min(2 * now, kSpins));
  }
  /// Call this if the event arrived in a yield of that length.
  void came_in_yield(Duration length) noexcept {
    if (length <= kAlone) return came_while_spinning();
    if (length < kSlice) set(std::max(polls() / 4, kLeast));
  }

 private:
  void set(int polls) noexcept { polls_.store(polls, std::memory_order_relaxed); }
  std::atomic<int> polls_{kSpins};  // waiting threads of one rank may overwrite each other's changes
};

/// One waiting thread. After each poll without success it calls spin(). If that returns false, it calls
/// yield(). If that returns false, it sleeps.
class Idling {
 public:
  explicit Idling(SpinLimit& limit, bool spins = true) noexcept : limit_(limit), spins_(spins) {}
  void may_spin(bool spins) noexcept { spins_ = spins; }
  /// Call this when something has moved, or when the wait is over.
  void moved() noexcept {
    if (polls_ == 0) return;
    if (spins_ && yields_ == 0) limit_.came_while_spinning();
    if (spins_ && in_yield_ > Duration::zero()) limit_.came_in_yield(in_yield_);
    restart();
  }
  /// Resets the object, as if there had been no wait yet.
  void restart() noexcept {
    polls_ = yields_ = 0;
    in_yield_ = {};
  }
  /// The number of polls without success since something moved.
  int polls() const noexcept { return polls_; }
  bool spins() const noexcept { return spins_ && polls_ < limit_.polls(); }
  /// Call this after a poll without success. Returns true if the thread has paused, and false if it has
  /// spun long enough.
  bool spin() noexcept {
    ++polls_;
    if (!spins()) return false;
    pause();
    return true;
  }
  /// Returns true if the thread has yielded the core, and false if it has yielded often enough.
  bool yield() noexcept {
    if (yields_ >= kYields) {
      in_yield_ = {};  // later events arrive during a sleep
      return false;
    }
    ++yields_;
    const auto before = spins_ ? Clock::now() : Clock::time_point();
    sched_yield();
    if (spins_) in_yield_ = Clock::now() - before;
    return true;
  }
  /// The time since yield() first returned false.
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
