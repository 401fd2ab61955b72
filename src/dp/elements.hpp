// The elements of a gradient, whatever its floating dtype. Private to dp.
#pragma once

#include <cstdint>
#include <span>

#include "weft/base/view.hpp"

namespace weft::dp {

/// Calls use(std::span<T>) with the elements of `v` as what they are: double, float, bf16 or f16.
template <class Use>
void with_elements(const TensorView& v, const Use& use) {
  switch (v.dtype) {
    case DType::f64: return use(v.as<double>());
    case DType::f32: return use(v.as<float>());
    case DType::bf16: return use(v.as<bf16>());
    case DType::f16: return use(v.as<f16>());
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean:
    case DType::c64:
    case DType::c128: return;  // check_gradients() refused it
  }
}

template <class T>
double to_double(T x) noexcept {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>)
    return static_cast<double>(x);
  else
    return static_cast<double>(static_cast<float>(x));
}
template <class T>
T from_double(double x) noexcept {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>)
    return static_cast<T>(x);
  else
    return T(static_cast<float>(x));
}

}  // namespace weft::dp
