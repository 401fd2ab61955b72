// Borrowed memory: what collectives and kernels take. A view never owns; whoever allocated frees, and only
// after the Work that uses the view is done.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "weft/base/device.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/shape.hpp"

namespace weft {

/// A typed, strided window on memory. Byte is std::byte or const std::byte.
template <class Byte>
struct BasicView {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  Shape shape{};
  Strides strides{};  ///< elements; row-major where made by the helpers below

  std::int64_t count() const noexcept { return shape.count(); }
  std::int64_t bytes() const noexcept { return count() * size_bytes(dtype); }
  /// Row-major without gaps. No elements have no gaps, whatever their strides.
  bool contiguous() const noexcept {
    std::int64_t expected = 1;
    bool dense = true, empty = false;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      dense &= shape[i] == 1 || strides[i] == expected;
      empty |= shape[i] == 0;
      if (!dense) continue;  // the product need not fit
      expected *= shape[i];
    }
    return dense || empty;
  }
  /// The elements as T; undefined unless dtype_of<T> == dtype and contiguous(). On a device: for kernels alone.
  template <class T>
  auto as() const noexcept {
    using U = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return std::span<U>(reinterpret_cast<U*>(data), static_cast<std::size_t>(count()));
  }

  operator BasicView<const std::byte>() const noexcept requires(!std::is_const_v<Byte>) {
    return {data, dtype, device, shape, strides};
  }
};

using TensorView = BasicView<std::byte>;             ///< converts to the next,
using ConstTensorView = BasicView<const std::byte>;  ///< never back

/// `count` elements at `data`, one dimension.
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
/// A view of host memory.
template <class T>
auto view(std::span<T> s) noexcept {
  return view(s.data(), static_cast<std::int64_t>(s.size()));
}
template <class T>
auto view(std::vector<T>& v) noexcept {
  return view(v.data(), static_cast<std::int64_t>(v.size()));
}
template <class T>
auto view(const std::vector<T>& v) noexcept {
  return view(v.data(), static_cast<std::int64_t>(v.size()));
}
template <class T>
void view(const std::vector<T>&&) = delete;  // a temporary's memory is gone before the view is used

}  // namespace weft
