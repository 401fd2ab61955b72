// A flag for an object that one thread at a time owns. An owner does not block, except in the kernel, which
// may wait for a peer's page (host/peers/kernel_copy.hpp). So other threads wait for the owner a bounded
// time.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

#include "host/threads/idling.hpp"
#include "weft/base/clock.hpp"

namespace weft {

/// If an owner holds its flag longer than this, it is stuck in the kernel. A thread that fails the group
/// loses nothing if it does not wait, so it waits a shorter time.
inline constexpr auto kStuck = std::chrono::seconds(2);
inline constexpr auto kStuckInFailure = std::chrono::milliseconds(200);

class OwnerFlag {
 public:
  bool try_own() noexcept {
    return !owned_.load(std::memory_order_relaxed) && !owned_.exchange(true, std::memory_order_acquire);
  }
  void disown() noexcept { owned_.store(false, std::memory_order_release); }
  /// Call it after try_own() has failed. Spins (if `spin` allows it) and yields. Returns false if the flag
  /// was not obtained within `limit`, or if `stop()` returns that waiting is useless.
  template <class Stop>
  [[gnu::cold]] bool contend(bool spin, Deadline limit, const Stop& stop) noexcept {
    for (int spins = 0; !try_own(); ++spins) {
      if (stop()) return false;
      if (spin && spins < kSpins) {
        pause();
      } else {
        if (limit.passed()) return false;
        sched_yield();
      }
    }
    return true;
  }

 private:
  std::atomic<bool> owned_{false};
};

}  // namespace weft
