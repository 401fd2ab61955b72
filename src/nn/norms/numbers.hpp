// Statistics of norms, summed over ranks. Inside nn and domain.
#pragma once

#include <functional>
#include <utility>

#include "weft/mesh/redistribute.hpp"

namespace weft::norms {

/// The sums over the axes of x's mesh for which sums(axis) says so; itself where there is none. Collective among their ranks: one all-reduce.
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
