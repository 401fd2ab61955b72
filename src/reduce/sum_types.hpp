// Types of elements that can be added, for code that is generated once for each type.
#pragma once

#include <cstdint>

#include "weft/base/dtype.hpp"

namespace weft {

// Calls see(T{}) for the type of an element that can be added.
template <class See>
inline void with_sum_type(DType dtype, const See& see) {
  switch (dtype) {
    case DType::f64: return see(double{});
    case DType::f32: return see(float{});
    case DType::f16: return see(f16{});
    case DType::bf16: return see(bf16{});
    case DType::i8: return see(std::int8_t{});
    case DType::i16: return see(std::int16_t{});
    case DType::i32: return see(std::int32_t{});
    case DType::i64: return see(std::int64_t{});
    case DType::u8: return see(std::uint8_t{});
    case DType::u16: return see(std::uint16_t{});
    case DType::u32: return see(std::uint32_t{});
    case DType::u64: return see(std::uint64_t{});
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return;
  }
}

}  // namespace weft
