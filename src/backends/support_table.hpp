// The contents of docs/support.md: what each transport does itself, what is composed, what is unsupported,
// and what each guarantees about failures. Made from known_traits() alone, so it is the same where no plug-in
// is present.
#pragma once

#include <string>

namespace weft {

/// The whole of docs/support.md. `weft doctor --tables` prints it; a test compares the file.
std::string support_tables();

}  // namespace weft
