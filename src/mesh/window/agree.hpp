// Whether the ranks that exchange windows mean the same ones. Compared once for each Window, at its first start.
#pragma once

#include <vector>

#include "mesh/window/program.hpp"

namespace weft::windows {

/// Collective among the ranks of plan.group: all of them throw mismatch where they differ in anything, naming what and two ranks with what
/// each of them gave: `window: rank 1 wants [[3, 9)] of dimension 0 for part 1, rank 0 [[4, 8)]; expected the same on all ranks`. The group
/// fails then. It is one collective of 8 bytes where all is the same.
void agree(const Window::Plan& plan, const std::vector<Form>& forms, Device device, bool adjoint);

/// Finds the links of the plan's group; collective as Links::of() is.
void find_links(Window::Plan& plan);

}  // namespace weft::windows
