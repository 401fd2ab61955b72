// Checks whether the parts of a tensor make up the whole tensor. Pure arithmetic. Any thread may call it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "checkpoint/index/index.hpp"

namespace weft {

/// An element that is in no part, or in several parts.
struct NotCovered {
  Dims element;
  std::int64_t parts = 0;
};

/// Returns the first such element in row-major order. Nothing if each element is in exactly one part. Every
/// part must lie within `whole`. Takes time n log n for n parts, times 2 for each dimension in which they
/// differ.
std::optional<NotCovered> first_not_covered_once(const Shape& whole, std::span<const CheckpointPart> parts);

}  // namespace weft
