// Numbers in texts that others wrote.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace weft {

/// The integer that is the whole of `text`, or nothing: also where it is empty, has a space or a plus sign,
/// or does not fit.
template <class Integer>
std::optional<Integer> parse_integer(std::string_view text) noexcept {
  Integer value{};
  const char* const end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, value);
  if (failed != std::errc() || stop != end) return std::nullopt;
  return value;
}

}  // namespace weft
