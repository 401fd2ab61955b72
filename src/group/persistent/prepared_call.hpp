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

/// The PersistentCall owns it, together with the slots of calls in flight that use its blocks.
struct PreparedCall {
  GroupState* group = nullptr;  ///< alive as long as its users have not ended
  std::shared_ptr<UserNumbers> users;
  OpState op;                 ///< without a number; in a group of one rank: of its own block
  std::vector<Block> blocks;  ///< `op` points into it; empty: equal blocks
  Duration deadline{};
  bool collective = false;
  bool alone = false;  ///< a group of one rank, if nothing goes to the backend
  bool plain = false;  ///< neither that, nor on a stream, nor with blocks, nor from any source
  // The call that was started last, if any.
  bool begun = false;
  std::uint32_t slot = 0, ticket = 0;
  std::string tail;  ///< of texts, once the group is gone

  /// The members of `op` that are not the backend's own.
  void copy_to(OpState& to) const noexcept {
    static_assert(std::is_trivially_copyable_v<OpState> && std::is_standard_layout_v<OpState>);
    std::memcpy(static_cast<void*>(&to), &op, offsetof(OpState, scratch));
  }
};

}  // namespace detail

}  // namespace weft
