// The division of a composed `avg`: elements divided by the number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/base/dtype.hpp"

namespace weft {

/// Whether a sum in this dtype can be divided afterwards: one of 16-bit floats would be rounded twice.
bool can_divide(DType dtype) noexcept;
/// Divides `count` elements by `n`, where can_divide(); integers truncate toward zero.
void divide(DType dtype, std::byte* data, std::int64_t count, int n) noexcept;

}  // namespace weft
