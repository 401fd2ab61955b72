// How a thread waits for an event in a group. It drives the group, then all groups of its rank. It spins,
// yields and sleeps (host/threads/idling.hpp). Any thread may use it.
#pragma once

#include <algorithm>

#include "host/progress_engine.hpp"

namespace weft {

/// Waits until `done()` returns true. Returns false if `limit` has passed before. `drive()` takes the next
/// steps of the thread's group (true: something moved). `settled()` drives the group once more before the
/// thread sleeps (Driven::settled). When `done()` has returned true, nothing else is accessed, because the
/// group may be destroyed.
template <class Done, class Drive, class Settled>
bool wait_until(ProgressEngine& progress, bool spin, Deadline limit, const Done& done, const Drive& drive,
                const Settled& settled) noexcept {
  Idling idling(progress.spin_limit(), spin);
  const ProgressEngine::Waiter waiter(progress);
  for (;;) {
    if (done()) {
      idling.moved();
      return true;
    }
    if (drive()) {
      idling.moved();
      if (limit.passed()) return done();  // checked here, too, because a long call moves all the time
      continue;
    }
    // If nothing moves in this group, drive the rank's other groups, too: from time to time while this thread
    // spins, and always afterwards.
    if ((!idling.spins() || idling.polls() % 16 == 15) && progress.drive_all()) {
      idling.moved();
      if (limit.passed()) return done();  // checked here, too, because other groups may move all the time
      continue;
    }
    if (idling.spin()) {
      if (idling.polls() % 8 == 0 && limit.passed()) return done();
      continue;
    }
    if (limit.passed()) return done();
    if (idling.yield()) continue;
    // While this thread announced its sleep, another thread may have owned the group, and taken the awaited
    // step. No peer rings for that step again, so this thread checks itself, or stays awake.
    progress.sleep(std::min<Duration>(kSleep, limit.left()), idling.asleep(),
                   [&] { return done() || limit.passed() || !settled() || done(); });
  }
}

}  // namespace weft
