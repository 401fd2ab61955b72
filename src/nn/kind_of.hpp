// The name of a module's class, for texts. Any thread may call it. Private to nn and the layers above.
#pragma once

#include <cxxabi.h>

#include <cstdlib>
#include <string>
#include <typeinfo>

#include "weft/nn/module.hpp"

namespace weft {

/// "RMSNorm" for a weft::RMSNorm
inline std::string kind_of(const Module& module) {
  char* const demangled = abi::__cxa_demangle(typeid(module).name(), nullptr, nullptr, nullptr);
  std::string kind = demangled ? demangled : typeid(module).name();
  std::free(demangled);
  const std::size_t colon = kind.rfind(':');
  return colon == std::string::npos ? kind : kind.substr(colon + 1);
}

}  // namespace weft
