#include "weft/nn/segments.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// The layout of a part, with `size` features, of a tensor with the layout `whole`.
LayoutRef of_part(const LayoutRef& whole, std::int64_t size) {
  if (whole == nullptr) return nullptr;
  return whole->segmented(0, {})->with_global(layouts::with_last(whole->global, size));
}

bool cut_in_features(const LayoutRef& layout) {
  if (layout == nullptr) return false;
  for (std::size_t axis = 0; axis < layout->placements.size(); ++axis)
    if (layout->mesh_shape().size(static_cast<int>(axis)) > 1 &&
        is_shard(layout->placements[axis], layout->global.rank() - 1))
      return true;
  return false;
}

// Throws unless the features of `global` consist of these sizes and, if they are sharded, are sharded in
// segments of these sizes.
void expect_segments(const Shape& global, const LayoutRef& layout, std::span<const std::int64_t> sizes,
                     const TensorName& what) {
  const std::int64_t sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (global.rank() == 0 || global.back() != sum ||
      std::ranges::any_of(sizes, [](std::int64_t s) { return s < 0; }))
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected {} = {} features", what.text(),
                                                     to_string(global), fmt::join(sizes, " + "), sum));
  if (!cut_in_features(layout) || sizes.size() < 2) return;
  const Segments& segments = layout->segments;
  if (segments.dim != global.rank() - 1 || !std::ranges::equal(segments.sizes, sizes))
    throw Error(ErrorCode::layout, fmt::format("{} is {}; expected its features in segments {}", what.text(),
                                               to_string(*layout), fmt::join(sizes, ", ")));
}

// Columns [first, first + of.back()) of rows, as a matrix.
template <class View>
View columns(const View& all, std::int64_t first, std::int64_t count) {
  const std::int64_t width = all.shape.back(), rows = width == 0 ? 0 : all.count() / width;
  View v = all;
  v.data = all.data + first * size_bytes(all.dtype);
  v.shape = {rows, count};
  v.strides = {width, 1};
  return v;
}

TensorView as_matrix(const Tensor& t) {
  const std::int64_t width = t.shape().back();
  return columns(t.view(), 0, width);
}

}  // namespace

Tensors split_features(const Tensor& y, std::span<const std::int64_t> sizes, Compute& compute,
                       const TensorName& what) {
  expect_segments(layouts::global_shape(y), y.layout(), sizes, what);
  Tensors parts;
  std::int64_t first = 0;
  for (const std::int64_t size : sizes) {
    const LayoutRef layout = of_part(y.layout(), size);
    const Shape shape = layout ? layout->local_shape() : layouts::with_last(y.shape(), size);
    const Tensor part = compute.make(shape, y.dtype()).with_layout(layout);
    copy(compute.context(), columns(y.view(), first, shape.back()), as_matrix(part), compute.stream());
    first += shape.back();
    parts.push_back(part);
  }
  return parts;
}

Tensor join_features(std::span<const Tensor> parts, const LayoutRef& layout, Compute& compute,
                     const TensorName& what, Memory memory) {
  if (parts.empty()) throw Error(ErrorCode::bad_argument, fmt::format("{}: there are no parts", what.text()));
  std::vector<std::int64_t> sizes;
  std::int64_t local = 0;
  for (const Tensor& part : parts) {
    const Shape& global = layouts::global_shape(part);
    if (part.shape().rank() == 0 || global.rank() != parts[0].shape().rank())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: a part is {}; expected as many dimensions as {} has", what.text(),
                              to_string(global), to_string(parts[0].shape())));
    sizes.push_back(global.back());
    local += part.shape().back();
  }
  const Shape shape = layouts::with_last(parts[0].shape(), local);
  expect_segments(layout ? layout->global : shape, layout, sizes, what);
  for (std::size_t i = 0; i < parts.size(); ++i)
    layouts::expect_same(what.and_then(": a part"), parts[i].layout(), of_part(layout, sizes[i]),
                         "as the whole");
  const Tensor y = compute.make(shape, parts[0].dtype(), memory).with_layout(layout);
  std::int64_t first = 0;
  for (const Tensor& part : parts) {
    if (part.dtype() != y.dtype() || part.count() / std::max<std::int64_t>(1, part.shape().back()) !=
                                         y.count() / std::max<std::int64_t>(1, local))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: a part is {} {}; expected {} {} except for the features", what.text(),
                              name(part.dtype()), to_string(part.shape()), name(y.dtype()),
                              to_string(parts[0].shape())));
    copy(compute.context(), as_matrix(part), columns(y.view(), first, part.shape().back()), compute.stream());
    first += part.shape().back();
  }
  return y;
}

}  // namespace weft
