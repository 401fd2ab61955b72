// Whether the parts of a tensor make up its whole. Pure arithmetic; callable from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "checkpoint/index/index.hpp"

namespace weft {

/// An element that is in none of the parts, or in several.
struct NotCovered {
  Dims element;
  std::int64_t parts = 0;
};

/// The first such element in row-major order; nothing if each is in exactly one part. Every part lies
/// within `whole`. Takes n log n of the parts, times 2 for each dimension in which they differ.
std::optional<NotCovered> first_not_covered_once(const Shape& whole, std::span<const CheckpointPart> parts);

}  // namespace weft
