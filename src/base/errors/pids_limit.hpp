// If the system refused a thread or a process because of a cgroup's limit, finds this limit. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace weft {

/// Returns the pids.max of the nearest of this process's cgroups that has no room for another thread. Returns
/// an empty text if all of them have room. `groups`: the contents of /proc/self/cgroup; `mount`: the folder
/// at which cgroups are mounted.
std::string met_pids_max(std::string_view groups, const std::string& mount);
/// Like met_pids_max() above, for this process.
std::string met_pids_max();

}  // namespace weft
