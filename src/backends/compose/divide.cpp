#include "backends/compose/divide.hpp"

#include <type_traits>

namespace weft {
namespace {

using Divide = void (*)(std::byte*, std::int64_t, int) noexcept;

template <class T>
void divide_as(std::byte* data, std::int64_t count, int n) noexcept {
  using Wide = std::conditional_t<std::is_floating_point_v<T>, T,
                                  std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
  T* const x = reinterpret_cast<T*>(data);
  for (std::int64_t i = 0; i < count; ++i)
    x[i] = static_cast<T>(static_cast<Wide>(x[i]) / static_cast<Wide>(n));
}

// Null: a sum in this dtype is rounded, and would be rounded again.
Divide divide_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64: return divide_as<double>;
    case DType::f32: return divide_as<float>;
    case DType::i8: return divide_as<std::int8_t>;
    case DType::i16: return divide_as<std::int16_t>;
    case DType::i32: return divide_as<std::int32_t>;
    case DType::i64: return divide_as<std::int64_t>;
    case DType::u8: return divide_as<std::uint8_t>;
    case DType::u16: return divide_as<std::uint16_t>;
    case DType::u32: return divide_as<std::uint32_t>;
    case DType::u64: return divide_as<std::uint64_t>;
    case DType::f16:
    case DType::bf16:
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: break;
  }
  return nullptr;
}

}  // namespace

bool can_divide(DType dtype) noexcept { return divide_of(dtype) != nullptr; }

void divide(DType dtype, std::byte* data, std::int64_t count, int n) noexcept {
  if (const Divide divide_these = divide_of(dtype)) divide_these(data, count, n);
}

}  // namespace weft
