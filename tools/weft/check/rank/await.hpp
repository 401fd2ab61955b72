// Waiting for entries that other ranks of a program write in its report.
#pragma once

#include <chrono>
#include <thread>

#include "weft/base/clock.hpp"

namespace weft::check {

/// Returns false if it was not ready within the limit.
template <class Ready>
bool await(const Ready& ready, Duration limit) {
  for (const Deadline deadline = Deadline::after(limit); !ready();) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  return true;
}

}  // namespace weft::check
