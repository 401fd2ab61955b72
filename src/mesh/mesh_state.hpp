// The state that all handles of one mesh share: the root group, the groups made so far, and the layouts in
// use. Thread-safe.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "group/user_numbers.hpp"
#include "mesh/layout_table.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

class MeshState : public std::enable_shared_from_this<MeshState> {
 public:
  /// If `group` is null, the mesh cannot communicate.
  MeshState(Context& context, ProcessGroup* group, MeshShape shape, int rank);
  MeshState(ProcessGroup&& group, const MeshShape& shape);
  /// A mesh of the same ranks, with `parts` in place of one axis.
  static std::shared_ptr<MeshState> unflattened(const std::shared_ptr<MeshState>& whole, int axis,
                                                const MeshShape& parts);
  /// The parts of an axis that unflatten() divided. Null if there is no such axis of that name.
  const std::vector<int>* axes_taken_apart(std::string_view name) const noexcept;

  Context& context() const noexcept { return context_; }
  const MeshShape& shape() const noexcept { return shape_; }
  int rank() const noexcept { return rank_; }

  /// The root ranks of the sub-mesh along `axes` (indices of axes of the root mesh) that contains this rank,
  /// row-major in the given order.
  std::vector<int> ranks_along(const std::vector<int>& axes) const;
  /// The group of these ranks. The first call is collective over them. The very first call compares the mesh
  /// with the mesh of the ranks that called earlier, and does not wait for the other ranks.
  ProcessGroup& group_along(const std::vector<int>& axes);
  /// The numbers for users of that group. It needs no communication, and also works on a mesh that cannot
  /// communicate.
  std::shared_ptr<UserNumbers> users_along(const std::vector<int>& axes);

  /// See weft/mesh/spread_failure.hpp.
  void spread_failure();

  LayoutTable& layouts() noexcept { return layouts_; }

  /// The node to which handles of the whole mesh point (DeviceMesh::Node). The first call makes it.
  template <class Make>
  const void* root_node(Make&& make) {
    std::call_once(root_node_made_, [&] { root_node_ = make(); });
    return root_node_.get();
  }

 private:
  struct LazyGroup {
    std::mutex
        making;  // of its own, so that two threads making two groups do not wait for each other's peers
    ProcessGroup group;
    const std::shared_ptr<UserNumbers> users = std::make_shared<UserNumbers>();
  };
  /// The root group, which must exist. Throws bad_argument if the group was borrowed and no longer exists.
  ProcessGroup& root() const;
  std::vector<int> longer(const std::vector<int>& axes) const;
  bool is_root_group(const std::vector<int>& ranks) const;
  LazyGroup& lazy_along(const std::vector<int>& longer);
  void expect_same_mesh();

  Context& context_;
  ProcessGroup owned_;
  ProcessGroup* root_;
  std::shared_ptr<const UserNumbers> root_users_;  // which outlive it
  int root_handles_gone_ = 0;                      // when the mesh was made
  MeshShape shape_;
  int rank_;
  int number_ = 0;  // among the meshes that this rank has made of the root group
  std::once_flag compared_;
  std::shared_ptr<MeshState> whole_;  // the mesh whose axis was divided, which keeps the group
  std::map<std::string, std::vector<int>, std::less<>> taken_apart_;
  std::atomic<bool> root_is_of_axes_ = false;  // whether axes that are not all axes have the root group
  std::mutex groups_mutex_;
  std::map<std::vector<int>, std::unique_ptr<LazyGroup>> groups_;
  LayoutTable layouts_;
  std::once_flag root_node_made_;
  std::shared_ptr<const void> root_node_;
};

namespace detail {

/// Access for weft's own layers. Programs do not need it.
class MeshAccess {
 public:
  /// Throws bad_argument if the mesh is empty.
  static MeshState& state(const DeviceMesh& mesh);
  /// The whole mesh.
  static DeviceMesh root(const std::shared_ptr<MeshState>& state) { return DeviceMesh(state); }
};

}  // namespace detail

}  // namespace weft
