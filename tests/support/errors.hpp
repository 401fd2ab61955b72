// Reading an error's text in a test.
#pragma once

#include <string>

#include "weft/base/error.hpp"

namespace weft::test {

/// The weft::Error that `call` throws, as "code: text"; "no error" where it returns. Other exceptions pass.
template <class Call>
std::string error_of(const Call& call) {
  try {
    static_cast<void>(call());
  } catch (const Error& e) {
    return std::string(name(e.code())) + ": " + e.what();
  }
  return "no error";
}

}  // namespace weft::test
