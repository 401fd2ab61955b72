// Reading errors in a test.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "weft/base/error.hpp"

namespace weft::test {

/// The Error that `f` throws. If it throws none, an Error of code system, "no error was thrown", for the
/// checks that follow. This function and those below pass on other exceptions.
template <class F>
Error error_of(const F& f) {
  try {
    static_cast<void>(f());
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorCode::system, "no error was thrown");
}

/// The Error that `f` throws, as "code: text"; "no error" if `f` returns.
template <class F>
std::string error_text(const F& f) {
  try {
    static_cast<void>(f());
  } catch (const Error& e) {
    return std::string(name(e.code())) + ": " + e.what();
  }
  return "no error";
}

/// The text of the Error, after a check of its code.
template <class F>
std::string error_text(ErrorCode code, const F& f) {
  try {
    static_cast<void>(f());
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << name(e.code()) << ": " << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

/// Runs `f`, which must throw an Error of that code whose text is exactly `text`.
template <class F>
void expect_error(ErrorCode code, const std::string& text, const F& f) {
  EXPECT_EQ(error_text(f), std::string(name(code)) + ": " + text);
}

/// The ranks that it names, for a comparison with a list.
inline std::vector<int> ranks_of(const Error& e) { return {e.ranks().begin(), e.ranks().end()}; }

}  // namespace weft::test
