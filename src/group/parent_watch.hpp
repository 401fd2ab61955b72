// Ends the making of a subgroup when its parent, the group from which it is made, fails. Used by the thread
// that makes the subgroup, and by threads of the transport that wait in the store for the subgroup.
//
// A rank that waits for the other ranks of the subgroup waits in the store, which does not know which ranks
// are alive. But the parent knows, so each wait checks the parent from time to time. The wait ends if a
// member that has not arrived is lost to the parent. It also ends, a little later, if the parent has failed
// meanwhile for any other reason, because members may have failed for this reason. Every rank then throws the
// parent's first cause, which names the lost rank, and not a rank that gave up because of it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "group/group_state.hpp"
#include "store/forwarding_store.hpp"

namespace weft {

class ParentWatch {
 public:
  /// For a subgroup `name`. members[r] is the rank in `parent` of rank r of the subgroup.
  ParentWatch(GroupState& parent, std::string_view name, std::span<const int> members);
  ~ParentWatch() { end(); }
  ParentWatch(const ParentWatch&) = delete;
  ParentWatch& operator=(const ParentWatch&) = delete;
  /// The store to use while the subgroup is made; null if the parent has no store.
  std::shared_ptr<Store> store() const;
  /// Call it when the subgroup is made. Its store, which the subgroup may keep, then only forwards.
  void end() noexcept;
  /// The Error that subgroup() throws instead of `e`: the parent's first cause, if `e` may be a consequence
  /// of it and the parent had not failed before. Returns nothing if subgroup() throws `e` itself.
  std::optional<Error> cause(const Error& e) const;

 private:
  class WatchingStore;
  void look(std::string_view key, Store& store) const;
  std::vector<int> lost(std::string_view key, Store& store) const;

  GroupState& parent_;
  const std::string name_;
  const std::vector<int> members_;
  const bool known_;  // the parent had already failed: the members may be survivors that make a group
  const Clock::time_point began_ = Clock::now();
  std::shared_ptr<WatchingStore> store_;
};

}  // namespace weft
