// The built-in transport: ranks are threads or processes of one host.
//
// A collective begins with an arrival line (arrival). A small payload travels beside it (inline_path).
// Otherwise the ranks, having compared what they called, take the direct path, on memory that all can reach
// (direct), or the staged one, through the group's own buffers (staged). Messages between two ranks have
// rings of their own (pairs). Death, abort and quiescence are in failure; how ranks find each other is in
// init.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// BackendFactory of "shm". Throws unsupported where the ranks are not on one host or not one user's, timeout
/// naming the ranks that did not come, bad_argument for an unknown forced path.
std::unique_ptr<Backend> make_shm_backend(const GroupInit& init);

}  // namespace weft
