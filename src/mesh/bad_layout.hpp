// The errors by which the mesh layer refuses a layout. The functions have no state; any thread may call them.
#pragma once

#include <string>

#include "weft/base/error.hpp"

namespace weft {

[[noreturn]] inline void bad_layout(const std::string& text) { throw Error(ErrorCode::layout, text); }

}  // namespace weft
