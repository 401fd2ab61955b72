// Patterns for the paths of modules and parameters. Pure.
#pragma once

#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Whether `path` matches `pattern`, in which `*` stands for any characters except a dot: "layers.*.mlp".
bool matches(std::string_view pattern, std::string_view path) noexcept;
/// Whether the pattern matches the path, or the path of a module above it: "layers.0" matches
/// "layers.0.mlp.up.weight", too.
bool matches_part(std::string_view pattern, std::string_view path) noexcept;

}  // namespace weft
