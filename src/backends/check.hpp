// Every argument check of a call, before it is numbered. Pure; any thread.
#pragma once

#include <string>

#include "weft/backends/backend.hpp"
#include "weft/backends/call.hpp"

namespace weft {

/// Throws bad_argument or unsupported naming the one argument that is wrong; `tail` ends every message
/// (`[group "tp", rank 3]`).
void check(const Call& call, const Traits& traits, int rank, int size, std::string_view group);

}  // namespace weft
