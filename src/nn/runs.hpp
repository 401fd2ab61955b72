// Where the elements of a rank's part lie in the whole tensor. Inside nn.
#pragma once

#include "weft/mesh/layout.hpp"

namespace weft {

/// Calls run(start, place, count) for each stretch of a box that is contiguous both in the whole tensor, from element
/// `start` on, and in the rank's part, from `place` on. `local`, `at`: the shape of the part, and where the box begins in it.
template <class Run>
void each_run_of_box(const Shape& global, const Box& box, const Shape& local, const Dims& at, Run&& run) {
  if (box.shape.count() == 0) return;
  const int dims = local.rank();
  const Strides of_global = row_major(global), of_local = row_major(local);
  int first = dims;  // dimensions from here on are one run
  std::int64_t count = 1;
  while (first > 0) {
    --first;
    count *= box.shape[first];
    if (box.shape[first] != global[first] || box.shape[first] != local[first]) break;
  }
  std::int64_t start0 = 0, place0 = 0;
  for (int d = 0; d < dims; ++d) {
    start0 += box.offset[d] * of_global[d];
    place0 += at[d] * of_local[d];
  }
  for (std::int64_t r = 0; r < box.shape.count() / count; ++r) {
    std::int64_t rest = r, start = start0, place = place0;
    for (int d = first - 1; d >= 0; --d) {
      start += rest % box.shape[d] * of_global[d];
      place += rest % box.shape[d] * of_local[d];
      rest /= box.shape[d];
    }
    run(start, place, count);
  }
}

/// The same for all that this rank holds of a tensor of shape `global`: by `layout`, all of it where that is null.
template <class Run>
void each_run(const Shape& global, const LayoutRef& layout, const Shape& local, Run&& run) {
  Dims at = global;
  for (int d = 0; d < at.rank(); ++d) at[d] = 0;
  if (layout == nullptr) return each_run_of_box(global, {at, global}, local, at, run);
  for (const Box& box : layout->parts()) {
    each_run_of_box(global, box, local, at, run);
    if (!layout->segments.sizes.empty()) at[layout->segments.dim] += box.shape[layout->segments.dim];
  }
}

}  // namespace weft
