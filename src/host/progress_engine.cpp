#include "host/progress_engine.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "base/signals.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr unsigned kAnswerEvery = 16;  // a waiting rank answers roll-calls at one of so many drives

}  // namespace

// If the helper thread was stuck in a group when the program released that group, the group stays and has not
// ended the thread.
ProgressEngine::~ProgressEngine() {
  if (!helper_.joinable()) return;
  ending_.store(true, std::memory_order_seq_cst);
  doorbell_.ring();
  helper_.join();
}

void ProgressEngine::add(Driven* d) {
  const std::lock_guard lock(mutex_);
  driven_.push_back(d);
  if (sleepers_ > 0) d->announce_sleep(true);
}

void ProgressEngine::remove(Driven* d) noexcept {
  const std::lock_guard lock(mutex_);
  driven_.erase(std::remove(driven_.begin(), driven_.end(), d), driven_.end());
}

// Returns whether this thread has got the list. If not, another thread has had the list for very long. The
// kernel must be waiting for a peer's page in a step of that thread. Until that thread continues, no other
// thread waits for the list again.
bool ProgressEngine::take_list(std::unique_lock<std::mutex>& lock) noexcept {
  constexpr auto kPatience = std::chrono::milliseconds(100);
  if (lock.try_lock()) [[likely]] {
    if (stuck_.load(std::memory_order_relaxed)) stuck_.store(false, std::memory_order_relaxed);
    return true;
  }
  if (stuck_.load(std::memory_order_relaxed)) return false;
  for (const Deadline limit = Deadline::after(kPatience); !lock.try_lock();) {
    if (limit.passed()) {
      stuck_.store(true, std::memory_order_relaxed);
      return false;
    }
    sched_yield();
  }
  return true;
}

bool ProgressEngine::drive_all(const Driven* but) noexcept {
  bool moved = false;
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!take_list(lock)) return false;
    for (Driven* d : driven_)
      if (d != but) moved |= d->drive();
    if (++drives_ % kAnswerEvery == 0)
      for (Driven* d : driven_) d->answer();
  }
  log_.flush();
  run_due();
  return moved;
}

void ProgressEngine::answer() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (Driven* d : driven_) d->answer();
}

void ProgressEngine::watch_all() noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!take_list(lock)) return;
  for (Driven* d : driven_) d->watch();
}

bool ProgressEngine::announce_sleep(bool asleep, bool& announced) noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  announced = take_list(lock);
  if (!announced) {
    if (!asleep) awake_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  const int before = sleepers_;
  sleepers_ += (asleep ? 1 : -1) - awake_.exchange(0, std::memory_order_relaxed);
  const bool first_or_last = (before == 0) != (sleepers_ == 0);
  bool silent = false;
  for (Driven* d : driven_) {
    silent |= !d->rings();
    if (first_or_last) d->announce_sleep(asleep);
    // answers before it sleeps; a rank that asks later sees that this rank sleeps, and rings
    if (asleep) d->answer();
  }
  return silent;
}

void ProgressEngine::run_later(std::shared_ptr<Later> what) noexcept {
  const std::lock_guard lock(due_mutex_);
  Later* const added = what.get();
  (first_due_ ? last_due_->next : first_due_) = std::move(what);
  last_due_ = added;
  due_.store(true, std::memory_order_relaxed);
}

void ProgressEngine::run_due_now() noexcept {
  for (;;) {
    std::shared_ptr<Later> what;
    {
      const std::lock_guard lock(due_mutex_);
      if (!first_due_) return;
      what = std::move(first_due_);
      first_due_ = std::move(what->next);
      if (!first_due_) due_.store(false, std::memory_order_relaxed);
    }
    what->run();
  }
}

// ---- the helper thread ----

void ProgressEngine::add_helped(bool spin) {
  const std::lock_guard lock(helper_mutex_);
  if (helped_ == 0) {
    ending_.store(false);
    helper_ = start_thread("Progress::thread", [this] { help(); });
    ::pthread_setname_np(helper_.native_handle(), "weft-progress");
  }
  ++helped_;
  quiet_ += spin ? 0 : 1;
  spin_.store(quiet_ == 0);
}

void ProgressEngine::remove_helped(bool spin) noexcept {
  const std::lock_guard lock(helper_mutex_);
  quiet_ -= spin ? 0 : 1;
  spin_.store(quiet_ == 0);
  if (--helped_ > 0) return;
  ending_.store(true, std::memory_order_seq_cst);
  doorbell_.ring();
  helper_.join();
}

bool ProgressEngine::drive_helped() noexcept {
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    for (Driven* d : driven_)
      if (d->helped()) moved |= d->drive();
    // This thread answers for this rank's other waiting threads, which find the list locked.
    if (++drives_ % kAnswerEvery == 0)
      for (Driven* d : driven_) d->answer();
  }
  log_.flush();
  run_due();
  return moved;
}

bool ProgressEngine::settled_helped() noexcept {
  const std::lock_guard lock(mutex_);
  const bool settled =
      std::all_of(driven_.begin(), driven_.end(), [](Driven* d) { return !d->helped() || d->settled(); });
  for (Driven* d : driven_)
    if (d->helped()) d->watch();
  return settled;
}

void ProgressEngine::help() noexcept {
  // The helper sets `resting_`, then checks whether there is work, then sleeps. A thread with new work first
  // adds it and then reads `resting_`. So one of the two threads sees the other. The helper reads the
  // doorbell's word before all these steps. A ring in between changes the word, and then the helper does not
  // fall asleep.
  Idling idling(spin_limit_);
  while (!ending_.load(std::memory_order_seq_cst)) {
    if (!has_to_help()) {
      const std::uint32_t seen = doorbell_.read();
      resting_.store(true, std::memory_order_seq_cst);
      if (!has_to_help() && !ending_.load(std::memory_order_seq_cst))
        doorbell_.sleep(seen, std::chrono::hours(1));
      resting_.store(false, std::memory_order_seq_cst);
      idling.restart();
      continue;
    }
    if (drive_helped()) {
      idling.moved();
      continue;
    }
    idling.may_spin(spin_.load(std::memory_order_relaxed));
    if (idling.spin() || idling.yield()) continue;
    resting_.store(true, std::memory_order_seq_cst);
    sleep_unless(
        [&] { return !has_to_help() || ending_.load(std::memory_order_seq_cst) || !settled_helped(); },
        kSleep, idling.asleep());
    resting_.store(false, std::memory_order_seq_cst);
  }
}

}  // namespace weft
