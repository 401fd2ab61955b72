// Checks and digests of what optimizers are given. Pure; private to nn and the layers above.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {

[[noreturn]] inline void bad_optimizer(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "optimizer: " + text);
}

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// Throws unless 0 <= value < below.
inline void check_option(std::string_view name, double value, double below) {
  if (!(value >= 0 && value < below))
    bad_optimizer(fmt::format("{} is {}; expected 0 or more{}", name, value,
                              std::isfinite(below) ? fmt::format(", and less than {}", below) : ""));
}

/// Throws unless the value is above 0 in f32: steps add it to roots that may be 0, and 0 / 0 is no number.
inline void check_eps(std::string_view name, double value) {
  if (!(static_cast<float>(value) > 0 && std::isfinite(static_cast<float>(value))))
    bad_optimizer(fmt::format("{} is {}; expected a finite number that is above 0 in f32", name, value));
}

/// Throws if `what` has a pattern that matches none of the parameters.
inline void expect_patterns_match(std::string_view what, const std::vector<std::string>& patterns,
                                  const std::vector<Parameter*>& parameters) {
  for (const std::string& pattern : patterns)
    if (std::ranges::none_of(parameters,
                             [&](const Parameter* p) { return matches_part(pattern, p->path()); }))
      bad_optimizer(fmt::format("{} has the pattern \"{}\", which matches no parameter", what, pattern));
}

/// Equal for equal groups.
inline std::uint64_t digest_of_groups(const std::vector<ParameterGroup>& groups) {
  Fnv1a hash;
  for (const ParameterGroup& g : groups) {
    for (const std::string& pattern : g.patterns) hash.add(pattern), hash.add(std::string_view("\n"));
    hash.add(std::bit_cast<std::uint64_t>(g.rate));
    hash.add(std::bit_cast<std::uint64_t>(g.weight_decay.value_or(-1.0)));
  }
  return hash.value;
}

}  // namespace weft
