// Memory of a plan's exchanges in flight: what one of them writes no other one may take. Used by the plan's thread.
#pragma once

#include "mesh/window/judged.hpp"
#include "mesh/window/program.hpp"

namespace weft::windows {

/// Whether one of them is of that program.
bool in_flight(const Window::Plan& plan, const Window::Plan::Program& program) noexcept;

/// Throws bad_argument, naming the field, where an exchange of these fields would write what one in flight reads or writes, or read what one
/// writes. Each may read what others read. Nothing where the plan's group has failed: the exchange itself tells why.
void expect_free(const Window::Plan& plan, const Window::Plan::Program& program, const Judged& fields);

}  // namespace weft::windows
