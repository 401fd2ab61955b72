#include "base/progress.hpp"

#include <algorithm>

namespace weft {

void ProgressList::add(Driven* d) {
  const std::lock_guard lock(mutex_);
  driven_.push_back(d);
  if (sleepers_ > 0) d->announce_sleep(true);
}

void ProgressList::remove(Driven* d) noexcept {
  const std::lock_guard lock(mutex_);
  driven_.erase(std::remove(driven_.begin(), driven_.end(), d), driven_.end());
}

bool ProgressList::drive_all() noexcept {
  const std::lock_guard lock(mutex_);
  bool moved = false;
  for (Driven* d : driven_) moved |= d->drive();
  return moved;
}

bool ProgressList::announce_sleep(bool asleep) noexcept {
  const std::lock_guard lock(mutex_);
  const bool first_or_last = asleep ? sleepers_++ == 0 : --sleepers_ == 0;
  bool silent = false;
  for (Driven* d : driven_) {
    silent |= !d->rings();
    if (first_or_last) d->announce_sleep(asleep);
  }
  return silent;
}

}  // namespace weft
