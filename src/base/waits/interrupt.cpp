#include "weft/base/interrupt.hpp"

#include <algorithm>
#include <utility>

namespace weft {
namespace {

thread_local Interruptible* here = nullptr;

}  // namespace

Interruptible::Interruptible(const Interrupt& interrupt) noexcept
    : interrupt_(interrupt), outer_(std::exchange(here, this)) {}

Interruptible::~Interruptible() { here = outer_; }

Interruptible* Interruptible::current() noexcept { return here; }

// If the thread has made a Deadline after the raise, but before it first noticed the raise, the Deadline
// counts as made before the raise, so that no wait is missed.
Clock::time_point detail::end_of_wait(Clock::time_point made, Clock::time_point at) noexcept {
  if (here != nullptr && here->interrupt_.raised()) {
    if (!here->interrupted()) here->since_ = Clock::now();
    if (made <= here->since_) return std::min(at, here->since_);
  }
  return at + suspended_since(made);
}

}  // namespace weft
