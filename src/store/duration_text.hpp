// Durations in texts. Pure functions; any thread.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <string>

#include "weft/base/clock.hpp"

namespace weft {

/// "5.0 s", or "50 ms" below a second.
inline std::string shown_duration(Duration d) {
  const double seconds = std::chrono::duration<double>(d).count();
  return seconds < 0.9995 ? fmt::format("{:.0f} ms", seconds * 1e3) : fmt::format("{:.1f} s", seconds);
}
/// "300 s", "0.25 s": for deadlines that the user set.
inline std::string shown_seconds(Duration d, int digits = 3) {
  return fmt::format("{:.{}g} s", std::chrono::duration<double>(d).count(), digits);
}

}  // namespace weft
