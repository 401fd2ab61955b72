// The errors of parallelize(), for all its files. Any thread may call them.
#pragma once

#include <string>

#include "weft/base/error.hpp"

namespace weft {

[[noreturn]] inline void refuse_parallelize(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "parallelize: " + text);
}

}  // namespace weft
