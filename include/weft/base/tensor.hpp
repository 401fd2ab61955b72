// An owned n-dimensional array: a shared Storage on some device, a shape, a dtype, and the array's layout
// over a mesh.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "weft/base/storage.hpp"
#include "weft/base/view.hpp"

namespace weft {

class Layout;
/// An interned layout (weft/mesh/layout.hpp): equal layouts have equal pointers. A layout exists as long as a
/// LayoutRef refers to it. Null means a plain tensor, which is not distributed over ranks.
using LayoutRef = std::shared_ptr<const Layout>;

/// Copying shares the Storage. Always contiguous and row-major. A const Tensor is a const handle. Its
/// elements may be written.
class Tensor {
 public:
  Tensor() = default;
  /// Uninitialised. `shape` is the shape of this rank's part; `where`: see Storage::allocate.
  Tensor(Context& context, Shape shape, DType dtype = DType::f32, Memory memory = Memory::local,
         Stream where = {});
  Tensor(Storage storage, std::size_t offset_bytes, Shape shape, DType dtype);
  /// A tensor of zeros. On a device the elements become zero when its stream has reached that point.
  static Tensor zeros(Context& context, Shape shape, DType dtype = DType::f32, Memory memory = Memory::local,
                      Stream where = {});

  explicit operator bool() const noexcept { return static_cast<bool>(storage_); }
  const Shape& shape() const noexcept { return shape_; }
  std::int64_t size(int dim) const noexcept { return shape_[dim < 0 ? dim + shape_.rank() : dim]; }
  std::int64_t count() const noexcept { return shape_.count(); }
  std::int64_t bytes() const noexcept { return count() * size_bytes(dtype_); }
  DType dtype() const noexcept { return dtype_; }
  const Storage& storage() const noexcept { return storage_; }
  Device device() const noexcept { return storage_.device(); }
  /// The stream that orders work on the tensor (see Storage).
  Stream stream() const noexcept { return storage_.stream(); }
  /// The same elements and layout, ordered on another stream of the device (Storage::ordered_on).
  Tensor ordered_on(Context& context, Stream where) const {
    Tensor t = *this;
    t.storage_ = storage_.ordered_on(context, where);
    return t;
  }
  std::byte* data() const noexcept { return storage_.data() + offset_; }
  /// The elements as T, valid as long as some Tensor shares the storage. So never loop over the span of a
  /// temporary. For host memory only. Throws bad_argument if T is not the dtype, or if the elements are on a
  /// device (use to_host(), weft/host/copy.hpp).
  template <class T>
  std::span<T> as() const {
    require(dtype_of<T>);
    require_host();
    return {reinterpret_cast<T*>(data()), static_cast<std::size_t>(count())};
  }
  std::span<float> f32() const { return as<float>(); }
  /// The address of the first element, on any device: for kernels. Throws bad_argument if T is not the dtype.
  template <class T>
  T* data_ptr() const {
    require(dtype_of<T>);
    return reinterpret_cast<T*>(data());
  }

  const LayoutRef& layout() const noexcept { return layout_; }
  /// A tensor with the same storage, whose layout is `layout`. It moves no data and checks nothing
  /// (as_layout() in weft/mesh/layout.hpp checks).
  Tensor with_layout(LayoutRef layout) const {
    Tensor t = *this;
    t.layout_ = std::move(layout);
    return t;
  }
  /// The same elements in another shape with an equal count. The result has no layout. Throws bad_argument if
  /// the counts differ.
  Tensor reshape(const Shape& shape) const;
  /// Elements [offset, offset + shape.count()) as a tensor of that shape. The result has no layout.
  Tensor slice_flat(std::int64_t offset, const Shape& shape) const;
  /// A copy with its own Storage, on the same device and stream.
  Tensor clone(Context& context) const;

  TensorView view() const noexcept { return {data(), dtype_, device(), shape_, row_major(shape_)}; }
  operator TensorView() const noexcept { return view(); }
  operator ConstTensorView() const noexcept { return view(); }

 private:
  void require(DType wanted) const;
  void require_host() const {
    if (device() != Device{}) throw_not_on_host();
  }
  [[noreturn]] void throw_not_on_host() const;
  Storage storage_;
  std::size_t offset_ = 0;
  Shape shape_;
  DType dtype_ = DType::f32;
  LayoutRef layout_;
};

/// The text that says why work on the stream `expected`, which belongs to `whose`, may not use t: t is
/// ordered on another stream. "is on cpu; expected cuda:0, the device of the Frame", "is ordered on another
/// stream of cuda:0 than the Frame; to_device() orders it there".
std::string elsewhere_text(const Tensor& t, Stream expected, std::string_view whose);

}  // namespace weft
