// The memory of a plan's exchanges in flight. If one of them writes some memory, no other exchange may use
// this memory. The plan's thread uses it.
#pragma once

#include "mesh/window/judged.hpp"
#include "mesh/window/program.hpp"

namespace weft::windows {

/// Whether one of the exchanges in flight is of that program.
bool in_flight(const Window::Plan& plan, const Window::Plan::Program& program) noexcept;

/// Throws bad_argument, naming the field, if an exchange of these fields would write memory that an exchange
/// in flight reads or writes, or read memory that one writes. Several exchanges may read the same memory.
/// Does nothing if the plan's group has failed: the exchange itself reports the cause.
void expect_free(const Window::Plan& plan, const Window::Plan::Program& program, const Judged& fields);

}  // namespace weft::windows
