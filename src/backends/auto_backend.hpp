// The backend "auto": which transport a group gets when the program does not say.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// Collective over the ranks of `b`: shm where all share memory, else the MPI under whose mpirun they run, if
/// all can load it, else gloo. Logs at level info what it chose, and why.
std::unique_ptr<Backend> make_auto_backend(const GroupInit& b);

}  // namespace weft
