// The harness of the benchmarks: a case is a row of a table; registering, verifying, timing and reporting are
// the same for all. A program makes one Bench, adds its rows and runs it. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/backends/process_group.hpp"

namespace weft::bench {

/// A case made ready: what is timed, and what says that it computes the right thing.
struct Prepared {
  std::function<void()> run;
  std::function<std::string()> verify;  ///< after one run: empty, or what is wrong
};

struct Case {
  std::string name;                   ///< "all_reduce/f32/shared/2097152"
  std::int64_t bytes = 0;             ///< what the algorithm bandwidth counts, per run
  double bus_factor = 1;              ///< bus bandwidth = algorithm bandwidth x bus_factor
  std::function<Prepared()> prepare;  ///< owns the buffers through what it returns; they go with it
  std::function<bool(bool)> agree = [](bool more) {
    return more;
  };  ///< cases of several ranks: the first one's `more`
};

/// Every case is verified, warmed up and then timed in samples (plan.hpp). Reported: median (also as Time)
/// and 99th percentile over the samples and the bandwidths at the median. A wrong result ends the program: no
/// number without a right answer.
class Bench {
 public:
  /// Takes the --benchmark_… flags out of the arguments. `report` false: runs everything, prints nothing
  /// (every rank but one).
  Bench(int& argc, char** argv, bool report = true);
  void add(Case c);
  /// Runs the rows that --benchmark_filter names.
  void run();

 private:
  bool report_;
};

/// Runs body(rank, store) in n processes of this host, which meet in `store`; returns 0 where all bodies did.
/// Call it before the program has any thread. The first process that fails ends the others.
int run_processes(int n, const std::function<int(int rank, std::shared_ptr<Store> store)>& body);

}  // namespace weft::bench
