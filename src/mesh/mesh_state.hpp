// What all handles of one mesh share: the root group, the groups made so far, the interned layouts.
// Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "weft/mesh/layout.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

class MeshState : public std::enable_shared_from_this<MeshState> {
 public:
  /// `group` null: a mesh that cannot communicate.
  MeshState(Context& context, ProcessGroup* group, MeshShape shape, int rank);
  MeshState(ProcessGroup&& group, const MeshShape& shape);

  Context& context() const noexcept { return context_; }
  const MeshShape& shape() const noexcept { return shape_; }
  int rank() const noexcept { return rank_; }

  /// Root ranks of the sub-mesh along `axes` (indices of axes of the root mesh) that holds this rank, row-major in the order
  /// given.
  std::vector<int> ranks_along(const std::vector<int>& axes) const;
  /// The group of those ranks. The first call is collective among them.
  ProcessGroup& group_along(const std::vector<int>& axes);

  /// The one shared Layout equal to these placements. The caller has checked them.
  LayoutRef intern(Placements placements, const Shape& global);

 private:
  struct LazyGroup {
    std::mutex
        making;  // of its own, so that two threads making two groups do not wait for each other's peers
    ProcessGroup group;
  };

  Context& context_;
  ProcessGroup owned_;
  ProcessGroup* root_;
  MeshShape shape_;
  int rank_;
  std::mutex groups_mutex_;
  std::map<std::vector<int>, std::unique_ptr<LazyGroup>> groups_;
  std::mutex layouts_mutex_;
  std::unordered_multimap<std::size_t, std::unique_ptr<const Layout>> layouts_;
};

}  // namespace weft
