// The errors of parallelize(), for all its files. Callable from any thread.
#pragma once

#include <string>

#include "weft/base/error.hpp"

namespace weft {

[[noreturn]] inline void refuse(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "parallelize: " + text);
}

}  // namespace weft
