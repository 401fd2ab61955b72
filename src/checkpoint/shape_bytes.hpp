// Sizes of shapes that a file declares.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace weft {

/// Returns the size in bytes. Returns nothing if the product of the non-zero extents exceeds 2^63 - 1,
/// because then strides cannot be computed.
inline std::optional<std::int64_t> shape_bytes(std::span<const std::int64_t> shape, int element_bytes) {
  std::int64_t bytes = element_bytes;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    empty |= extent == 0;
    if (extent != 0 && __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return empty ? 0 : bytes;
}

}  // namespace weft
