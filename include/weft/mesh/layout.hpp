// How a tensor lies over a mesh: one placement per axis of the root mesh, and the shape of the whole. Pure
// arithmetic; callable from any thread.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "weft/base/chunk.hpp"
#include "weft/base/tensor.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// Every rank of the axis holds the same.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
/// Dimension `dim` is cut into as many parts as the axis has ranks; see Chunk for their sizes.
struct Shard {
  int dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
/// Each rank holds a contribution of full size; the value is their combination by `op`.
struct Partial {
  ReduceOp op = ReduceOp::sum;
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Replicate, Shard, Partial>;
/// One per axis of the root mesh, in its order.
using Placements = std::vector<Placement>;

inline bool is_replicate(const Placement& p) noexcept { return std::holds_alternative<Replicate>(p); }
inline bool is_partial(const Placement& p) noexcept { return std::holds_alternative<Partial>(p); }
inline bool is_shard(const Placement& p) noexcept { return std::holds_alternative<Shard>(p); }
inline bool is_shard(const Placement& p, int dim) noexcept { return p == Placement(Shard{dim}); }

/// "Replicate", "Shard(1)", "Partial(sum)"
std::string to_string(const Placement& placement);
/// "[Shard(0), Replicate]"
std::string to_string(const Placements& placements);

/// Immutable and interned: equal layouts of one root mesh are one object, so LayoutRef compares by pointer.
/// Lives as long as the root mesh. Several axes may shard one dimension: they nest in the order of the root's
/// axes, each cutting the part that the axes left of it leave (7 elements on [2 x 2]: 4 + 3, then 2 + 2 and 2
/// + 1).
struct Layout {
  const Placements placements;
  const Shape global;

  /// The root mesh.
  DeviceMesh mesh() const;
  /// Its arithmetic, without the handle.
  const MeshShape& mesh_shape() const noexcept;

  /// What a rank of the root mesh holds: its part's shape, and where that begins in the whole. Partial and
  /// Replicate hold all. Without a rank: this rank's.
  Shape local_shape(int rank) const;
  Dims local_offsets(int rank) const;
  Shape local_shape() const;
  Dims local_offsets() const;

  const Placement& on(std::string_view axis) const;
  /// `axis`: a sub-mesh of exactly one axis of the same root; throws layout for another root's.
  const Placement& on(const DeviceMesh& axis) const;
  bool replicated() const noexcept;  ///< on all axes
  bool partial() const noexcept;     ///< on any axis

  /// The same but for one axis, for all axes, or for the shape of the whole. Interned.
  LayoutRef with(std::string_view axis, const Placement& placement) const;
  LayoutRef with(const DeviceMesh& axis, const Placement& placement) const;
  LayoutRef with(Placements placements) const;
  LayoutRef with_global(const Shape& global) const;

 private:
  friend class MeshState;
  Layout(MeshState* state, Placements placements_in, Shape global_in)
      : placements(std::move(placements_in)), global(global_in), state_(state) {}
  int index_of(const DeviceMesh& axis) const;
  LayoutRef with(int axis, const Placement& placement) const;
  MeshState* state_;
};

/// "(7, 4) as [dp: Shard(0), tp: Replicate]"
std::string to_string(const Layout& layout);

/// The layout of a tensor of shape `global`. `mesh` must be a root and `placements` have one entry per axis.
/// Throws layout where a sharded dimension does not exist, or where reductions are mixed that do not commute
/// (Partial(sum) on one axis, Partial(max) on another).
LayoutRef make_layout(const DeviceMesh& mesh, Placements placements, const Shape& global);
/// By name, for the root of any sub-mesh; axes not named are Replicate: make_layout(mesh, {{"tp", Shard{0}}},
/// {8, 4}).
LayoutRef make_layout(const DeviceMesh& mesh,
                      std::initializer_list<std::pair<std::string_view, Placement>> placements,
                      const Shape& global);
/// Replicate on every axis of the root of `mesh`.
LayoutRef replicated_layout(const DeviceMesh& mesh, const Shape& global);

/// States that `local` is this rank's part of a tensor of that layout. No data moves. Throws layout naming
/// both shapes where the part has another shape: `as_layout: the tensor is (3, 4); rank 1 of (7, 4) as [dp:
/// Shard(0)] holds (2, 4)`.
Tensor as_layout(const Tensor& local, LayoutRef layout);

/// The placement of `t` on `axis` (a sub-mesh of one axis). A plain tensor counts as Replicate on an axis of
/// one rank; else it is a layout error: `<what> is a plain tensor; on tp=2 it needs a layout`.
Placement placement_on(const Tensor& t, const DeviceMesh& axis, std::string_view what);

/// Throws a layout error unless `t` has that placement on `axis`: `<what> is Replicate on tp=2; expected
/// Shard(2)`. `what` names the layer and the tensor: "layers.0.mlp.down: x". On an axis of one rank every
/// placement means the same: nothing is checked.
void expect_layout(const Tensor& t, const DeviceMesh& axis, const Placement& expected, std::string_view what);

}  // namespace weft
