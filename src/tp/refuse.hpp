// The errors of parallelize(), for all its files. Callable from any thread.
#pragma once

#include <string>

#include "weft/base/error.hpp"

namespace weft {

[[noreturn]] inline void refuse_parallelize(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "parallelize: " + text);
}

}  // namespace weft
