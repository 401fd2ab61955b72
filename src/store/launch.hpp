// Determines which launcher started this process. Knows the variables by which launchers give a process its
// rank, and decides which variables weft uses if several are set. docs/rendezvous.md has the table for users.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "weft/host/context.hpp"

namespace weft {

enum class Launcher : std::uint8_t { none, weft, torchrun, openmpi, hydra, slurm };
/// "weft run", "torchrun", "Open MPI", …
const char* name(Launcher launcher) noexcept;

/// This process's place in its job, and the variables that gave it.
struct LaunchInfo {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  const char* rank_name = "";
  const char* size_name = "";
};

/// The launcher whose variables weft uses. It is the first present launcher in the enum's order, but Slurm is
/// before Hydra if both give the same rank and size, because srun also sets Hydra's variables. Logs at level
/// info which launcher was chosen and which were not. Throws bad_argument, naming the variable, if a variable
/// is wrong.
LaunchInfo find_launch_info(Context& context);

/// The launcher's name for the job, different in every job of this user on this host. Empty if it has
/// none.
std::string job_of(const LaunchInfo& launch);

/// Returns the job of the launcher or batch system in which this process runs, as one word "variable=value",
/// no matter which of them has set the rank. Empty if there is none.
std::string batch_job();

/// Throws bad_argument if the launcher reports that not all ranks are on this host: then they cannot meet
/// through a file.
void require_one_host(const LaunchInfo& launch);

/// Reads the variable `name`, which must be set because the variable `because` is set.
std::int64_t required_int(const char* name, const char* because, std::int64_t min, std::int64_t max);

}  // namespace weft
