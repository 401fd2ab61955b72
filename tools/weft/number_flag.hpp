// Flags whose values are numbers with a fraction.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <limits>
#include <string>

namespace weft {

/// Like CLI::Range, but NaN is refused, too. Range accepts it, since all comparisons with NaN are false.
inline CLI::Validator number_between(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
        return fmt::format("Value {} not in range {} to {}", text, low, high);
      },
      fmt::format("FLOAT in [{} - {}]", low, high));
}

/// `low` or more; any number that is not NaN.
inline CLI::Validator number_at_least(double low) {
  return number_between(low, std::numeric_limits<double>::max());
}

}  // namespace weft
