// The state of a PersistentCall: a checked call, in the form that the backend gets.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "group/user_numbers.hpp"
#include "weft/backends/backend.hpp"
#include "weft/base/clock.hpp"

namespace weft {

class GroupState;

namespace detail {

/// Owned by the PersistentCall and by the slots of calls in flight that use its blocks.
struct PreparedCall {
  GroupState* group = nullptr;  ///< exists as long as users->ended() is false
  std::shared_ptr<UserNumbers> users;
  OpState op;  ///< without a number; in a group of one rank it describes the rank's own block
  std::vector<BufferBlock> blocks;  ///< `op` points into it; empty: equal blocks
  Duration deadline{};
  bool collective = false;
  bool alone = false;  ///< the group has one rank, and the call is not passed to the backend
  bool plain = false;  ///< not alone, and without a stream, blocks and any_source
  // The call that was started last, if any.
  bool begun = false;
  std::uint32_t slot = 0, ticket = 0;
  std::string tail;  ///< the end of error texts when the group is destroyed

  /// Copies the members of `op`, except for those that belong to the backend.
  void copy_to(OpState& to) const noexcept {
    static_assert(std::is_trivially_copyable_v<OpState> && std::is_standard_layout_v<OpState>);
    std::memcpy(static_cast<void*>(&to), &op, offsetof(OpState, scratch));
  }
};

}  // namespace detail

}  // namespace weft
