// How anything here is verified and timed: the same for our programs and for the peers' in peers/. One thread
// per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::bench {

/// A case made ready: what is timed, and what says that it computes the right thing.
struct Prepared {
  std::function<void()> run;
  std::function<std::string()> verify;  ///< after `cycle` runs: empty, or what is wrong and what was expected
  /// Fresh inputs, spoilt outputs; if there is one, verified again at the end.
  std::function<void()> reset = {};
  int cycle = 1;  ///< runs until every buffer was used once
};

/// Makes ranks go the same way: returns what the first of them said. Collective over the ranks of a case.
using Agree = std::function<std::int64_t(std::int64_t mine)>;
/// For a case of one rank.
inline std::int64_t alone(std::int64_t mine) { return mine; }

struct Times {
  double median_us = 0, p99_us = 0;  ///< over the samples; a sample is the mean of `runs` runs in a row
  std::int64_t samples = 0, runs = 1;
};

/// Verifies, then times. Warms up for a fifth of `seconds` in blocks of doubling length, which also tell how
/// long a run takes. A sample is as many runs in a row as take about 10 us, at most 20, so that the clock's
/// own 30 ns do not matter. Samples are taken for `seconds`, at least 8. All these numbers are the first
/// rank's; ranks agree after every batch of samples whether to go on, and each batch begins with a run that
/// is not counted. If 8 runs take more than twice `seconds`, only the samples that fit into that time are
/// taken, at least one, and all runs but the first count. Throws std::runtime_error with verify()'s text
/// where a result is wrong.
Times measure(const Prepared& p, const Agree& agree, double seconds);

/// Sorts `us` and takes median (of an even number the lower one) and 99th percentile.
Times times_of(std::vector<double>& us);

}  // namespace weft::bench
