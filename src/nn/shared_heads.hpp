// Which ranks share a key/value head, if there are fewer key/value heads than ranks. Included only inside nn
// and domain.
#pragma once

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/nn/layouts.hpp"

namespace weft::shared_heads {

/// The heads of the whole layer.
struct Heads {
  std::int64_t heads, kv_heads, head_dim;
};

// Returns whether the axis has several ranks, and shards the features of q but not those of k: then its ranks
// share key/value heads.
inline bool shared(const Layout& q, const Layout& k, std::size_t axis) {
  return q.mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(q.placements[axis], 2) &&
         is_replicate(k.placements[axis]);
}
inline bool shares_heads(const Layout& q, const Layout& k) {
  if (!(q.mesh() == k.mesh())) return false;
  for (std::size_t axis = 0; axis < q.placements.size(); ++axis)
    if (shared(q, k, axis)) return true;
  return false;
}

// Throws layout, on all ranks, unless each rank has the key/value heads of its query heads in the order of
// the kernel: consecutive query heads, equally many for each key/value head. Except for the shared heads, q
// and k must have equal layouts.
inline void expect_heads_of_q(const Module& module, const Heads& c, const Layout& q, const Layout& k) {
  for (std::size_t axis = 0; axis < q.placements.size(); ++axis)
    if (q.mesh_shape().size(static_cast<int>(axis)) > 1 && !shared(q, k, axis) &&
        q.placements[axis] != k.placements[axis])
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}; expected {} (as q)", layouts::named(module, "k").text(),
                              to_string(k.placements[axis]), layouts::axis_name(k, static_cast<int>(axis)),
                              to_string(q.placements[axis])));
  const bool segments = !q.segments.sizes.empty() || !k.segments.sizes.empty();
  for (int rank = 0; rank < q.mesh_shape().size(); ++rank) {
    const Box of_q = q.parts(rank).at(0), of_k = k.parts(rank).at(0);
    const std::int64_t first = of_q.offset[2] / c.head_dim, heads = of_q.shape[2] / c.head_dim,
                       first_kv = of_k.offset[2] / c.head_dim, kv_heads = of_k.shape[2] / c.head_dim;
    bool fit = !segments && kv_heads > 0 && heads % kv_heads == 0;
    for (std::int64_t h = 0; fit && h < heads; ++h)
      fit = (first + h) / (c.heads / c.kv_heads) == first_kv + h / (heads / kv_heads);
    if (fit) continue;
    throw Error(
        ErrorCode::layout,
        fmt::format("\"{}\": rank {} of {} has query heads {} to {} of {} and key/value heads {} to {} "
                    "of {}; expected those that they need: k and v split over the outermost of the "
                    "axes that split q, of as many ranks as there are key/value heads",
                    module.path(), rank, to_string(q.mesh_shape()), first, first + heads - 1, c.heads,
                    first_kv, first_kv + kv_heads - 1, c.kv_heads));
  }
}

// The layout of dk and dv: if ranks share a head, they are contributions of this rank's query heads.
inline LayoutRef of_shared_gradient(const LayoutRef& q, const LayoutRef& k) {
  if (q == nullptr || k == nullptr) return k;
  Placements placements = k->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (shared(*q, *k, axis)) placements[axis] = Partial{};
  return k->with(std::move(placements));
}

}  // namespace weft::shared_heads
