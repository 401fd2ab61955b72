#include "backends/compose/divide.hpp"

#include <type_traits>

namespace weft {
namespace {

template <class T>
void divide_as(std::byte* data, std::int64_t count, int n) noexcept {
  using Wide = std::conditional_t<std::is_floating_point_v<T>, T,
                                  std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
  T* const x = reinterpret_cast<T*>(data);
  for (std::int64_t i = 0; i < count; ++i)
    x[i] = static_cast<T>(static_cast<Wide>(x[i]) / static_cast<Wide>(n));
}

}  // namespace

void divide(DType dtype, std::byte* data, std::int64_t count, int n) noexcept {
  switch (dtype) {
    case DType::f64: return divide_as<double>(data, count, n);
    case DType::f32: return divide_as<float>(data, count, n);
    case DType::i8: return divide_as<std::int8_t>(data, count, n);
    case DType::i16: return divide_as<std::int16_t>(data, count, n);
    case DType::i32: return divide_as<std::int32_t>(data, count, n);
    case DType::i64: return divide_as<std::int64_t>(data, count, n);
    case DType::u8: return divide_as<std::uint8_t>(data, count, n);
    case DType::u16: return divide_as<std::uint16_t>(data, count, n);
    case DType::u32: return divide_as<std::uint32_t>(data, count, n);
    case DType::u64: return divide_as<std::uint64_t>(data, count, n);
    case DType::f16:
    case DType::bf16:
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return;  // see divides_after()
  }
}

}  // namespace weft
