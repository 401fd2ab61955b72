// Finds the limit because of which a thread or a process could not be made, if it is the cgroup's limit. Any
// thread.
#pragma once

#include <string>
#include <string_view>

namespace weft {

/// The pids.max of the nearest of this process's cgroups that has no room for another thread; empty if none
/// of them lacks room. `groups`: what /proc/self/cgroup holds; `mount`: where cgroups are mounted.
std::string met_pids_max(std::string_view groups, const std::string& mount);
/// Like met_pids_max() above, for this process.
std::string met_pids_max();

}  // namespace weft
