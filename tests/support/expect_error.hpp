// A check of an error's code and of its text.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "weft/base/error.hpp"

namespace weft::test {

/// Runs `f`, which must throw an Error of that code whose text is exactly `text`.
template <class F>
void expect_error(ErrorCode code, const std::string& text, F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.what(), text);
    EXPECT_EQ(e.code(), code) << "code is " << name(e.code());
    return;
  }
  ADD_FAILURE() << "nothing was thrown; expected: " << text;
}

}  // namespace weft::test
