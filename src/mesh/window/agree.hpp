// Checks that the ranks that exchange windows gave the same arguments. The arguments are compared once for
// each Window, at its first start.
#pragma once

#include <vector>

#include "mesh/window/program.hpp"

namespace weft::windows {

/// Collective among the ranks of plan.group. If the ranks differ in any argument, all of them throw mismatch,
/// naming the argument and two ranks with their values: `window: what part 1 wants of dimension 0 is [[3, 9)]
/// on rank 1 and [[4, 8)] on rank 0; expected the same on all ranks [y rank 1]`. The group fails then. If all
/// is the same, it takes one collective.
void agree(const Window::Plan& plan, const std::vector<Form>& forms, Device device, Way way);

}  // namespace weft::windows
