// The text of an exception of any type: foreign functions (a plug-in, a user's Store) may throw anything.
#pragma once

#include <cxxabi.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <typeinfo>

namespace weft {

/// May be called only in a catch block. Returns the text of the exception that the block handles. If the
/// exception has no text, returns its type: "an exception of type int".
inline std::string caught_words() {
  try {
    throw;
  } catch (const std::exception& e) {
    if (const char* const text = e.what(); text != nullptr && *text != '\0') return text;
  } catch (...) {}
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "an exception of another language";
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, &status), &std::free);
  return std::string("an exception of type ") + (readable ? readable.get() : type->name());
}

}  // namespace weft
