// Boxes of n dimensions: the intersection of two boxes, the boxes that a rank holds of a tensor, and copies
// of boxes between strided memories. Layouts, windows, shards and checkpoints are made of boxes. The
// functions have no state. Any thread may call them. Private to mesh and the layers above.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "weft/base/chunk.hpp"
#include "weft/base/shape.hpp"
#include "weft/base/view.hpp"
#include "weft/host/device_runtime.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

/// (0, 0, …): the first index of a tensor.
Dims zeros(int rank);
/// The box that covers a whole tensor.
inline Box whole_box(const Shape& shape) { return {zeros(shape.rank()), shape}; }

/// The intersection of two ranges; its size is 0 if they share nothing. No end may be beyond 2^63 - 1.
Chunk intersection(const Chunk& a, const Chunk& b) noexcept;
/// The intersection of two boxes of one tensor. Its extent is 0 in each dimension in which they share
/// nothing.
Box intersection(const Box& a, const Box& b) noexcept;

/// A part of what a rank holds: its box of the global tensor, and its first index in the local tensor.
struct HeldBox {
  Box box;
  Dims at;
};
/// The part of a tensor of shape `whole` that `rank` of the root mesh holds, in order. It is one box, or one
/// for each segment. Without a layout it is the whole tensor.
std::vector<HeldBox> held_boxes(const Shape& whole, const LayoutRef& layout, int rank);

/// A box of a tensor, as a view: `shape` elements from index `at` on. If the tensor has no memory, neither
/// has the box.
template <class Byte>
BasicView<Byte> narrow(const BasicView<Byte>& of, const Dims& at, const Shape& shape) {
  BasicView<Byte> part = of;
  part.shape = shape;
  for (int d = 0; d < shape.rank() && of.data != nullptr; ++d)
    part.data += at[d] * of.strides[d] * size_bytes(of.dtype);
  return part;
}
/// Like narrow() above, in one dimension. Keeps all indices of the other dimensions.
template <class Byte>
BasicView<Byte> narrow(const BasicView<Byte>& of, int dim, std::int64_t at, std::int64_t count) {
  BasicView<Byte> part = of;
  part.shape[dim] = count;
  if (of.data != nullptr) part.data += at * of.strides[dim] * size_bytes(of.dtype);
  return part;
}

/// Copies `from` to `to`: views of one shape and dtype with any strides, in the host's memory. The two views
/// must not overlap.
void copy_elements(const ConstTensorView& from, const TensorView& to);
/// Like copy_elements() above, on the device of `stream`, in order on it.
void copy_elements(DeviceRuntime& runtime, Stream stream, const ConstTensorView& from, const TensorView& to);
/// Sets all bits of `to` to 0, in order on `stream`.
void clear_elements(DeviceRuntime& runtime, Stream stream, const TensorView& to);

/// Calls run(start, place, count) for each stretch of a rank's elements that is contiguous in both the global
/// and the local tensor. The stretch begins at element `start` of the global tensor and at `place` of the
/// local tensor. `local`: the shape of the local tensor.
void each_run(const Shape& whole, const LayoutRef& layout, const Shape& local,
              const std::function<void(std::int64_t start, std::int64_t place, std::int64_t count)>& run);

}  // namespace weft
