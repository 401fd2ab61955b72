// Words and numbers in texts that others wrote.
#pragma once

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace weft {

/// Converts all of `text` to an integer. Returns nothing if the text is empty, has other characters (even a
/// space or a plus sign), or does not fit the type.
template <class Integer>
std::optional<Integer> parse_integer(std::string_view text) noexcept {
  Integer value{};
  const char* const end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, value);
  if (failed != std::errc() || stop != end) return std::nullopt;
  return value;
}

/// Removes and returns the first word of a text in which single spaces separate words.
inline std::string_view next_word(std::string_view& text) noexcept {
  const std::string_view word = text.substr(0, text.find(' '));
  text.remove_prefix(std::min(word.size() + 1, text.size()));
  return word;
}

/// Like parse_number(), but also returns nothing if the integer is not between min and max.
template <class Integer>
std::optional<Integer> next_integer(std::string_view& text, Integer min, Integer max) noexcept {
  const auto value = parse_integer<Integer>(next_word(text));
  return value && *value >= min && *value <= max ? value : std::nullopt;
}

}  // namespace weft
