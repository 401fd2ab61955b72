// Steps that are no calls: windows, values that must be equal on all ranks, calls that overlap.
#pragma once

#include "program.hpp"

namespace weft::check {

/// Adds some of them to half of the programs, and lets the fault of some programs strike there. They are
/// drawn from a separate sequence, so that the calls of the program stay as they are. Also draws
/// Program::window_beside and Program::ends.
void add_more_steps(Program& p, const Range& range);

}  // namespace weft::check
