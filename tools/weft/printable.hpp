// Words from a file, for a terminal.
#pragma once

#include "base/text/printable.hpp"

namespace weft::tools {

using weft::printable;

}  // namespace weft::tools
