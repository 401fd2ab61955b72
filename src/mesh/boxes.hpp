// Boxes of n dimensions: what two of them share, which ones a rank holds of a tensor, and copies of them
// between strided memories. Layouts, windows, shards and checkpoints are made of this. No state; any thread.
// Private to mesh and the layers above.
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

/// (0, 0, …): where a whole begins.
Dims zeros(int rank);
/// The box that is all of a tensor.
inline Box whole_box(const Shape& shape) { return {zeros(shape.rank()), shape}; }

/// The intersection of two ranges; a size of 0 if they share nothing. No end is beyond 2^63 - 1.
Chunk intersection(const Chunk& a, const Chunk& b) noexcept;
/// The intersection of two boxes of one tensor; extents of 0 in the dimensions in which they share nothing.
Box intersection(const Box& a, const Box& b) noexcept;

/// A part of what a rank holds: the box of the whole that it is, and where it begins in the local tensor.
struct HeldBox {
  Box box;
  Dims at;
};
/// The part of a tensor of shape `whole` that `rank` of the root mesh holds, in order: one box, or one for
/// each segment. Without a layout it is the whole.
std::vector<HeldBox> held_boxes(const Shape& whole, const LayoutRef& layout, int rank);

/// A box of a tensor, as a view: `shape` elements from index `at` on. If the tensor has no memory neither
/// has the box.
template <class Byte>
BasicView<Byte> narrow(const BasicView<Byte>& of, const Dims& at, const Shape& shape) {
  BasicView<Byte> part = of;
  part.shape = shape;
  for (int d = 0; d < shape.rank() && of.data != nullptr; ++d)
    part.data += at[d] * of.strides[d] * size_bytes(of.dtype);
  return part;
}
/// The same in one dimension; all of the others.
template <class Byte>
BasicView<Byte> narrow(const BasicView<Byte>& of, int dim, std::int64_t at, std::int64_t count) {
  BasicView<Byte> part = of;
  part.shape[dim] = count;
  if (of.data != nullptr) part.data += at * of.strides[dim] * size_bytes(of.dtype);
  return part;
}

/// to = from: views of one shape and dtype with any strides, in the host's memory. The two do not overlap.
void copy_elements(const ConstTensorView& from, const TensorView& to);
/// The same on the device of `stream`, in order on it.
void copy_elements(DeviceRuntime& runtime, Stream stream, const ConstTensorView& from, const TensorView& to);
/// All bits of `to` become 0, in order on `stream`.
void clear_elements(DeviceRuntime& runtime, Stream stream, const TensorView& to);

/// Calls run(start, place, count) for each stretch of the elements that a rank holds which is contiguous both
/// in the whole, from element `start` on, and in the local tensor, from `place` on. `local`: the shape of
/// that.
void each_run(const Shape& whole, const LayoutRef& layout, const Shape& local,
              const std::function<void(std::int64_t start, std::int64_t place, std::int64_t count)>& run);

}  // namespace weft
