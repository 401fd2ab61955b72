// Which launcher started this process: the variables by which launchers tell a process its rank, and which of
// them are taken if several are set. docs/rendezvous.md has the table for users.
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

/// The launcher whose variables are taken: the first present one in the enum's order, but Slurm before Hydra
/// if both say the same (srun sets Hydra's variables, too). Logs at level info what was chosen and what was
/// not. Throws bad_argument naming the variable that is wrong.
LaunchInfo find_launch_info(Context& context);

/// The launcher's name for the job, different in every job of this user on this host; empty if it has
/// none.
std::string job_of(const LaunchInfo& launch);

/// "variable=value", one word, of the launcher's or batch system's job that this process runs in, whichever
/// of them set its rank; empty if there is none.
std::string batch_job();

/// Throws bad_argument if the launcher says that not all ranks are on this host: they cannot meet by a
/// file.
void require_one_host(const LaunchInfo& launch);

/// The variable, which must be there because `because` is.
std::int64_t required_int(const char* name, const char* because, std::int64_t min, std::int64_t max);

}  // namespace weft
