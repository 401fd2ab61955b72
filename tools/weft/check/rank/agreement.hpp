// Steps in which all ranks must pass equal values, and steps whose calls overlap. Both kinds of steps end
// before the next step begins.
#pragma once

#include <string>

#include "program.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

/// Performs the step, with the other ranks of the group. Returns a description of the wrong result; empty:
/// the result is right. Passes on the exceptions of the call: mismatch if a rank gave another value.
std::string agree(const Step& s, ProcessGroup& group);

/// Like agree(), for the values of gradients and checkpoints.
std::string agree_on_saved(const Step& s, ProcessGroup& group);

/// Submits calls that overlap, which must be refused. Returns a description of what is wrong; empty: nothing.
/// Throws any other error.
std::string overlap(const Step& s, ProcessGroup& group, Duration deadline);

}  // namespace weft::check
