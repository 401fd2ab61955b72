// A table of all environment variables that weft reads. Only this part of weft calls getenv for weft's names
// (tools/check_layers.py checks that). docs/environment.md is generated from the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/cxx20.hpp"

namespace weft::env {

struct Variable {
  std::string_view name;
  std::string_view type;      ///< "text", "integer", "path", or the values that the variable may have
  std::string_view fallback;  ///< the default if the variable is not set, in words or as a value
  std::string_view reader;    ///< the part of weft that reads the variable
  std::string_view meaning;
  bool secret = false;  ///< reports must not show the value of this variable
};

/// All variables, in the order in which `weft doctor` prints them.
std::span<const Variable> variables();

/// The value, or nothing if the variable is unset or empty. `name` must be in the table (asserted).
std::optional<std::string> get(std::string_view name);

/// The value as an integer. Throws bad_argument naming the variable, its text and the range.
std::optional<std::int64_t> get_int(std::string_view name, std::int64_t min, std::int64_t max);

/// Returns true if the variable is "on" or not set, and false if it is "off". Throws bad_argument naming the
/// variable and its text.
bool is_on(std::string_view name);

/// A variable of the environment whose name begins with WEFT_ and is in no table.
struct Unknown {
  std::string name;
  /// the known name that differs in the fewest letters; empty if no known name is similar
  std::string_view nearest;
};

/// All unknown variables, except variables that begin with WEFT_TEST_, which belong to tests. A Context logs
/// a warning for each of them, once per process.
std::vector<Unknown> unknown_variables();

/// The number of letters to add, remove or replace to turn `a` into `b` (Levenshtein distance). Error texts
/// suggest the name that the user meant by it.
std::size_t letters_apart(std::string_view a, std::string_view b);

/// The text of the page docs/environment.md.
std::string page();

}  // namespace weft::env
