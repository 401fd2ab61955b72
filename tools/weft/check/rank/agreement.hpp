// Steps in which all ranks give a value alike, and steps whose calls overlap. Both end before the next step
// begins.
#pragma once

#include <string>

#include "program.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

/// Does what the step says, with the others of the group. Returns what is wrong with what came of it; empty:
/// nothing. Throws what it throws: mismatch, where a rank gives another value.
std::string agree(const Step& s, ProcessGroup& group);

/// The same for the values of gradients and checkpoints.
std::string agree_on_saved(const Step& s, ProcessGroup& group);

/// Submits calls that overlap, which must be refused. Returns what is wrong; empty: nothing. Throws any other
/// error.
std::string overlap(const Step& s, ProcessGroup& group, Duration deadline);

}  // namespace weft::check
