// The distribution of a tensor over a mesh: one placement per axis of the root mesh, the order in which axes
// nest, and the shape of the global tensor. Pure arithmetic. Any thread may call the functions.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/mesh/placement.hpp"
#include "weft/mesh/tensor_name.hpp"

namespace weft {

/// A dimension that consists of several matrices, such as the rows of a fused [q|k|v] or [gate|up] weight.
/// Each segment is cut separately, so that every rank has a part of every segment.
struct Segments {
  int dim = 0;
  /// in order; they add up to the dimension. Empty: one segment, the whole dimension
  std::vector<std::int64_t> sizes;
  friend bool operator==(const Segments&, const Segments&) = default;
};

/// A rectangular part of a tensor: its begin and its length in each dimension.
struct Box {
  Dims offset;
  Shape shape;
  friend bool operator==(const Box&, const Box&) = default;
};

/// The contents of a layout, as a value. A Layout holds it in a normal form, so two equal layouts have equal
/// contents.
struct LayoutSpec {
  Placements placements;  ///< one per axis of the root mesh
  Shape global;           ///< the shape of the global tensor
  /// The indices of all axes of the root. Axes that shard the same dimension nest in this order. The first
  /// axis cuts the dimension, and each later axis cuts the parts of the axis before it (7 elements on [2 x
  /// 2]: 4 + 3, then 2 + 2 and 2 + 1). Axes that do not share a dimension are in the order of the root.
  std::vector<int> nesting;
  Segments segments;
  friend bool operator==(const LayoutSpec&, const LayoutSpec&) = default;
};

/// Immutable and interned: equal layouts of one root mesh are one object. So a LayoutRef compares by pointer.
/// A layout exists as long as a LayoutRef refers to it, and keeps its mesh. make_layout() makes a Layout.
///
/// By default axes that shard one dimension nest in the order of the root's axes, which is right for batches.
/// A weight that is first cut for tensor parallelism and then into data shards needs the other order:
/// layout->shard_inside(mesh["dp_shard"], 0). Then a gather over dp_shard gives exactly the tensor-parallel
/// shard, and moves no elements of other tensor-parallel ranks.
class Layout : public LayoutSpec, public std::enable_shared_from_this<Layout> {
 public:
  /// The root mesh.
  DeviceMesh mesh() const;
  /// The axes and sizes of the root mesh.
  const MeshShape& mesh_shape() const noexcept;

  /// The part that a rank of the root mesh holds, as boxes of the global tensor. It is one box, or one for
  /// each segment, in the order of the segments. A box may be empty. Axes with Partial or Replicate cut
  /// nothing. Without an argument, the part of this rank.
  std::vector<Box> parts(int rank) const;
  std::vector<Box> parts() const;
  /// The shape of the tensor that a rank holds: its boxes joined along the segmented dimension.
  Shape local_shape(int rank) const;
  const Shape& local_shape() const noexcept { return local_; }

  const Placement& on(std::string_view axis) const;
  /// The placement on `axes`, a sub-mesh of one or more axes of the same root, which all have the same
  /// placement. Throws layout for axes of another root, and for axes with different placements: `layout:
  /// Shard(0) on dp and Replicate on tp; expected one placement on dp,tp`.
  const Placement& on(const DeviceMesh& axes) const;
  bool replicated() const noexcept;  ///< on all axes
  bool partial() const noexcept;     ///< on any axis

  /// This layout with other placements on some axes or on all axes, or with another global shape. The results
  /// are interned. If `axes` has several axes, they nest in their order. Otherwise the nesting stays.
  /// with_global() throws layout if the segmented dimension would change.
  LayoutRef with(std::string_view axis, const Placement& placement) const;
  LayoutRef with(const DeviceMesh& axes, const Placement& placement) const;
  LayoutRef with(Placements placements) const;
  LayoutRef with_global(const Shape& global) const;
  /// This layout, but `axes` shard dimension `dim` inside all other axes that shard it.
  LayoutRef shard_inside(const DeviceMesh& axes, int dim) const;
  /// This layout, but the named axes nest in this order, outermost first. The other axes do not move.
  LayoutRef nested(std::initializer_list<std::string_view> axes) const;
  LayoutRef nested(std::span<const std::string_view> axes) const;
  /// This layout, but dimension `dim` consists of segments of these sizes. Throws layout if the sizes do not
  /// add up to the dimension.
  LayoutRef segmented(int dim, std::vector<std::int64_t> sizes) const;
  /// The layout of the same elements as a tensor of another shape. Each rank keeps its elements in place. For
  /// example, (b, s, h·d) Shard(2) becomes (b, s, h, d) Shard(2), and back, if the cuts are at the borders of
  /// heads. A cut of one dimension stays a cut of one dimension. The new layout keeps segments if their
  /// dimension is cut. Otherwise it keeps them if possible. Throws layout if a rank's part would not be a
  /// part of a tensor of that shape (`layout: (2, 36) as [tp: Shard(1)] becomes (2, 6, 6), of which no
  /// dimension is cut on tp=4 where that is cut: a boundary must gather it first`), and for a shape of
  /// another number of elements. For tensors: reshape(), weft/mesh/reshape.hpp.
  LayoutRef reshaped(const Shape& global) const;
  /// The layout of the tensor whose dimension i is dimension order[i] of this layout's tensor. Throws layout
  /// unless `order` has each dimension once.
  LayoutRef transposed(const Dims& order) const;

 private:
  friend class LayoutTable;
  Layout(std::shared_ptr<MeshState> state, LayoutSpec spec);
  LayoutRef made(LayoutSpec spec) const;
  void check_root(const DeviceMesh& axes) const;
  const std::shared_ptr<MeshState> state_;
  const Shape local_;  // this rank's
};
/// "(7, 4) as [dp: Shard(0), tp: Replicate]"; "(12, 4) as [dp: Shard(0), tp: Shard(0)] nested tp, dp in
/// segments 4, 4, 4 of dimension 0"
std::string to_string(const Layout& layout);

/// The layout of a tensor of shape `global`. `mesh` must be a root, and `placements` must have one entry per
/// axis. Throws layout if a sharded dimension does not exist, or if the placements mix reductions that do not
/// commute (Partial(sum) on one axis, Partial(max) on another).
LayoutRef make_layout(const DeviceMesh& mesh, Placements placements, const Shape& global);
/// Like the function above, with named axes: make_layout(mesh, {{"tp", Shard{0}}}, {8, 4}). `mesh` may be a
/// sub-mesh. The layout is for its root. Axes that are not named are Replicate.
LayoutRef make_layout(const DeviceMesh& mesh,
                      std::initializer_list<std::pair<std::string_view, Placement>> placements,
                      const Shape& global);
/// A layout that is Replicate on every axis of the root of `mesh`.
LayoutRef replicated_layout(const DeviceMesh& mesh, const Shape& global);

/// States that `local` is this rank's part of a tensor of that layout (PyTorch: DTensor.from_local). No data
/// moves. Throws layout if the part has another shape: `as_layout: the tensor is (3, 4); rank 1 of (7, 4) as
/// [dp: Shard(0)] holds (2, 4)`. Throws bad_argument if it has no memory or `layout` is null.
Tensor as_layout(const Tensor& local, const LayoutRef& layout);

/// The placement of a tensor on `axes` (a sub-mesh of one or more axes, which all have the same placement). A
/// plain tensor, which has no layout, counts as Replicate on axes of one rank. On axes of several ranks it
/// gives a layout error: `<what> is a plain tensor; on tp=2 it needs a layout, which says what part of the
/// whole it is`.
Placement placement_on(const LayoutRef& layout, const DeviceMesh& axes, const TensorName& what);
inline Placement placement_on(const Tensor& t, const DeviceMesh& axes, const TensorName& what) {
  return placement_on(t.layout(), axes, what);
}

/// Throws a layout error unless the tensor has the placement `expected` on `axes`, nested in the order of
/// `axes`: `<what> is Replicate on tp=2; expected Shard(2)`. `what` names the layer and the tensor:
/// "layers.0.mlp.down: x". On axes of one rank all placements mean the same, so it checks nothing. Also
/// throws layout if `axes` belong to another mesh.
void expect_layout(const LayoutRef& layout, const DeviceMesh& axes, const Placement& expected,
                   const TensorName& what);
inline void expect_layout(const Tensor& t, const DeviceMesh& axes, const Placement& expected,
                          const TensorName& what) {
  expect_layout(t.layout(), axes, expected, what);
}

}  // namespace weft
