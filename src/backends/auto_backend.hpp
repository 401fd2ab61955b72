// The backend "auto": chooses the transport of a group if the program does not.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// Collective over the ranks of `b`. Chooses shm if all ranks share memory; otherwise the MPI under whose
/// mpirun the ranks run, if all ranks can load it; otherwise gloo. Logs at level info which transport it
/// chose, and why.
std::unique_ptr<Backend> make_auto_backend(const GroupInit& b);

}  // namespace weft
