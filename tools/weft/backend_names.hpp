// The available transports, by the names of their files: none is loaded.
#pragma once

#include <string>
#include <vector>

namespace weft::tools {

/// "auto", "shm" and every plug-in in the folders in which weft looks for them.
std::vector<std::string> backend_names();
/// The fault of that name: `there is no transport "nope"; expected one of auto, shm, gloo`. Returns "" if
/// there is none.
std::string unknown_backend(const std::string& name, const std::vector<std::string>& names);

}  // namespace weft::tools
