// How a thread waits for something that happens in a group: it drives the group, then all groups of its rank;
// it spins, yields and sleeps (host/threads/idling.hpp). Any thread.
#pragma once

#include <algorithm>

#include "host/progress_engine.hpp"

namespace weft {

/// True: `done()`; false: `limit` has passed. `drive()` takes the next steps of the own group (true:
/// something moved); `settled()` drives it once more before the thread sleeps (Driven::settled). Once `done`
/// is true nothing else is touched: the group may be gone.
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
    // Nothing moves in the own group: drive the rank's other groups, too, now and then while spinning, always
    // afterwards.
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
    // While this thread announced its sleep another one may have owned the group, and taken the step that
    // matters: then nobody rings for it, so it looks itself or stays awake.
    progress.sleep(std::min<Duration>(kSleep, limit.left()), idling.asleep(),
                   [&] { return done() || limit.passed() || !settled() || done(); });
  }
}

}  // namespace weft
