// Makes a group of the ranks that survived a failure; see ProcessGroup::shrink.
#pragma once

#include "group/group_state.hpp"

namespace weft {

/// Blocks as ProcessGroup::shrink says. One thread at a time per group: others wait.
GroupState* shrink(GroupState& group, Duration limit);

}  // namespace weft
