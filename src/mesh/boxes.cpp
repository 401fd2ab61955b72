#include "mesh/boxes.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "host/strided/loops.hpp"

namespace weft {
namespace {

std::int64_t end_of(const Chunk& c) noexcept {
  std::int64_t end = 0;
  return __builtin_add_overflow(c.offset, c.size, &end) ? std::numeric_limits<std::int64_t>::max() : end;
}

// If a view has no elements, its steps do not matter, and their products need not fit 64 bits.
bool empty(const Shape& shape) noexcept {
  return std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n <= 0; });
}

Loops loops_of(const Shape& shape, const Strides& in, const Strides& out, DType dtype) noexcept {
  const std::int64_t element = size_bytes(dtype);
  Loops loops(static_cast<std::size_t>(element));
  for (int d = 0; d < shape.rank(); ++d) loops.add(shape[d], in[d] * element, out[d] * element);
  return loops;
}

}  // namespace

Dims zeros(int rank) {
  Dims all;
  for (int d = 0; d < rank; ++d) all.push_back(0);
  return all;
}

Chunk intersection(const Chunk& a, const Chunk& b) noexcept {
  const std::int64_t begin = std::max(a.offset, b.offset), end = std::min(end_of(a), end_of(b));
  return {begin, begin < end ? end - begin : 0};
}

Box intersection(const Box& a, const Box& b) noexcept {
  Box both = a;
  for (int d = 0; d < a.shape.rank(); ++d) {
    const Chunk c = intersection(Chunk{a.offset[d], a.shape[d]}, Chunk{b.offset[d], b.shape[d]});
    both.offset[d] = c.offset;
    both.shape[d] = c.size;
  }
  return both;
}

std::vector<HeldBox> held_boxes(const Shape& whole, const LayoutRef& layout, int rank) {
  Dims at = zeros(whole.rank());
  if (layout == nullptr) return {{{at, whole}, at}};
  std::vector<HeldBox> boxes;
  for (const Box& box : layout->parts(rank)) {
    boxes.push_back({box, at});
    if (!layout->segments.sizes.empty()) at[layout->segments.dim] += box.shape[layout->segments.dim];
  }
  return boxes;
}

void copy_elements(const ConstTensorView& from, const TensorView& to) {
  if (!empty(to.shape)) loops_of(to.shape, from.strides, to.strides, to.dtype).copy(from.data, to.data);
}

void copy_elements(DeviceRuntime& runtime, Stream stream, const ConstTensorView& from, const TensorView& to) {
  if (empty(to.shape)) return;
  loops_of(to.shape, from.strides, to.strides, to.dtype).copy(runtime, stream, from.data, to.data);
}

void clear_elements(DeviceRuntime& runtime, Stream stream, const TensorView& to) {
  constexpr std::array<std::byte, 16> kZero{};
  if (empty(to.shape)) return;
  loops_of(to.shape, to.strides, to.strides, to.dtype).fill(runtime, stream, kZero.data(), to.data);
}

void each_run(const Shape& whole, const LayoutRef& layout, const Shape& local,
              const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& run) {
  const Strides of_whole = row_major(whole), of_local = row_major(local);
  for (const auto& [box, at] : held_boxes(whole, layout, layout == nullptr ? 0 : layout->mesh().rank())) {
    if (empty(box.shape)) continue;
    Loops loops(1);
    std::int64_t start = 0, place = 0;
    for (int d = 0; d < whole.rank(); ++d) {
      loops.add(box.shape[d], of_whole[d], of_local[d]);
      start += box.offset[d] * of_whole[d];
      place += at[d] * of_local[d];
    }
    loops.each_run(
        [&](std::int64_t in, std::int64_t out, std::int64_t count) { run(start + in, place + out, count); });
  }
}

}  // namespace weft
