#include "base/waits/suspension.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

namespace weft {
namespace {

// One state for the process, because there is one clock. A suspension concerns all Contexts.
struct Gap {
  Clock::time_point from, until;
};
std::atomic<Duration::rep> suspended{0};
std::atomic<Clock::rep> counted_until{0};  // the end of the last gap
std::mutex counting;
std::array<Gap, 256> gaps;  // the last gaps, disjoint; guarded by `counting`
std::size_t found = 0;      // the number of gaps in all; guarded by `counting`

thread_local CalledInWaits* called_in_waits = nullptr;

Clock::time_point last_end() noexcept {
  return Clock::time_point(Clock::duration(counted_until.load(std::memory_order_acquire)));
}

}  // namespace

Duration suspended_time() noexcept { return Duration(suspended.load(std::memory_order_acquire)); }

// The first thread to resume may make a Deadline before another thread has noticed the gap. This gap lies
// before the Deadline, so it does not count for it.
Duration suspended_since(Clock::time_point t) noexcept {
  if (last_end() <= t) return Duration::zero();
  const std::lock_guard lock(counting);
  Duration sum{};
  for (std::size_t i = 0; i < std::min(found, gaps.size()); ++i)
    if (gaps[i].until > t) sum += gaps[i].until - std::max(gaps[i].from, t);
  return sum;
}

CalledInWaits::CalledInWaits(std::function<void()> f) noexcept
    : f_(std::move(f)), outer_(std::exchange(called_in_waits, this)) {}

CalledInWaits::~CalledInWaits() { called_in_waits = outer_; }

TimedWait::TimedWait(Duration asked) noexcept {
  if (CalledInWaits* const called = std::exchange(called_in_waits, nullptr)) {
    called->f_();
    called_in_waits = called;
  }
  due_ = Clock::now() + std::min<Duration>(asked, kLongest);
}

TimedWait::~TimedWait() {
  const auto now = Clock::now();
  if (now - due_ < kLateWake) return;
  const std::lock_guard lock(counting);
  const auto from = std::max(due_, last_end());  // another thread has already counted the time before
  if (now <= from) return;
  gaps[found++ % gaps.size()] = {from, now};
  suspended.fetch_add(std::chrono::duration_cast<Duration>(now - from).count(), std::memory_order_release);
  counted_until.store(now.time_since_epoch().count(), std::memory_order_release);
}

void sleep_noticing(Duration span) noexcept {
  for (const Deadline end = Deadline::after(span); !end.passed();) {
    const Duration piece = std::min(end.left(), wait_piece());
    const TimedWait wait(piece);
    std::this_thread::sleep_for(piece);
  }
}

}  // namespace weft
