// The function by which all of weft divides elements evenly.
#pragma once

#include <cstdint>

#include "weft/base/cxx20.hpp"

namespace weft {

/// A part of a dimension, or of any row of elements.
struct Chunk {
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

/// Part `index` of `size` elements that are cut into `parts` parts. The first size % parts parts hold one
/// element more than the others.
constexpr Chunk chunk_of(std::int64_t size, int parts, int index) noexcept {
  const std::int64_t least = size / parts, longer = size % parts;
  return {index * least + (index < longer ? index : longer), least + (index < longer ? 1 : 0)};
}

}  // namespace weft
