// What a collective needs to know about memory: where it begins, how many elements of which dtype, on which
// device. A buffer borrows its memory, as a view does, but has no shape and no strides.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

#include "weft/base/device.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/view.hpp"

namespace weft {

/// The reason why a view cannot be a buffer: its shape and strides, packed, so that a buffer stays a value
/// that is copied in a few instructions. Numbers for which there is no room are left out of the text.
class ViewFault {
 public:
  ViewFault() noexcept = default;
  /// None where the view is a buffer. Arguments by value, so that the compiler can keep a view in
  /// registers.
  static ViewFault of(Shape shape, Strides strides, DType dtype) noexcept;

  explicit operator bool() const noexcept { return first_ != 0; }
  /// "is not contiguous: shape (3, 4) has strides (1, 3)"
  std::string text() const;

 private:
  std::uint64_t first_ = 0, second_ = 0;
};

/// `count` elements, one after the other. Byte is std::byte or const std::byte. Made from a pointer and a
/// count, or from whatever converts to a view. A view that is not contiguous, has a negative extent or more
/// bytes than fit 64 bits becomes a buffer with a `fault`: the call that uses it throws bad_argument, naming
/// the argument.
template <class Byte>
struct BasicBuffer {
  using Pointer = std::conditional_t<std::is_const_v<Byte>, const void*, void*>;

  Byte* data = nullptr;
  std::int64_t count = 0;  ///< elements; -1 with a fault
  DType dtype = DType::f32;
  Device device{};
  ViewFault fault{};

  BasicBuffer() noexcept = default;
  BasicBuffer(Pointer data_in, std::int64_t count_in, DType dtype_in, Device device_in = {}) noexcept
      : data(static_cast<Byte*>(data_in)), count(count_in), dtype(dtype_in), device(device_in) {}

  template <class Other>
  BasicBuffer(const BasicView<Other>& v) noexcept requires std::convertible_to<Other*, Byte*>
      : data(v.data), dtype(v.dtype), device{v.device.kind, v.device.index} {
    // Most views: of one dimension, so small that their bytes surely fit.
    constexpr std::int64_t kMost = std::int64_t{1} << 48;
    if (v.shape.rank() == 1 && v.strides[0] == 1 && v.shape[0] >= 0 && v.shape[0] <= kMost) [[likely]] {
      count = v.shape[0];
    } else {
      fault = ViewFault::of(v.shape, v.strides, v.dtype);
      count = fault ? -1 : v.shape.count();
    }
  }
  /// Made from anything that converts to a view, such as a Tensor.
  template <class Other>
  BasicBuffer(const Other& tensor) noexcept requires std::convertible_to<const Other&, BasicView<Byte>>
      : BasicBuffer(static_cast<BasicView<Byte>>(tensor)) {}

  operator BasicBuffer<const std::byte>() const noexcept requires(!std::is_const_v<Byte>) {
    BasicBuffer<const std::byte> b(data, count, dtype, device);
    b.fault = fault;
    return b;
  }

  /// Only without a fault, and where they fit 64 bits.
  std::int64_t bytes() const noexcept { return count * size_bytes(dtype); }
};

using Buffer = BasicBuffer<std::byte>;             ///< converts to ConstBuffer
using ConstBuffer = BasicBuffer<const std::byte>;  ///< does not convert to Buffer

}  // namespace weft
