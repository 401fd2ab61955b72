// How a thread waits for something that happens in a group: it drives the group, then all groups of its rank;
// it spins, yields and sleeps. Any thread.
#pragma once

#include <sched.h>

#include <algorithm>

#include "host/progress_engine.hpp"

namespace weft {

/// True: `done()`; false: `limit` has passed. `drive()` takes the next steps of the own group (true:
/// something moved); `settled()` drives it once more before the thread sleeps (Driven::settled). Once `done`
/// is true nothing else is touched: the group may be gone.
template <class Done, class Drive, class Settled>
bool wait_until(ProgressEngine& progress, bool spin, Deadline limit, const Done& done, const Drive& drive,
                const Settled& settled) noexcept {
  const int spins = spin ? kSpins : 0;
  const ProgressEngine::Waiter waiter(progress);
  Clock::time_point asleep_since;
  for (int idle = 0;;) {
    if (done()) return true;
    if (drive()) {
      idle = 0;
      if (limit.passed()) return done();  // a long call moves all the time
      continue;
    }
    // Nothing moves in the own group: drive the rank's other groups, too, now and then while spinning, always
    // afterwards.
    if ((idle < spins ? idle % 16 == 15 : true) && progress.drive_all()) {
      idle = 0;
      if (limit.passed()) return done();  // other groups may move all the time
      continue;
    }
    ++idle;
    if (idle < spins) {
      pause();
      if (idle % 8 == 0 && limit.passed()) return done();
    } else {
      if (limit.passed()) return done();
      if (idle < spins + kYields) {
        sched_yield();
      } else {
        // While this thread announced its sleep another one may have owned the group, and taken the step that
        // matters: then nobody rings for it, so it looks itself or stays awake.
        const auto now = Clock::now();
        if (idle == spins + kYields) asleep_since = now;
        progress.sleep(std::min<Duration>(kSleep, limit.left()), now - asleep_since,
                       [&] { return done() || limit.passed() || !settled() || done(); });
      }
    }
  }
}

}  // namespace weft
