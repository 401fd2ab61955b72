// Cases that are measured in turns, because a shared machine is sometimes slower for some tenths of a second:
// a ratio of two times then compares what ran close together. One thread per rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "measure.hpp"

namespace weft::bench {

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Measures several cases in turns.
struct TimedTurns {
  TimedTurns(std::vector<Prepared> all, const Agree& agree, double seconds) : us(all.size()) {
    constexpr int kTurns = 5;
    for (int turn = 0; turn < kTurns; ++turn)
      for (std::size_t i = 0; i < all.size(); ++i) {
        const Times t = measure(all[i], agree, seconds / kTurns);
        us[i].push_back(t.median_us);
        if (i > 0) continue;
        p99_us = std::max(p99_us, t.p99_us);
        samples += t.samples;
      }
  }
  /// Returns the median of of(turn) over all turns.
  template <class Of>
  double over_turns(const Of& of) const {
    std::vector<double> all;
    for (std::size_t turn = 0; turn < us[0].size(); ++turn) all.push_back(of(turn));
    return median(all);
  }
  std::vector<std::vector<double>> us;  ///< the median of each case in each turn
  double p99_us = 0;                    ///< the first case's 99th percentile in its worst turn
  std::int64_t samples = 0;
};

}  // namespace weft::bench
