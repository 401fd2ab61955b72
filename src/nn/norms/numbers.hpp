// Statistics of norms, summed over ranks. Inside nn.
#pragma once

#include <functional>
#include <utility>

#include "weft/mesh/redistribute.hpp"

namespace weft::norms {

/// Returns whether an axis of several ranks shards dimension `from` of x, or a later one.
inline bool cuts(const Layout& x, std::size_t axis, int from) {
  const Placement& p = x.placements[axis];
  return x.mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(p) && std::get<Shard>(p).dim >= from;
}
/// Whether any does.
inline bool cut(const LayoutRef& x, int from) {
  for (std::size_t axis = 0; x && axis < x->placements.size(); ++axis)
    if (cuts(*x, axis, from)) return true;
  return false;
}

/// The sums over the axes of x's mesh for which sums(axis) returns true. If there is no such axis, `mine`
/// itself. Collective over the ranks of these axes: one all-reduce.
inline Tensor summed(const Tensor& mine, const LayoutRef& x,
                     const std::function<bool(std::size_t axis)>& sums) {
  if (x == nullptr) return mine;
  const LayoutRef whole = replicated_layout(x->mesh(), mine.shape());
  Placements placements = whole->placements;
  bool any = false;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (x->mesh_shape().size(static_cast<int>(axis)) == 1 || !sums(axis)) continue;
    placements[axis] = Partial{};
    any = true;
  }
  if (!any) return mine;
  return redistribute(mine.with_layout(whole->with(std::move(placements))), whole).with_layout(nullptr);
}

}  // namespace weft::norms
