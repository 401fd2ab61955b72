// A program that `weft run --elastic` starts (docs/elastic.md) learns how often it was started, and reports
// its steps. Any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "weft/base/cxx20.hpp"

namespace weft {

/// How often `weft run --elastic` has started this job anew (WEFT_RESTART_COUNT): 0 in the first start.
/// Nothing without --elastic. A program of a start above 0 goes on from its newest checkpoint. Throws
/// bad_argument if the variable is no number of 0 or more.
std::optional<int> restart_count();

/// Notifies `weft run --elastic` that the program has taken so many steps, counted from the begin of the
/// run, not of this start. The launcher names the step when a rank fails, and ends a job whose starts get no
/// further. train() calls it; a program with its own loop calls it on one rank, after each step. Never
/// blocks, and does nothing without --elastic.
void report_step(std::int64_t steps) noexcept;

}  // namespace weft
