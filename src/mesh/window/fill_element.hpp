// The element that fills a window beyond an end. No state. Any thread may call it.
#pragma once

#include <array>
#include <cstddef>

#include "weft/base/dtype.hpp"

namespace weft::windows {

/// `value` as an element of that dtype, rounded, in the first size_bytes(dtype) bytes. Complex: the real
/// part.
std::array<std::byte, 16> element_of(double value, DType dtype) noexcept;

}  // namespace weft::windows
