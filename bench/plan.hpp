// How a case is timed: the same for our programs and for the peers' in peers/.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace weft::bench {

/// Runs in a row that make a sample, so that the clock's own 30 ns do not matter. A function of the size
/// alone: ranks that run the same table stay in step.
inline int runs_per_sample(std::int64_t bytes) {
  return static_cast<int>(std::clamp(10000 / (200 + static_cast<double>(bytes) * 0.15), 1.0, 20.0));
}

struct Times {
  double median_us, p99_us;
  std::size_t samples;
};

/// Times run() in samples for half a second, after a tenth of a second to warm up, but at least 48 samples.
/// After every 16 samples agree(more) makes the ranks go on or stop together; it returns what the first rank
/// said.
template <class Run, class Agree>
Times time_samples(std::int64_t bytes, const Run& run, const Agree& agree) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
  };
  const int runs = runs_per_sample(bytes);
  const auto begin = Clock::now();
  std::vector<double> us;
  bool warm = false;
  do {
    if (!warm && seconds_since(begin) > 0.1) us.clear(), warm = true;
    run();  // after agree(), which may have cooled something
    for (int sample = 0; sample < 16; ++sample) {
      const auto start = Clock::now();
      for (int k = 0; k < runs; ++k) run();
      us.push_back(seconds_since(start) * 1e6 / runs);
    }
  } while (agree(seconds_since(begin) < 0.6 || !warm || us.size() < 48));
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100], us.size()};
}

}  // namespace weft::bench
