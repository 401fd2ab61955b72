// The division of a composed `avg`: elements divided by the number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/base/dtype.hpp"

namespace weft {

/// Divides `count` elements by `n`, where divides_after() holds for the dtype; integers truncate toward zero.
void divide(DType dtype, std::byte* data, std::int64_t count, int n) noexcept;

}  // namespace weft
