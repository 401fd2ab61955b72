// Lists of dtypes that several layers accept, and their names for texts. Callable from any thread.
#pragma once

#include <string_view>

#include "weft/base/dtype.hpp"

namespace weft {

/// The names of is_floating(): what gradients are.
constexpr std::string_view kFloatingNames = "f64, f32, bf16 or f16";

/// The dtypes that weights are stored in and layers compute with.
constexpr bool is_weight_dtype(DType t) noexcept { return t == DType::f32 || t == DType::bf16; }
constexpr std::string_view kWeightDTypeNames = "f32 or bf16";

}  // namespace weft
