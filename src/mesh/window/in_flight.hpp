// Memory of a plan's exchanges in flight: memory that one of them writes is closed to the others. The
// plan's thread uses it.
#pragma once

#include "mesh/window/judged.hpp"
#include "mesh/window/program.hpp"

namespace weft::windows {

/// Whether one of them is of that program.
bool in_flight(const Window::Plan& plan, const Window::Plan::Program& program) noexcept;

/// Throws bad_argument, naming the field, if an exchange of these fields would write memory that one in
/// flight reads or writes, or read memory that one writes. Several exchanges may read the same memory. Does
/// nothing if the plan's group has failed: the exchange itself reports the cause.
void expect_free(const Window::Plan& plan, const Window::Plan::Program& program, const Judged& fields);

}  // namespace weft::windows
