// The built-in transport: ranks are threads or processes of one host.
//
// A collective begins with an arrival line (collectives/arrivals.hpp). A small payload travels with it
// (inline_path.hpp). Otherwise the ranks compare their calls, and take one of three paths. They take
// direct_path.hpp if all ranks can access the memory, single_path.hpp if the kernel copies, and
// staged_path.hpp through the group's buffers. Other files: messages.hpp for point-to-point messages;
// failure.cpp for death, abort and quiesce; group_init.cpp for the way in which ranks find each other.
#pragma once

#include <memory>

#include "weft/backends/backend.hpp"

namespace weft {

/// The BackendFactory of "shm". Throws unsupported if the ranks are not on one host or belong to different
/// users, timeout that names the missing ranks, and bad_argument for an unknown forced path.
std::unique_ptr<Backend> make_shm_backend(const GroupInit& init);

}  // namespace weft
