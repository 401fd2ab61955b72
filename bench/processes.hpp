// Ranks as processes of this host, for our programs and for peers that have no launcher of their own.
#pragma once

#include <functional>
#include <memory>

#include "weft/backends/store.hpp"

namespace weft::bench {

/// Runs body(rank, store) in n processes of this host, which meet in `store`; returns 0 where all bodies did
/// not throw. Call it before the program has any thread. The first process that fails ends the others.
int run_processes(int n, const std::function<void(int rank, std::shared_ptr<Store> store)>& body);

/// Keeps this thread, and those it makes, on core `rank` of the usable ones, as mpirun does. Does nothing and
/// returns false where there are fewer cores than ranks.
bool bind_to_core(int rank, int ranks);

}  // namespace weft::bench
