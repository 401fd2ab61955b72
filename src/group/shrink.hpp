// Makes a group of the ranks that survived a failure; see ProcessGroup::shrink.
#pragma once

#include "group/group_state.hpp"

namespace weft {

/// Implements ProcessGroup::shrink, whose comment says when it blocks. Only one thread at a time runs it for
/// a group. Other threads wait.
GroupState* shrink(GroupState& group, Duration limit);

}  // namespace weft
