// Every environment variable weft reads, in one table: name, default, meaning. Nothing else calls getenv.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace weft::env {

struct Variable {
  std::string_view name;
  std::string_view fallback;  ///< what holds where it is not set, in words or as a value
  std::string_view meaning;
  bool secret = false;  ///< its value is not for reports
};

/// All of them, in the order `weft doctor` prints them.
std::span<const Variable> variables();

/// The value, or nothing where it is unset or empty. `name` must be in the table (asserted).
std::optional<std::string> get(std::string_view name);

/// The value as an integer; throws bad_argument naming the variable, its text and the range.
std::optional<std::int64_t> get_int(std::string_view name, std::int64_t min, std::int64_t max);

/// on (where it is not set, too) or off; throws bad_argument naming the variable and its text.
bool is_on(std::string_view name);

}  // namespace weft::env
