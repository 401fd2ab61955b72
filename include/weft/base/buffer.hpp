// The facts about memory that a collective needs: its address, the number of elements, their dtype, and the
// device. A buffer borrows its memory, as a view does, but has no shape and no strides.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>

#include "weft/base/device.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/view.hpp"

namespace weft {

/// The reason why a view cannot be a buffer. Shape and strides are packed, so that a buffer is copied in a
/// few instructions. The text leaves out numbers for which there was no room.
class ViewFault {
 public:
  ViewFault() noexcept = default;
  /// Returns an empty ViewFault if the view can be a buffer. The function takes its arguments by value, so
  /// that the compiler can keep a view in registers.
  static ViewFault of(Shape shape, Strides strides, DType dtype) noexcept;

  explicit operator bool() const noexcept { return first_ != 0; }
  /// "is not contiguous: shape (3, 4) has strides (1, 3)"
  std::string text() const;

 private:
  std::uint64_t first_ = 0, second_ = 0;
};

/// Elements that weft moves, but never combines: std::byte, characters.
template <class T>
concept RawByte = std::same_as<T, std::byte> || std::same_as<T, char> || std::same_as<T, char8_t>;

namespace detail {

// The dtype of an element, const or not.
template <class T>
inline constexpr DType dtype_within = dtype_of<std::remove_const_t<T>>;
template <class T>
requires RawByte<std::remove_const_t<T>>
inline constexpr DType dtype_within<T> = DType::u8;

// An element that a buffer of Byte may refer to. If Byte is not const, the element may not be const either.
template <class T, class Byte>
concept BufferElement = (Element<std::remove_const_t<T>> ||
                         RawByte<std::remove_const_t<T>>)&&(std::is_const_v<Byte> || !std::is_const_v<T>);
template <class R, class Byte>
concept BufferRange = ContiguousRange<std::remove_reference_t<R>> && BufferElement<ElementOf<R>, Byte>;

}  // namespace detail

/// `count` elements, one after the other. Byte is std::byte or const std::byte. A buffer can be made from
///   - anything that converts to a view, such as a Tensor;
///   - a contiguous range in the host's memory: std::vector, std::array, a C array, std::span, std::string;
///   - a variable: `double loss; group.all_reduce(loss)`;
///   - a pointer, a count, a dtype and, for memory that is not the host's, a device.
///
/// std::byte and characters become bytes (u8), which weft moves and never combines. as_bytes() makes such a
/// buffer of other types. A buffer borrows its memory, so the compiler refuses a buffer of a temporary. From
/// const data only a ConstBuffer can be made.
///
/// A view that is not contiguous, has a negative extent or more bytes than fit 64 bits becomes a buffer with
/// a `fault`. The call that uses the buffer throws bad_argument, naming the argument.
template <class Byte>
struct BasicBuffer {
  using Pointer = std::conditional_t<std::is_const_v<Byte>, const void*, void*>;

  Byte* data = nullptr;
  std::int64_t count = 0;  ///< elements; -1 with a fault
  DType dtype = DType::f32;
  Device device{};
  bool raw = false;  ///< bytes that no reduction combines
  ViewFault fault{};

  BasicBuffer() noexcept = default;
  BasicBuffer(Pointer data_in, std::int64_t count_in, DType dtype_in, Device device_in = {}) noexcept
      : data(static_cast<Byte*>(data_in)), count(count_in), dtype(dtype_in), device(device_in) {}

  template <class Other>
  BasicBuffer(const BasicView<Other>& v) noexcept requires std::convertible_to<Other*, Byte*>
      : data(v.data), dtype(v.dtype), device{v.device.kind, v.device.index} {
    // The common case: a view of one dimension whose bytes surely fit 64 bits.
    constexpr std::int64_t kMost = std::int64_t{1} << 48;
    if (v.shape.rank() == 1 && v.strides[0] == 1 && v.shape[0] >= 0 && v.shape[0] <= kMost) [[likely]] {
      count = v.shape[0];
    } else {
      fault = ViewFault::of(v.shape, v.strides, v.dtype);
      count = fault ? -1 : v.shape.count();
    }
  }
  /// A buffer can be made from anything that converts to a view, such as a Tensor.
  template <class Other>
  BasicBuffer(const Other& tensor) noexcept requires std::convertible_to<const Other&, BasicView<Byte>>
      : BasicBuffer(static_cast<BasicView<Byte>>(tensor)) {}

  /// The buffer of the elements of a range.
  template <class R>
  BasicBuffer(R&& range) noexcept requires detail::BufferRange<R, Byte> && kOutlives<R>
      : BasicBuffer(std::data(range), static_cast<std::int64_t>(std::size(range)),
                    detail::dtype_within<ElementOf<R>>) {
    raw = RawByte<std::remove_const_t<ElementOf<R>>>;
  }
  template <class R>
  BasicBuffer(R&& range) requires detail::BufferRange<R, Byte> &&
      (!kOutlives<R>) = delete;  // a temporary is gone before the call ends: give it a name

  /// The buffer of one variable.
  template <class T>
  BasicBuffer(T& variable) noexcept requires detail::BufferElement<T, Byte>
      : BasicBuffer(&variable, 1, detail::dtype_within<T>) {
    raw = RawByte<std::remove_const_t<T>>;
  }
  template <class T>
  BasicBuffer(const T&& value) requires detail::BufferElement<const T, Byte>
  = delete;  // a number without a name is gone before the call ends

  operator BasicBuffer<const std::byte>() const noexcept requires(!std::is_const_v<Byte>) {
    BasicBuffer<const std::byte> b(data, count, dtype, device);
    b.raw = raw;
    b.fault = fault;
    return b;
  }

  /// Call it only if there is no fault, and if the bytes fit 64 bits.
  std::int64_t bytes() const noexcept { return count * size_bytes(dtype); }
};

using Buffer = BasicBuffer<std::byte>;             ///< converts to ConstBuffer
using ConstBuffer = BasicBuffer<const std::byte>;  ///< does not convert to Buffer

namespace detail {

template <class T>
concept Bytewise = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::is_member_pointer_v<T>;
template <class R>
concept RangeOfBytewise =
    ContiguousRange<std::remove_reference_t<R>> && Bytewise<std::remove_const_t<ElementOf<R>>>;
template <class T>
using BufferOf = BasicBuffer<std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>>;

template <class T>
BufferOf<T> raw_bytes(T* data, std::size_t count) noexcept {
  BufferOf<T> b(data, static_cast<std::int64_t>(count * sizeof(T)), DType::u8);
  b.raw = true;
  return b;
}

}  // namespace detail

/// The bytes of a variable, or of a range's elements. Data without a dtype, such as a struct, can so be
/// broadcast, gathered or sent. All ranks must lay out the data in the same way, as ranks of one program do.
/// Only for trivially copyable types. Pointers in them mean nothing on other ranks. A reduction of bytes
/// throws `unsupported`.
///
///   struct Settings { int steps; double rate; } settings;
///   group.broadcast(as_bytes(settings), 0).wait();
template <class T>
auto as_bytes(T& variable) noexcept
    requires(!ContiguousRange<T> && detail::Bytewise<std::remove_const_t<T>>) {
  return detail::raw_bytes(&variable, 1);
}
template <class R>
auto as_bytes(R&& range) noexcept requires detail::RangeOfBytewise<R> && kOutlives<R> {
  return detail::raw_bytes(std::data(range), std::size(range));
}
template <class T>
void as_bytes(const T&& temporary) requires(!kOutlives<const T>) = delete;  // it is gone before the call ends

}  // namespace weft
