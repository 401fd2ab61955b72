// Lists of dtypes that several layers accept, and their names for texts. Any thread.
#pragma once

#include <string_view>

#include "weft/base/dtype.hpp"

namespace weft {

/// The names of the dtypes of is_floating(), which gradients may have.
constexpr std::string_view kFloatingNames = "f64, f32, bf16 or f16";

/// Whether weights may be stored in this dtype, and layers compute with it.
constexpr bool is_weight_dtype(DType t) noexcept { return t == DType::f32 || t == DType::bf16; }
constexpr std::string_view kWeightDTypeNames = "f32 or bf16";

}  // namespace weft
