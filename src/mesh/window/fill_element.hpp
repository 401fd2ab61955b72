// The element that fills a window beyond an end. No state; any thread.
#pragma once

#include <array>
#include <cstddef>

#include "weft/base/dtype.hpp"

namespace weft::windows {

/// `value` as an element of that dtype, rounded: its first size_bytes(dtype) bytes. Complex: the real part.
std::array<std::byte, 16> element_of(double value, DType dtype) noexcept;

}  // namespace weft::windows
