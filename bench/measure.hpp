// Verifies and times every case, in weft's programs and in the peers' programs (peers/). One thread per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::bench {

/// A prepared case: the function that is timed, and the function that verifies its result.
struct Prepared {
  std::function<void()> run;
  /// After `cycle` runs: returns an empty string, or the wrong and the expected value.
  std::function<std::string()> verify;
  /// Writes fresh inputs and spoils the outputs. If this function is set, the case is verified again at the
  /// end.
  std::function<void()> reset = {};
  int cycle = 1;  ///< runs until every buffer was used once
};

/// Makes all ranks take the same branch: returns the first rank's value on every rank. Collective over the
/// ranks of a case.
using Agree = std::function<std::int64_t(std::int64_t mine)>;
/// The Agree of a case with a single rank.
inline std::int64_t alone(std::int64_t mine) { return mine; }

struct Times {
  double median_us = 0, p99_us = 0;  ///< over the samples; a sample is the mean of `runs` runs in a row
  std::int64_t samples = 0, runs = 1;
};

/// Verifies, then times. Warms up for a fifth of `seconds` in blocks of doubling length, which also show how
/// long a run takes. A sample is as many runs in a row as take about 10 us, at most 20, so that the clock's
/// own 30 ns do not matter. Takes samples for `seconds`, at least 8. The first rank's clock decides all these
/// numbers; ranks agree after every batch of samples whether to go on, and each batch begins with a run that
/// is not counted. If 8 runs take more than twice `seconds`, takes only the samples that fit into that time,
/// at least one, and counts all runs except the first. Throws std::runtime_error with verify()'s text if a
/// result is wrong.
Times measure(const Prepared& p, const Agree& agree, double seconds);

/// Sorts `us` and returns the median (for an even number the lower of the middle two) and the 99th
/// percentile.
Times times_of(std::vector<double>& us);

}  // namespace weft::bench
