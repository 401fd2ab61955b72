// Tensors of small integers that depend on the index, and the part of each rank under a layout.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "weft/mesh/layout.hpp"

namespace weft::test {

/// Every list of `axes` placements made of `choices`.
inline std::vector<Placements> every_list(int axes, const std::vector<Placement>& choices) {
  std::vector<Placements> lists{{}};
  for (int a = 0; a < axes; ++a) {
    std::vector<Placements> longer;
    for (const Placements& list : lists)
      for (const Placement& p : choices) {
        longer.push_back(list);
        longer.back().push_back(p);
      }
    lists = std::move(longer);
  }
  return lists;
}

/// 1 to 23, by index: exact in every dtype, as are sums of the contributions below.
inline std::vector<double> whole_tensor(const Shape& global) {
  std::vector<double> whole(static_cast<std::size_t>(global.count()));
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<double>((i * 7 + i / 23) % 23 + 1);
  return whole;
}

/// The contribution of coordinate k of n to `value`, so that all contributions combine to it exactly and no
/// single one is it.
inline double contribution(ReduceOp op, double value, std::size_t index, int k, int n) {
  const auto share = [&](int j) { return (j + 1) * static_cast<double>(index % 3 + 1); };
  double others = 0;
  for (int j = 0; j < n - 1; ++j) others += share(j);
  switch (op.kind) {
    case ReduceOp::Kind::sum: return k < n - 1 ? share(k) : value - others;
    case ReduceOp::Kind::avg: return k < n - 1 ? share(k) : n * value - others;
    case ReduceOp::Kind::min: return k == static_cast<int>(index) % n ? value : value + 1 + k;
    case ReduceOp::Kind::max: return k == static_cast<int>(index) % n ? value : value - 1 - k;
    case ReduceOp::Kind::prod:  // no test of layouts has these
    case ReduceOp::Kind::premul_sum:
    case ReduceOp::Kind::bit_and:
    case ReduceOp::Kind::bit_or:
    case ReduceOp::Kind::bit_xor:
    case ReduceOp::Kind::logical_and:
    case ReduceOp::Kind::logical_or:
    case ReduceOp::Kind::logical_xor:
    case ReduceOp::Kind::user: break;
  }
  return 0;
}

template <class T>
T to_element(double value) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>)
    return T(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

/// Calls see(local index, index in the whole) for each element that this rank holds, box by box.
template <class See>
void each_local_element(const Layout& layout, const See& see) {
  const Strides strides = row_major(layout.global), local = row_major(layout.local_shape());
  std::int64_t along = 0;  // where the box begins in the segmented dimension of the local part
  for (const Box& box : layout.parts()) {
    for (std::int64_t i = 0; i < box.shape.count(); ++i) {
      std::int64_t rest = i, index = 0, place = 0;
      for (int d = box.shape.rank() - 1; d >= 0; --d) {
        const std::int64_t at = rest % box.shape[d];
        rest /= box.shape[d];
        index += (box.offset[d] + at) * strides[d];
        place += (at + (d == layout.segments.dim ? along : 0)) * local[d];
      }
      see(place, index);
    }
    if (!layout.segments.sizes.empty()) along += box.shape[layout.segments.dim];
  }
}

/// This rank's part of `whole` under `layout`; for Partial axes, its contributions.
template <class T>
Tensor local_part(const std::vector<double>& whole, LayoutRef layout) {
  const MeshShape& mesh = layout->mesh_shape();
  const int rank = layout->mesh().rank();
  const Shape shape = layout->local_shape();
  Tensor part(layout->mesh().context(), shape, dtype_of<T>);
  each_local_element(*layout, [&](std::int64_t i, std::int64_t index) {
    double value = whole[static_cast<std::size_t>(index)];
    for (int a = 0; a < mesh.axis_count(); ++a)
      if (const Partial* p = std::get_if<Partial>(&layout->placements[static_cast<std::size_t>(a)]))
        value = contribution(p->op, value, static_cast<std::size_t>(index), mesh.coordinate(rank, a),
                             mesh.size(a));
    part.as<T>()[static_cast<std::size_t>(i)] = to_element<T>(value);
  });
  return part.with_layout(layout);
}

/// Bit for bit.
template <class T>
bool equal_elements(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

}  // namespace weft::test
