#include "store/launch.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/text/plain_streams.hpp"
#include "store/rendezvous_file.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/store/store.hpp"

namespace weft {
namespace {

/// The variables of one launcher. The launcher counts as present if its rank or size is set.
struct Variables {
  Launcher launcher;
  const char* rank;
  const char* size;
  const char* local_size;  ///< ranks on this host
};

constexpr Variables kVariables[] = {
    {Launcher::weft, "WEFT_RANK", "WEFT_WORLD_SIZE", nullptr},
    {Launcher::torchrun, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"},
    {Launcher::openmpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {Launcher::hydra, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
    {Launcher::slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", nullptr},
};

const Variables& variables_of(Launcher launcher) {
  for (const Variables& v : kVariables)
    if (v.launcher == launcher) return v;
  return kVariables[0];
}

/// Returns whether srun started this process. A batch script, and processes that it starts in other ways,
/// also have Slurm's variables, but no step number, or a reserved number from 2^32 - 16 on.
bool in_slurm_step() {
  constexpr std::int64_t kReserved = 0xfffffff0;
  if (!env::get("SLURM_STEP_ID") || !env::get("SLURM_PROCID")) return false;
  return *env::get_int("SLURM_STEP_ID", 0, UINT_MAX) < kReserved;
}

bool present(const Variables& v) {
  if (v.launcher == Launcher::slurm) return in_slurm_step();
  return env::get(v.rank) || env::get(v.size);
}

LaunchInfo read_launch_info(const Variables& v, const char* because) {
  LaunchInfo launch{.launcher = v.launcher, .rank_name = v.rank, .size_name = v.size};
  if (v.launcher == Launcher::slurm && !env::get(v.size)) launch.size_name = "SLURM_NTASKS";  // older Slurm
  launch.size =
      static_cast<int>(required_int(launch.size_name, env::get(v.rank) ? v.rank : because, 1, kMaxRanks));
  launch.rank = static_cast<int>(required_int(launch.rank_name, launch.size_name, 0, INT_MAX));
  if (launch.rank >= launch.size) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is \"{}\"; expected 0 to {} ({} is {})", launch.rank_name, launch.rank,
                            launch.size - 1, launch.size_name, launch.size));
  }
  return launch;
}

bool same(const LaunchInfo& a, const LaunchInfo& b) { return a.rank == b.rank && a.size == b.size; }

/// Returns Hydra's proxy: one process for all ranks of a host. It is an ancestor of each rank, but need not
/// be the parent, because scripts may have started the ranks.
pid_t hydra_proxy() {
  pid_t process = ::getppid();
  for (int up = 0; up < 32 && process > 1; ++up) {
    FileIn status(fmt::format("/proc/{}/status", process));
    std::string line, comm;
    pid_t parent = 0;
    while (std::getline(status, line)) {
      TextIn words(line);
      std::string key;
      words >> key;
      if (key == "Name:") words >> comm;
      if (key == "PPid:") words >> parent;
    }
    if (comm.starts_with("hydra_")) return process;
    process = parent;
  }
  return ::getppid();
}

}  // namespace

std::int64_t required_int(const char* name, const char* because, std::int64_t min, std::int64_t max) {
  const auto value = env::get_int(name, min, max);
  if (!value) {
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{} is not set, but {} is; expected an integer from {} to {}", name, because, min, max));
  }
  return *value;
}

const char* name(Launcher launcher) noexcept {
  switch (launcher) {
    case Launcher::none: return "none";
    case Launcher::weft: return "weft run";
    case Launcher::torchrun: return "torchrun";
    case Launcher::openmpi: return "Open MPI";
    case Launcher::hydra: return "Hydra";
    case Launcher::slurm: return "Slurm";
  }
  return "?";
}

LaunchInfo find_launch_info(Context& context) {
  std::vector<LaunchInfo> launch_infos;
  for (const Variables& v : kVariables) {
    if (!present(v)) continue;
    // Variables that are not used may have wrong values.
    if (launch_infos.empty() || (env::get(v.rank) && env::get(v.size)))
      launch_infos.push_back(read_launch_info(v, v.size));
  }
  if (launch_infos.empty()) {
    // Only some of a launcher's variables are set. They give the place to meet, but no rank.
    if (env::get("WEFT_STORE")) return read_launch_info(variables_of(Launcher::weft), "WEFT_STORE");
    for (const char* where : {"MASTER_PORT", "MASTER_ADDR"})
      if (env::get(where)) return read_launch_info(variables_of(Launcher::torchrun), where);
    return {};
  }
  const bool by_srun = launch_infos.size() == 2 && launch_infos[0].launcher == Launcher::hydra &&
                       same(launch_infos[0], launch_infos[1]);
  if (by_srun) std::swap(launch_infos[0], launch_infos[1]);
  const LaunchInfo& launch = launch_infos[0];
  std::vector<std::string> others;
  for (std::size_t i = 1; i < launch_infos.size(); ++i) others.emplace_back(name(launch_infos[i].launcher));
  Logger& log = context.log();
  if (log.enabled(LogLayer::store, LogLevel::info))
    log.write(
        LogLayer::store, LogLevel::info,
        fmt::format("rendezvous: rank {} of {} by {} ({}, {}){}", launch.rank, launch.size,
                    name(launch.launcher), launch.rank_name, launch.size_name,
                    others.empty() ? "" : fmt::format("; set, but not used: {}", fmt::join(others, ", "))));
  // If `mpirun` runs inside `weft run`, all its processes have the same WEFT_RANK.
  for (const LaunchInfo& other : launch_infos) {
    // an allocation of Slurm may contain jobs of other launchers
    if (other.launcher == Launcher::slurm || same(launch, other)) continue;
    log.write(LogLayer::store, LogLevel::warning,
              fmt::format("rendezvous: {} and {} say rank {} of {}, but {} and {} say rank {} of {}; the "
                          "first two are used",
                          launch.rank_name, launch.size_name, launch.rank, launch.size, other.rank_name,
                          other.size_name, other.rank, other.size));
  }
  return launch;
}

std::string job_of(const LaunchInfo& launch) {
  const auto value = [](const char* variable) { return env::get(variable).value_or(""); };
  switch (launch.launcher) {
    case Launcher::none:
    case Launcher::weft: return "";
    case Launcher::torchrun:
      if (!env::get("TORCHELASTIC_RUN_ID")) return "";
      return fmt::format("torchrun {}:{} {} {}", value("MASTER_ADDR"), value("MASTER_PORT"),
                         value("TORCHELASTIC_RUN_ID"), value("TORCHELASTIC_RESTART_COUNT"));
    case Launcher::openmpi: {
      const auto job = env::get("PMIX_NAMESPACE");
      const auto old = env::get("OMPI_MCA_ess_base_jobid");
      return job || old ? fmt::format("openmpi {}", job ? *job : *old) : "";
    }
    case Launcher::hydra: {
      // Each host has its own proxy, and no other value of Hydra identifies the job on several hosts.
      if (const auto here = env::get("MPI_LOCALNRANKS"); here && *here != std::to_string(launch.size))
        return "hydra";
      const pid_t proxy = hydra_proxy();
      return fmt::format("hydra {} {}", proxy, start_time_of(proxy).value_or(0));
    }
    case Launcher::slurm:
      return fmt::format("slurm {}.{} {}", value("SLURM_JOB_ID"), value("SLURM_STEP_ID"),
                         value("SLURM_RESTART_COUNT"));
  }
  return "";
}

std::string batch_job() {
  for (const char* name : {"TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                           "SLURM_HET_JOB_ID", "SLURM_JOB_ID"}) {
    auto value = env::get(name);
    if (!value || value->empty()) continue;
    std::replace_if(
        value->begin(), value->end(), [](char c) { return c <= ' ' || c > '~'; }, '_');
    return fmt::format("{}={}", name, value->substr(0, 128));
  }
  return "";
}

void require_one_host(const LaunchInfo& launch) {
  const auto several = [&](const std::string& because) {
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("WEFT_STORE is not set, but the job spans several hosts ({}); expected host:port of "
                    "rank 0's host, or file:///path on a file system that all share",
                    because));
  };
  if (const char* local = variables_of(launch.launcher).local_size) {
    const auto here = env::get_int(local, 1, INT_MAX);
    if (here && *here < launch.size)
      several(fmt::format("{} is {}, {} is {}", local, *here, launch.size_name, launch.size));
  }
  if (launch.launcher == Launcher::slurm) {
    for (const char* nodes : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}) {
      const auto count = env::get_int(nodes, 1, INT_MAX);
      if (count && *count > 1) several(fmt::format("{} is {}", nodes, *count));
      if (count) break;
    }
  }
}

}  // namespace weft
