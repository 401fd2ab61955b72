// Intended mistakes, for tests of other tests (tests/tools/check_test.cpp and others). A build with
// WEFT_MUTATIONS makes the mistake that the variable WEFT_MUTANT names. In other builds it is a constant
// false.
#pragma once

#if defined(WEFT_MUTATIONS)
#include <cstdlib>
#include <cstring>

namespace weft {
inline bool mutant(const char* name) noexcept {
  static const char* const chosen = std::getenv("WEFT_MUTANT");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}
}  // namespace weft
#define WEFT_MUTANT(name) weft::mutant(name)
#else
#define WEFT_MUTANT(name) false
#endif
