// The transport, after its ranks have joined. group_init.cpp lets them join.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>

#include "backends/mpi/process.hpp"
#include "weft/backends/backend.hpp"
#include "weft/backends/matching.hpp"

namespace weft::mpi {

struct Settings {
  bool safe = true, check = true;
  std::int64_t max_count = INT32_MAX;
  int cores = 0;  // how many cores the ranks of the group may use together
  UnexpectedLimits unexpected{};
};

/// Makes a backend over a communicator of the group's ranks, in the order of their ranks, whose error handler
/// returns.
std::unique_ptr<Backend> make_backend(const GroupInit& b, Process& process, MPI_Comm comm,
                                      const Settings& settings);

}  // namespace weft::mpi
