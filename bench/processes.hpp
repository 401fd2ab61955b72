// Ranks as processes of this host, for our programs and for peers that have no launcher of their own.
#pragma once

#include <functional>
#include <memory>

#include "cases.hpp"
#include "weft/store/store.hpp"

namespace weft::bench {

/// Runs body(rank, store) in n processes of this host, which meet in `store`; returns 0 if all bodies did
/// not throw. Call it before the program has any thread. The first process that fails ends the others.
int run_processes(int n, const std::function<void(int rank, std::shared_ptr<Store> store)>& body);

/// Keeps this thread, and those it makes, on core `rank` of the usable ones, as mpirun does, or on a share of
/// them. Does nothing if there are fewer cores than ranks.
void bind_to_cores(int rank, int ranks, Bind bind = Bind::cores);

}  // namespace weft::bench
