// The contents of docs/support.md: the operations that each transport performs natively, those that are
// composed, those that are unsupported, and each transport's guarantees about failures. The table is made
// from known_traits() alone, so it is the same even if no plug-in is present.
#pragma once

#include <string>

namespace weft {

/// The full text of docs/support.md. `weft doctor --tables` prints it; a test compares the file with it.
std::string support_tables();

}  // namespace weft
