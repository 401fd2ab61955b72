// The built-in transport: ranks are threads or processes of one host.
//
// A collective begins with an arrival line (collectives/arrivals.hpp). A small payload travels with it
// (inline_path.hpp). Otherwise the ranks compare what they called and take one of three paths:
// direct_path.hpp where all can reach the memory, single_path.hpp where the kernel copies, staged_path.hpp
// through the group's buffers. messages.hpp: point to point. failure.cpp: death, abort, quiesce.
// group_init.cpp: how ranks find each other.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// BackendFactory of "shm". Throws unsupported where the ranks are not on one host or not one user's, timeout
/// naming the ranks that did not come, bad_argument for an unknown forced path.
std::unique_ptr<Backend> make_shm_backend(const GroupInit& init);

}  // namespace weft
