// Which parameters are trained at which step. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/nn/parameter.hpp"

namespace weft {

/// From step `step` on, the parameters that `pattern` matches are frozen, or trained.
struct FreezeRule {
  std::int64_t step = 0;  ///< from 0
  /// A pattern for paths of parameters, or of modules with all parameters below them
  /// (weft/nn/path_pattern.hpp).
  std::string pattern;
  bool frozen = true;
  bool operator==(const FreezeRule&) const = default;
};

/// A list of rules, as a plain value. At a step, the last rule counts that has begun and matches the
/// parameter: rules of a later step come after those of an earlier one, and rules of one step have the order
/// in which they were given. A parameter without such a rule stays as it is.
///
///     FreezeSchedule({{0, "*", true}, {0, "output_head", false}, {100, "layers.3", false}})
class FreezeSchedule {
 public:
  FreezeSchedule() = default;
  /// Throws bad_argument for a negative step, and for a pattern that is empty or has a blank, ':' or ','.
  FreezeSchedule(std::vector<FreezeRule> rules);
  /// Reads to_string()'s form: "0:frozen:layers.*,100:trained:layers.3"; blanks around commas are allowed.
  /// Throws bad_argument that quotes the part that is wrong.
  static FreezeSchedule from_text(std::string_view text);

  /// The rules by step, in their order within a step; equal rules in a row are one rule.
  const std::vector<FreezeRule>& rules() const noexcept { return rules_; }
  bool empty() const noexcept { return rules_.empty(); }
  /// Whether the parameter with this path is frozen at `step`; nothing if no rule says so.
  std::optional<bool> frozen(std::string_view path, std::int64_t step) const noexcept;
  /// Throws bad_argument for a pattern that matches none of the parameters.
  void check(std::span<Parameter* const> parameters) const;
  bool operator==(const FreezeSchedule&) const = default;

 private:
  std::vector<FreezeRule> rules_;
};

/// One text for equal schedules: "0:frozen:layers.*,100:trained:layers.3"; empty without rules.
std::string to_string(const FreezeSchedule& schedule);

}  // namespace weft
