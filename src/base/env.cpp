#include "weft/base/env.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cstdlib>

#include "weft/base/error.hpp"

namespace weft::env {
namespace {

constexpr Variable kVariables[] = {
    {"WEFT_LOG", "warning", "the least important line that is still logged: error, warning, info or debug"},
    {"WEFT_TRACE", "none",
     "folder to which a rank's last calls are written, when a group fails and at every SIGUSR2"},
    {"WEFT_RANK", "RANK", "this process's rank in the job; set by weft run"},
    {"WEFT_WORLD_SIZE", "WORLD_SIZE", "ranks in the job; set by weft run"},
    {"WEFT_LOCAL_RANK", "LOCAL_RANK", "this process's rank among those of its host; set by weft run"},
    {"WEFT_STORE", "what the launcher gives",
     "where ranks meet: host:port, [IPv6 address]:port or file:///path; set by weft run"},
    {"WEFT_STORE_SECRET_FILE", "none",
     "file, of mode 0600, with the secret by which ranks know each other where WEFT_STORE is off loopback"},
    {"WEFT_STORE_SECRET", "none", "that secret itself, where there is no file; 16 bytes or more", true},
    {"WEFT_JOB", "what the launcher gives",
     "token that keeps jobs that share a store apart; set by weft run"},
    {"WEFT_TERMINAL", "0",
     "1 where weft run writes to a terminal: progress bars may be drawn; set by weft run"},
    {"RANK", "0", "as WEFT_RANK, set by torchrun"},
    {"WORLD_SIZE", "1", "as WEFT_WORLD_SIZE, set by torchrun"},
    {"LOCAL_RANK", "RANK", "as WEFT_LOCAL_RANK, set by torchrun"},
    {"MASTER_ADDR", "127.0.0.1", "host of the store, set by torchrun"},
    {"MASTER_PORT", "none", "port of the store, which rank 0 serves; set by torchrun"},
    {"LOCAL_WORLD_SIZE", "WORLD_SIZE", "ranks on this host, set by torchrun"},
    {"TORCHELASTIC_USE_AGENT_STORE", "False",
     "True where torchrun itself listens on MASTER_PORT: rank 0 serves elsewhere, told in a file"},
    {"TORCHELASTIC_RUN_ID", "none", "name of the job, set by torchrun"},
    {"TORCHELASTIC_RESTART_COUNT", "0", "how often torchrun has started the ranks again"},
    {"OMPI_COMM_WORLD_RANK", "0", "as WEFT_RANK, set by Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_SIZE", "1", "as WEFT_WORLD_SIZE, set by Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE", "ranks on this host, set by Open MPI's mpirun"},
    {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "name of the job, set by Open MPI's mpirun"},
    {"OMPI_MCA_ess_base_jobid", "none", "name of the job, set by Open MPI's mpirun before version 5"},
    {"PMI_RANK", "0", "as WEFT_RANK, set by Hydra (MPICH's mpirun) and by srun --mpi=pmi2"},
    {"PMI_SIZE", "1", "as WEFT_WORLD_SIZE, set by Hydra and by srun --mpi=pmi2"},
    {"MPI_LOCALNRANKS", "PMI_SIZE", "ranks on this host, set by Hydra"},
    {"SLURM_PROCID", "0", "as WEFT_RANK, set by srun"},
    {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "as WEFT_WORLD_SIZE, set by srun"},
    {"SLURM_NTASKS", "1", "as WEFT_WORLD_SIZE, set by srun"},
    {"SLURM_STEP_ID", "none", "number of the step; without one, Slurm's other variables are not looked at"},
    {"SLURM_JOB_ID", "none", "number of the job, set by Slurm"},
    {"SLURM_HET_JOB_ID", "none", "number of a job of several parts, set by Slurm"},
    {"SLURM_RESTART_COUNT", "0", "how often Slurm has started the job again"},
    {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "hosts of the step, set by srun"},
    {"SLURM_NNODES", "1", "hosts of the job, set by Slurm"},
    {"XDG_RUNTIME_DIR", "/tmp/weft-<user id>", "folder of this user's, for the files by which ranks meet"},
    {"WEFT_BACKEND", "none", "the transport that the backend \"auto\" takes; set by weft run --backend"},
    {"WEFT_INTERFACE", "none", "network interface that gloo listens on where the ranks are on several hosts"},
    {"WEFT_BACKEND_PATH", "none",
     "folders, separated by ':', searched for libweft_backend_<name>.so before those of the installation"},
    {"WEFT_GLOO_CHECK", "on", "off: gloo's ranks do not compare what they call before they do it"},
    {"WEFT_MPI_SAFE_BUFFERS", "on",
     "off: MPI reads and writes the program's memory itself, which a failed call may then never give back"},
    {"WEFT_MPI_CHECK", "on", "off: MPI's ranks do not compare what they call before they do it"},
    {"WEFT_SINGLE_COPY", "pull",
     "what shm's processes may do to each other's foreign memory by the kernel, where it pays and is "
     "permitted: "
     "pull (read), push (write too: quiesce() then waits for peers that are stopped) or off"},
    {"WEFT_UNEXPECTED_MESSAGES", "1048576",
     "messages that a rank keeps, per group, though it has not asked for them yet"},
    {"WEFT_UNEXPECTED_BYTES", "1073741824", "bytes of these messages"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "8",
     "hardware queues of a GPU, read by CUDA; nccl names it where they are too few"},
    {"WEFT_THREADS", "usable cores / ranks of the host", "threads per rank for kernels"},
    {"WEFT_GOLDEN_DIR", "../shared/golden beside the source tree", "reference data for the golden tests"},
};

bool known(std::string_view name) {
  return std::any_of(std::begin(kVariables), std::end(kVariables),
                     [&](const Variable& v) { return v.name == name; });
}

}  // namespace

std::span<const Variable> variables() { return kVariables; }

std::optional<std::string> get(std::string_view name) {
  assert(known(name) && "every variable has a row in the table above");
  (void)known;
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> get_int(std::string_view name, std::int64_t min, std::int64_t max) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < min || value > max)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is \"{}\"; expected an integer from {} to {}", name, *text, min, max));
  return value;
}

bool is_on(std::string_view name) {
  const std::string value = get(name).value_or("on");
  if (value != "on" && value != "off")
    throw Error(ErrorCode::bad_argument, fmt::format("{} is \"{}\"; expected on or off", name, value));
  return value == "on";
}

}  // namespace weft::env
