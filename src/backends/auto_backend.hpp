// The backend "auto": chooses the transport of a group if the program does not.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// Collective over the ranks of `b`: shm if all share memory, otherwise the MPI under whose mpirun they run,
/// if all can load it, otherwise gloo. Logs at level info what it chose, and why.
std::unique_ptr<Backend> make_auto_backend(const GroupInit& b);

}  // namespace weft
