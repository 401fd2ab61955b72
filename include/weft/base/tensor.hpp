// An owned n-dimensional array: a shared Storage, a shape, a dtype, and the layout it has over a mesh.
#pragma once

#include <memory>
#include <utility>

#include "weft/base/storage.hpp"
#include "weft/base/view.hpp"

namespace weft {

class Layout;
/// An interned layout (weft/mesh/layout.hpp): equal layouts have equal pointers, and one goes with its last
/// user. Null: a plain tensor, known to one rank.
using LayoutRef = std::shared_ptr<const Layout>;

/// Copying shares the Storage. Always contiguous and row-major. Const-ness is the handle's, not the
/// elements'.
class Tensor {
 public:
  Tensor() = default;
  /// Uninitialised. `shape` is what this rank holds.
  Tensor(Context& context, Shape shape, DType dtype = DType::f32, Memory memory = Memory::local);
  Tensor(Storage storage, std::size_t offset_bytes, Shape shape, DType dtype);
  static Tensor zeros(Context& context, Shape shape, DType dtype = DType::f32, Memory memory = Memory::local);

  explicit operator bool() const noexcept { return static_cast<bool>(storage_); }
  const Shape& shape() const noexcept { return shape_; }
  std::int64_t size(int dim) const noexcept { return shape_[dim < 0 ? dim + shape_.rank() : dim]; }
  std::int64_t count() const noexcept { return shape_.count(); }
  std::int64_t bytes() const noexcept { return count() * size_bytes(dtype_); }
  DType dtype() const noexcept { return dtype_; }
  const Storage& storage() const noexcept { return storage_; }
  std::byte* data() const noexcept { return storage_.data() + offset_; }
  /// The elements as T, valid as long as some Tensor shares the storage: never loop over the span of a
  /// temporary. Throws bad_argument where T is not the dtype.
  template <class T>
  std::span<T> as() const {
    require(dtype_of<T>);
    return {reinterpret_cast<T*>(data()), static_cast<std::size_t>(count())};
  }
  std::span<float> f32() const { return as<float>(); }

  const LayoutRef& layout() const noexcept { return layout_; }
  /// The same storage, stated to have this layout; no data moves and nothing is checked here (mesh has the
  /// checked form).
  Tensor with_layout(LayoutRef layout) const {
    Tensor t = *this;
    t.layout_ = std::move(layout);
    return t;
  }
  /// The same elements in another shape of equal count; drops the layout. Throws bad_argument where the
  /// counts differ.
  Tensor reshape(const Shape& shape) const;
  /// Elements [offset, offset + shape.count()) as a tensor of that shape; drops the layout.
  Tensor slice_flat(std::int64_t offset, const Shape& shape) const;
  Tensor clone(Context& context) const;

  TensorView view() const noexcept { return {data(), dtype_, {}, shape_, row_major(shape_)}; }
  operator TensorView() const noexcept { return view(); }
  operator ConstTensorView() const noexcept { return view(); }

 private:
  void require(DType wanted) const;
  Storage storage_;
  std::size_t offset_ = 0;
  Shape shape_;
  DType dtype_ = DType::f32;
  LayoutRef layout_;
};

}  // namespace weft
