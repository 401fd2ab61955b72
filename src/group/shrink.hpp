// Makes a group of the ranks that survived a failure; see ProcessGroup::shrink.
#pragma once

#include "group/group_state.hpp"

namespace weft {

/// Blocks as ProcessGroup::shrink documents. Only one thread at a time runs it for a group: other threads
/// wait.
GroupState* shrink(GroupState& group, Duration limit);

}  // namespace weft
