// The elements of a gradient, whatever its floating dtype. Private to dp.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "dp/loops.hpp"
#include "weft/base/view.hpp"

namespace weft::dp {

/// Calls use(std::span<T>) with the elements of `v` in their own type: double, float, bf16 or f16.
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

constexpr std::size_t kWidened = 512;  // elements that are widened to floats at a time

/// Calls use(values) with all elements in order: f64 and f32 unchanged, other dtypes as floats in pieces of
/// kWidened.
template <class T, class Use>
void for_floats(std::span<const T> values, const Use& use) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    use(values);
  } else {
    float wide[kWidened];
    for (std::size_t at = 0; at < values.size(); at += kWidened) {
      const std::size_t n = values.size() - at < kWidened ? values.size() - at : kWidened;
      loops::widen(values.data() + at, wide, n);
      use(std::span<const float>(wide, n));
    }
  }
}

/// Multiplies every element by `factor`, in f64, and rounds once to a float and then to the element's type.
template <class T>
void scale_elements(std::span<T> values, double factor) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    loops::multiply(values.data(), values.size(), factor);
  } else {
    float wide[kWidened];
    for (std::size_t at = 0; at < values.size(); at += kWidened) {
      const std::size_t n = values.size() - at < kWidened ? values.size() - at : kWidened;
      loops::widen(values.data() + at, wide, n);
      loops::multiply(wide, n, factor);
      loops::narrow(wide, values.data() + at, n);
    }
  }
}

/// Elements [begin, begin + count) of a contiguous view, as a view of one dimension.
inline TensorView part_of(const TensorView& v, std::int64_t begin, std::int64_t count) noexcept {
  return {v.data + begin * size_bytes(v.dtype), v.dtype, v.device, Dims::line(count), Dims::line(1)};
}

}  // namespace weft::dp
