// The dtypes of is_floating(), for texts. Callable from any thread.
#pragma once

#include <string_view>

namespace weft {

constexpr std::string_view kFloatingNames = "f64, f32, bf16 or f16";

}  // namespace weft
