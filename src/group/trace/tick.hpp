// The cheapest clock: a raw counter on the fast path, converted to nanoseconds only on request.
#pragma once

#include <cstdint>

#include "weft/base/clock.hpp"

namespace weft {

inline std::uint64_t tick() noexcept {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

/// Converts ticks to nanoseconds since this object was made, from readings of both clocks at that time and
/// now.
class TickScale {
 public:
  TickScale() : tick_(tick()), time_(Clock::now()) {}
  Clock::time_point began() const { return time_; }
  std::int64_t nanoseconds(std::uint64_t t) const {
    const std::uint64_t ticks = tick() - tick_;
    const auto passed =
        static_cast<double>(std::chrono::duration_cast<Duration>(Clock::now() - time_).count());
    const double each = ticks == 0 ? 1.0 : passed / static_cast<double>(ticks);
    return static_cast<std::int64_t>(static_cast<double>(t - tick_) * each);
  }

 private:
  std::uint64_t tick_;
  Clock::time_point time_;
};

}  // namespace weft
