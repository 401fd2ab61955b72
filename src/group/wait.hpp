// How a thread waits for an event in a group: it drives the group, then all groups of its rank; it spins,
// yields and sleeps (host/threads/idling.hpp). Any thread.
#pragma once

#include <algorithm>

#include "host/progress_engine.hpp"

namespace weft {

/// Returns true if `done()`, and false if `limit` has passed. `drive()` takes the next steps of the thread's
/// group (true: something moved); `settled()` drives the group once more before the thread sleeps
/// (Driven::settled). Once `done` is true nothing else is accessed, because the group may be gone.
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
      if (limit.passed()) return done();  // a long call moves all the time
      continue;
    }
    // Nothing moves in this group: drive the rank's other groups, too, now and then while spinning, and
    // always afterwards.
    if ((!idling.spins() || idling.polls() % 16 == 15) && progress.drive_all()) {
      idling.moved();
      if (limit.passed()) return done();  // other groups may move all the time
      continue;
    }
    if (idling.spin()) {
      if (idling.polls() % 8 == 0 && limit.passed()) return done();
      continue;
    }
    if (limit.passed()) return done();
    if (idling.yield()) continue;
    // While this thread announced its sleep, another thread may have owned the group, and taken the awaited
    // step. Then nobody rings for that step, so this thread looks itself or stays awake.
    progress.sleep(std::min<Duration>(kSleep, limit.left()), idling.asleep(),
                   [&] { return done() || limit.passed() || !settled() || done(); });
  }
}

}  // namespace weft
