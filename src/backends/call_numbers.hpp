// Call numbers in texts. If calls are composed, numbers of the user's calls have the mark kUsersCall.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "weft/backends/call_record.hpp"

namespace weft {

/// Returns the text with each call number replaced by `said(number)`.
template <class Said>
std::string renumbered(std::string text, const Said& said) {
  constexpr std::string_view kCall = "call ";
  for (std::size_t at = 0; (at = text.find(kCall, at)) != std::string::npos;) {
    at += kCall.size();
    std::uint64_t number = 0;
    const char* const from = text.data() + at;
    const auto [end, error] = std::from_chars(from, text.data() + text.size(), number);
    if (error != std::errc{}) continue;
    const std::string words = std::to_string(said(number));
    text.replace(at, static_cast<std::size_t>(end - from), words);
    at += words.size();
  }
  return text;
}

/// Returns the text without the marks on the user's numbers.
inline std::string unmarked(std::string text) {
  return renumbered(std::move(text), [](std::uint64_t number) { return number & ~kUsersCall; });
}

}  // namespace weft
