// What docs/support.md says: which transport does what itself, what is composed, what cannot be done, and
// what each promises about failures. From known_traits() alone, so it is the same where no plug-in is
// present.
#pragma once

#include <string>

namespace weft {

/// The whole of docs/support.md. `weft doctor --tables` prints it; a test compares the file.
std::string support_tables();

}  // namespace weft
