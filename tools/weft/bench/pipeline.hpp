// `weft bench pipeline`.
#pragma once

#include "options.hpp"

namespace weft::bench {

/// Becomes pipeline_bench, which prints its table and draws --plot itself. Throws bad_argument for options of
/// other benchmarks, and `system` if the program cannot be started.
int bench_pipeline(const Options& o);

}  // namespace weft::bench
