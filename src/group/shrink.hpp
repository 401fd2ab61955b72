// What is left of a group after a failure, as a group of its own; see ProcessGroup::shrink.
#pragma once

#include "group/group_state.hpp"

namespace weft {

/// Blocks as ProcessGroup::shrink says. One thread at a time per group: others wait.
GroupState* shrink(GroupState& group, Duration limit);

}  // namespace weft
