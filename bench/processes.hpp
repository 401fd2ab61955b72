// Runs ranks as processes of this host, for weft's programs and for peers without a launcher of their own.
#pragma once

#include <functional>
#include <memory>

#include "cases.hpp"
#include "weft/store/store.hpp"

namespace weft::bench {

/// Runs body(rank, store) in n processes of this host, which find each other through `store`. Returns 0 if no
/// body threw. Call it before the program has any thread. If a process fails, the parent ends the others.
int run_processes(int n, const std::function<void(int rank, std::shared_ptr<Store> store)>& body);

/// Pins this thread, and threads that it creates, as `bind` says. Bind::cores: to the rank-th usable core, as
/// mpirun does. Bind::share: to the rank-th equal share of the usable cores. Bind::none: not at all. Does
/// nothing if there are fewer cores than ranks.
void bind_to_cores(int rank, int ranks, Bind bind = Bind::cores);

}  // namespace weft::bench
