// Ranks arranged as a grid with named axes. MeshShape has only the arithmetic. DeviceMesh adds this rank's
// place in the grid and the groups along its axes. Any thread may call the functions. Functions that
// communicate say so.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/group/process_group.hpp"

namespace weft {

/// One axis of a mesh. As an argument, one size may be -1: the number of ranks divided by the other sizes.
struct MeshAxis {
  std::string name;
  int size = 1;
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

/// Names and sizes of a grid of ranks. A value; pure functions. Row-major: neighbours along the last axis
/// have neighbouring ranks.
class MeshShape {
 public:
  MeshShape() = default;
  /// Throws bad_argument for an empty or repeated name, or a size below 1, except a single -1.
  MeshShape(std::initializer_list<MeshAxis> axes);
  explicit MeshShape(std::vector<MeshAxis> axes);

  /// Returns this shape for `ranks` ranks (1 or more). The size -1 is replaced by the size that fits. Throws
  /// bad_argument if the sizes do not fit the ranks. The text shows the calculation: `mesh: 6 ranks do not
  /// divide into tensor=4 x domain=1`, `mesh: dp=2 x tp=2 = 4 ranks; the group has 6`.
  MeshShape fit(int ranks) const;

  int axis_count() const noexcept { return static_cast<int>(axes_.size()); }
  std::span<const MeshAxis> axes() const noexcept { return axes_; }
  /// The number of ranks: the product of all sizes.
  int size() const noexcept;
  /// The size of one axis, by its number or name. Throws bad_argument if there is no such axis.
  int size(int axis) const { return checked(axis).size; }
  int size(std::string_view axis) const { return size(index(axis)); }
  const std::string& name(int axis) const { return checked(axis).name; }
  bool has(std::string_view axis) const noexcept;
  /// The index of an axis. Throws bad_argument if there is none: `mesh: no axis "pp" in dp=2 x tp=2`.
  int index(std::string_view axis) const;

  /// Convert a rank to coordinates, and back. Throw bad_argument if an argument is out of range.
  std::vector<int> coordinates(int rank) const;
  int coordinate(int rank, int axis) const;
  int rank(std::span<const int> coordinates) const;

  friend bool operator==(const MeshShape&, const MeshShape&) = default;

 private:
  const MeshAxis& checked(int axis) const {
    if (static_cast<std::size_t>(axis) >= axes_.size()) throw_no_axis(axis);  // a negative one, too
    return axes_[static_cast<std::size_t>(axis)];
  }
  [[noreturn]] void throw_no_axis(int axis) const;
  std::vector<MeshAxis> axes_;
};

/// "dp=2 x tp=2"
std::string to_string(const MeshShape& shape);

class MeshState;

namespace detail {
class MeshAccess;  // of weft's own layers
}

/// A mesh as one of its ranks sees it. Or a sub-mesh: the ranks that share this rank's coordinates on all
/// other axes. A cheap handle: copies and sub-meshes share the root's state. Thread-safe. Equal handles (==)
/// name the same axes of the same root. Every function of an empty handle (made by default, or moved from)
/// throws bad_argument. Every function with an empty mesh as argument does so, too: `boundary: axes is an
/// empty DeviceMesh, made by default or moved from`.
///
/// A Layout keeps its mesh. A borrowed group must exist longer than the mesh and its layouts.
class DeviceMesh {
 public:
  DeviceMesh() = default;
  /// A mesh over all ranks of `group`. The mesh takes ownership of the group, or borrows it. A borrowed group
  /// must exist longer than the mesh. No communication. The ranks compare their axes when the first group of
  /// the mesh is made. Throws bad_argument if the sizes do not fit the number of ranks. The text shows the
  /// calculation (MeshShape::fit).
  DeviceMesh(ProcessGroup&& group, const MeshShape& shape);
  DeviceMesh(ProcessGroup& group, const MeshShape& shape);
  /// A mesh without communication, as `rank` sees it (for planning in one process, or for a serial
  /// reference). Layouts and slices need only arithmetic and work. group() throws unsupported.
  static DeviceMesh arithmetic(Context& context, const MeshShape& shape, int rank);

  explicit operator bool() const noexcept { return node_ != nullptr; }

  /// This rank's sub-mesh along one axis, or along several in the given order: mesh["tp"], mesh[{"tp",
  /// "dp"}]. If unflatten() divided an axis, its old name means all its parts together. An axis of size 1
  /// gives a sub-mesh of one rank. Throws bad_argument if an axis does not exist. The text names the axis.
  DeviceMesh operator[](std::string_view axis) const;
  DeviceMesh operator[](std::initializer_list<const char*> axes) const;
  DeviceMesh submesh(std::span<const std::string> axes) const;
  /// This mesh with all axes joined to one, called `name`. The ranks are in row-major order.
  DeviceMesh flatten(std::string name) const;
  /// A mesh of the same ranks in which an axis is divided into several: mesh.unflatten("tp", {{"kv", 2},
  /// {"rep", -1}}). The result is another root mesh with its own layouts. In the result, the old name means
  /// the new axes together: its ["tp"] is [kv, rep]. No communication. Throws bad_argument if the sizes do
  /// not fit, or if this mesh is not a root.
  DeviceMesh unflatten(std::string_view axis, const MeshShape& parts) const;
  /// The axes of this mesh, each as a separate mesh of one axis of the root, in the order of this mesh.
  std::vector<DeviceMesh> each_axis() const;
  /// The mesh from which this mesh was cut. A root is its own root.
  DeviceMesh root() const;
  bool is_root() const;

  const MeshShape& shape() const;
  /// The number of ranks in this mesh, or along one axis.
  int size() const { return shape().size(); }
  int size(std::string_view axis) const { return shape().size(axis); }
  bool has(std::string_view axis) const { return shape().has(axis); }
  /// This rank's number within this mesh (row-major over its axes), or its coordinate along one axis.
  int rank() const;
  int coordinate(std::string_view axis) const;
  /// The names of the axes, joined by commas: "tp", "dp,tp".
  std::string name() const;
  /// The ranks of this mesh in the root's numbering, in the order of their rank() in this mesh.
  std::vector<int> ranks() const;
  /// For each axis of this mesh, in order, its index among the axes of the root.
  std::span<const int> root_axes() const;

  /// The group of this mesh's ranks, numbered as rank() numbers them. The first call makes the group, and is
  /// collective among these ranks only. The root mesh keeps at most one group per list of axes. When the
  /// first group of a mesh is made, its ranks compare the mesh. It throws mismatch if their names, sizes or
  /// orders of axes differ, or if one rank made another mesh of the same group before. Throws unsupported on
  /// an arithmetic mesh.
  ProcessGroup& group() const;
  /// The Context in which tensors over this mesh are allocated.
  Context& context() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) noexcept;

 private:
  friend class detail::MeshAccess;
  struct Node;
  const Node& node(std::string_view what) const;
  explicit DeviceMesh(const std::shared_ptr<MeshState>& state);
  explicit DeviceMesh(std::shared_ptr<const Node> node) : node_(std::move(node)) {}
  std::vector<int> axes_called(const std::string& name) const;
  std::shared_ptr<const Node> node_;
};

}  // namespace weft
