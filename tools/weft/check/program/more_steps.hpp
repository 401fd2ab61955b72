// Steps that are no calls: windows, values that ranks must give alike, calls that overlap.
#pragma once

#include "program.hpp"

namespace weft::check {

/// Adds some to half of the programs, and lets the fault of some strike there. Drawn from a sequence of its
/// own: the calls of the program stay as they are. Also draws Program::window_beside and Program::ends.
void add_more_steps(Program& p, const Range& range);

}  // namespace weft::check
