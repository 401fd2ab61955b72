// Every environment variable that weft reads, in one table. Nothing else calls getenv for a name of weft's
// (tools/check_layers.py). docs/environment.md is made from the table.
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
  std::string_view type;      ///< "text", "integer", "path", or the values that it may have
  std::string_view fallback;  ///< the default if it is not set, in words or as a value
  std::string_view reader;    ///< the part that reads it
  std::string_view meaning;
  bool secret = false;  ///< its value is not for reports
};

/// All of them, in the order `weft doctor` prints them.
std::span<const Variable> variables();

/// The value, or nothing if it is unset or empty. `name` must be in the table (asserted).
std::optional<std::string> get(std::string_view name);

/// The value as an integer; throws bad_argument naming the variable, its text and the range.
std::optional<std::int64_t> get_int(std::string_view name, std::int64_t min, std::int64_t max);

/// True for "on" and where the variable is not set; false for "off". Throws bad_argument naming the variable
/// and its text.
bool is_on(std::string_view name);

/// A variable of the environment whose name begins with WEFT_ and that no table knows.
struct Unknown {
  std::string name;
  std::string_view nearest;  ///< the known name that differs in the fewest letters; empty: none is near
};

/// All of them. Names that begin with WEFT_TEST_ belong to tests and are left out. A Context logs a warning
/// for each, once per process.
std::vector<Unknown> unknown_variables();

/// How many letters must be added, removed or replaced to make `b` of `a` (Levenshtein's distance): for
/// texts that ask what was meant.
std::size_t letters_apart(std::string_view a, std::string_view b);

/// The page docs/environment.md.
std::string page();

}  // namespace weft::env
