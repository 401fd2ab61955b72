// The state that all handles of one mesh share: the root group, the groups made so far, the layouts in use.
// Thread-safe.
#pragma once

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
  /// `group` null: a mesh that cannot communicate.
  MeshState(Context& context, ProcessGroup* group, MeshShape shape, int rank);
  MeshState(ProcessGroup&& group, const MeshShape& shape);
  /// The same ranks, with `parts` in the place of one axis.
  static std::shared_ptr<MeshState> unflattened(const std::shared_ptr<MeshState>& whole, int axis,
                                                const MeshShape& parts);
  /// The parts of an axis that unflatten() divided; null: there is none of that name.
  const std::vector<int>* axes_taken_apart(std::string_view name) const noexcept;

  Context& context() const noexcept { return context_; }
  const MeshShape& shape() const noexcept { return shape_; }
  int rank() const noexcept { return rank_; }

  /// Root ranks of the sub-mesh along `axes` (indices of axes of the root mesh) that holds this rank,
  /// row-major in the order given.
  std::vector<int> ranks_along(const std::vector<int>& axes) const;
  /// The group of those ranks. The first call is collective among them. The first of all compares the mesh
  /// with that of the ranks that were here before, and does not wait for the others.
  ProcessGroup& group_along(const std::vector<int>& axes);
  /// The numbers for users of that group. No communication; works on a mesh that cannot communicate, too.
  std::shared_ptr<UserNumbers> users_along(const std::vector<int>& axes);

  LayoutTable& layouts() noexcept { return layouts_; }

  /// The node that handles of the whole mesh point to (DeviceMesh::Node), made by the first call.
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
  /// The root group; there is one. Throws bad_argument if it was borrowed and is gone.
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
  std::shared_ptr<MeshState> whole_;  // whose axis was taken apart: it keeps the group
  std::map<std::string, std::vector<int>, std::less<>> taken_apart_;
  std::mutex groups_mutex_;
  std::map<std::vector<int>, std::unique_ptr<LazyGroup>> groups_;
  LayoutTable layouts_;
  std::once_flag root_node_made_;
  std::shared_ptr<const void> root_node_;
};

}  // namespace weft
