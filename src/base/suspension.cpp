#include "base/suspension.hpp"

#include <atomic>
#include <mutex>
#include <thread>

namespace weft {
namespace {

// Of the process, as its clock is: a suspension concerns all Contexts.
std::atomic<Duration::rep> suspended{0};
std::mutex counting;
Clock::time_point counted_until;  // guarded by counting

}  // namespace

Duration suspended_time() noexcept { return Duration(suspended.load(std::memory_order_acquire)); }

TimedWait::~TimedWait() {
  const auto now = Clock::now();
  if (now - due_ < kLateWake) return;
  const std::lock_guard lock(counting);
  const auto from = std::max(due_, counted_until);  // another thread has found the rest
  if (now <= from) return;
  suspended.fetch_add(std::chrono::duration_cast<Duration>(now - from).count(), std::memory_order_release);
  counted_until = now;
}

void sleep_noticing(Duration span) noexcept {
  for (const Deadline end = Deadline::after(span); !end.passed();) {
    const Duration piece = std::min(end.left(), kWaitPiece);
    const TimedWait wait(piece);
    std::this_thread::sleep_for(piece);
  }
}

}  // namespace weft
