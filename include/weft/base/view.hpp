// Borrowed memory: the argument of collectives and kernels. A view never owns its memory. The owner frees it,
// and must wait until the Work that uses the view is done.
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/base/device.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/shape.hpp"

namespace weft {

/// A typed, strided view of memory. Byte is std::byte or const std::byte.
template <class Byte>
struct BasicView {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  Shape shape{};
  Strides strides{};  ///< in elements; row-major if a helper below made the view

  std::int64_t count() const noexcept { return shape.count(); }
  std::int64_t bytes() const noexcept { return count() * size_bytes(dtype); }
  /// Whether the elements are row-major without gaps. An empty view is contiguous, whatever its strides.
  bool contiguous() const noexcept {
    std::int64_t expected = 1;
    bool dense = true, empty = false;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      dense &= shape[i] == 1 || strides[i] == expected;
      empty |= shape[i] == 0;
      if (!dense) continue;  // the product of the extents may be too large for its type
      expected *= shape[i];
    }
    return dense || empty;
  }
  /// The elements as T. Undefined unless dtype_of<T> == dtype and contiguous(). On a device, only kernels may
  /// use the pointer.
  template <class T>
  auto as() const noexcept {
    using U = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return std::span<U>(reinterpret_cast<U*>(data), static_cast<std::size_t>(count()));
  }

  operator BasicView<const std::byte>() const noexcept requires(!std::is_const_v<Byte>) {
    return {data, dtype, device, shape, strides};
  }
};

using TensorView = BasicView<std::byte>;             ///< converts to ConstTensorView
using ConstTensorView = BasicView<const std::byte>;  ///< does not convert to TensorView

/// `count` elements at `data`, one dimension. For memory of a device: `view(pointer, count,
/// Device{DeviceKind::cuda, 0})` or `view(pointer, count, parse_device("cuda:0"))`, where the driver
/// (cudaMalloc) returned the pointer. view() does not read the memory.
template <class T>
auto view(T* data, std::int64_t count, Device device = {}) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return BasicView<Byte>{reinterpret_cast<Byte*>(data), dtype_of<std::remove_const_t<T>>, device,
                         Dims::line(count), Dims::line(1)};
}
/// The elements of a row-major tensor at `data`.
template <class T>
auto view(T* data, const Shape& shape, Device device = {}) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return BasicView<Byte>{reinterpret_cast<Byte*>(data), dtype_of<std::remove_const_t<T>>, device, shape,
                         row_major(shape)};
}

/// A type that has a DType. `long long` and `unsigned long long` are i64 and u64, even if std::int64_t is
/// another type.
template <class T>
concept Element = std::same_as<T, double> || std::same_as<T, float> || std::same_as<T, f16> ||
    std::same_as<T, bf16> || std::same_as<T, std::int8_t> || std::same_as<T, std::int16_t> ||
    std::same_as<T, std::int32_t> || std::same_as<T, std::int64_t> || std::same_as<T, long long> ||
    std::same_as<T, std::uint8_t> || std::same_as<T, std::uint16_t> || std::same_as<T, std::uint32_t> ||
    std::same_as<T, std::uint64_t> || std::same_as<T, unsigned long long> || std::same_as<T, bool> ||
    std::same_as<T, f8e4m3> || std::same_as<T, f8e5m2> || ComplexOf<T, float> || ComplexOf<T, double>;

/// Elements that lie one after the other, with their address and number: std::vector, std::array, a C
/// array, std::span, std::string.
template <class R>
concept ContiguousRange = requires(R& r) {
  { std::begin(r) } -> std::contiguous_iterator;
  { std::size(r) } -> std::convertible_to<std::size_t>;
  std::data(r);
};
/// Whether the memory exists longer than the full expression: the argument is an lvalue, or a non-owning view
/// (std::span, std::string_view). R is the type of a forwarding reference: `T&` or `T`.
template <class R>
inline constexpr bool kOutlives = std::is_lvalue_reference_v<R>;
template <class T, std::size_t N>
inline constexpr bool kOutlives<std::span<T, N>> = true;
template <class T, std::size_t N>
inline constexpr bool kOutlives<const std::span<T, N>> = true;
template <class C>
inline constexpr bool kOutlives<std::basic_string_view<C>> = true;
template <class C>
inline constexpr bool kOutlives<const std::basic_string_view<C>> = true;

/// The type of a range's elements, const if the range is const: `const float` in a const std::vector<float>.
template <class R>
using ElementOf = std::remove_pointer_t<decltype(std::data(std::declval<R&>()))>;

/// The elements of a range in the host's memory: std::vector, std::array, a C array, std::span.
template <class R>
auto view(R&& range) noexcept requires ContiguousRange<std::remove_reference_t<R>> && kOutlives<R> &&
    Element<std::remove_const_t<ElementOf<R>>> {
  return view(std::data(range), static_cast<std::int64_t>(std::size(range)));
}
template <class R>
void view(R&& range) requires ContiguousRange<std::remove_reference_t<R>> &&
    (!kOutlives<R>) = delete;  // a temporary's memory is gone before the view is used

}  // namespace weft
