// How the mesh layer refuses a layout. No state; any thread.
#pragma once

#include <string>

#include "weft/base/error.hpp"

namespace weft {

[[noreturn]] inline void bad_layout(const std::string& text) { throw Error(ErrorCode::layout, text); }

}  // namespace weft
