// The origin of the values whose gradients, or parts, are moved. It is a digest that ranks compare with the
// calls of buckets and shards, at no cost, as they compare the layouts of a redistribution. Private to dp.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "backends/layout_tag.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {

/// The tag of such a call. 0: nothing is known, or nothing is compared.
inline int history_tag(std::uint64_t history) noexcept { return history == 0 ? 0 : layout_tag(history); }

/// Returns whether the text of a mismatch, `rank 1 called X [call 4], rank 0 X [call 4]`, shows two equal
/// calls. Then the calls differ in the tag, which the text does not show.
inline bool differs_in_tag(std::string_view text) {
  constexpr std::string_view kCalled = " called ", kEnd = " [call ", kNext = "], rank ";
  const std::size_t called = text.find(kCalled), end = text.find(kEnd, called), next = text.find(kNext, end);
  if (next == std::string_view::npos) return false;
  const std::string_view one = text.substr(called + kCalled.size(), end - called - kCalled.size());
  const std::size_t other = text.find(' ', next + kNext.size()) + 1;
  return text.substr(other, one.size() + kEnd.size()) == std::string(one).append(kEnd);
}

/// Returns the result of f(). If f() throws a mismatch of two calls that differ in this tag alone, rewrites
/// its text so that it says what differs.
template <class F>
auto in_history_words(std::string_view who, const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const Error& e) {
    std::string text = e.what();
    if (e.code() != ErrorCode::mismatch || !differs_in_tag(text)) throw;
    for (const std::string_view what : {"; their layouts differ", "; their counts differ"})
      if (const std::size_t at = text.find(what); at != std::string::npos) text.erase(at, what.size());
    throw Error(
        Failure{.code = e.code(),
                .text = fmt::format(
                    "{}: ranks took the last step of their optimizers with other options, another learning "
                    "rate or another number; expected the same on all: {}",
                    who, text),
                .op = e.op(),
                .call = e.call(),
                .ranks = std::vector<int>(e.ranks().begin(), e.ranks().end())},
        e.quiesced());
  }
}

}  // namespace weft::dp
