#include "weft/base/env.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "base/text/printable.hpp"
#include "weft/base/error.hpp"

namespace weft::env {
namespace {

constexpr std::string_view kPrefix = "WEFT_", kTests = "WEFT_TEST_";

constexpr Variable kVariables[] = {
    {"WEFT_LOG", "level, layer=level, or several with commas", "warning", "Context",
     "the least important line that is still logged: error, warning, info or debug; of one layer (program, "
     "host, "
     "store, backends, group, dp) with its name before it: info,store=debug"},
    {"WEFT_TRACE", "path", "none", "groups",
     "folder to which a rank's last calls are written, when a group fails and at every SIGUSR2"},
    {"WEFT_RANK", "integer", "RANK", "rendezvous", "this process's rank in the job; set by weft run"},
    {"WEFT_WORLD_SIZE", "integer", "WORLD_SIZE", "rendezvous", "ranks in the job; set by weft run"},
    {"WEFT_LOCAL_RANK", "integer", "LOCAL_RANK", "rendezvous",
     "this process's rank among those of its host; set by weft run"},
    {"WEFT_STORE", "text", "what the launcher gives", "rendezvous",
     "where ranks meet: host:port, [IPv6 address]:port or file:///path; set by weft run"},
    {"WEFT_STORE_SECRET_FILE", "path", "none", "TCP store",
     "file, of mode 0600, with the secret by which ranks know each other where WEFT_STORE is off loopback"},
    {"WEFT_STORE_SECRET", "text", "none", "TCP store",
     "that secret itself, where there is no file; 16 bytes or more", true},
    {"WEFT_JOB", "text", "what the launcher gives", "rendezvous",
     "token that keeps jobs that share a store apart; set by weft run"},
    {"WEFT_LAUNCHER", "text", "none", "groups",
     "socket at which weft run hears from ranks that fail because of others, or whose results may be wrong; "
     "set by weft run"},
    {"WEFT_RESTART_COUNT", "integer", "none", "weft train",
     "how often weft run --elastic has started the ranks again: 0 in the first start; set by weft run "
     "--elastic"},
    {"WEFT_TERMINAL", "0, 1", "0", "weft train",
     "1 where weft run writes to a terminal: progress bars may be drawn; set by weft run"},
    {"COLUMNS", "integer", "80", "weft train, weft run",
     "width of a terminal that does not tell it; weft run sets it to what a rank's line may take"},
    {"RANK", "integer", "0", "rendezvous", "as WEFT_RANK, set by torchrun"},
    {"WORLD_SIZE", "integer", "1", "rendezvous", "as WEFT_WORLD_SIZE, set by torchrun"},
    {"LOCAL_RANK", "integer", "RANK", "rendezvous", "as WEFT_LOCAL_RANK, set by torchrun"},
    {"MASTER_ADDR", "text", "127.0.0.1", "rendezvous", "host of the store, set by torchrun"},
    {"MASTER_PORT", "integer", "none", "rendezvous",
     "port of the store, which rank 0 serves; set by torchrun"},
    {"LOCAL_WORLD_SIZE", "integer", "WORLD_SIZE", "rendezvous", "ranks on this host, set by torchrun"},
    {"TORCHELASTIC_USE_AGENT_STORE", "True, False", "False", "rendezvous",
     "True if torchrun itself listens on MASTER_PORT: rank 0 serves elsewhere and writes the place into a "
     "file"},
    {"TORCHELASTIC_RUN_ID", "text", "none", "rendezvous", "name of the job, set by torchrun"},
    {"TORCHELASTIC_RESTART_COUNT", "integer", "0", "rendezvous",
     "how often torchrun has started the ranks again"},
    {"OMPI_COMM_WORLD_RANK", "integer", "0", "rendezvous", "as WEFT_RANK, set by Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_SIZE", "integer", "1", "rendezvous", "as WEFT_WORLD_SIZE, set by Open MPI's mpirun"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "integer", "OMPI_COMM_WORLD_SIZE", "rendezvous",
     "ranks on this host, set by Open MPI's mpirun"},
    {"PMIX_NAMESPACE", "text", "OMPI_MCA_ess_base_jobid", "rendezvous",
     "name of the job, set by Open MPI's mpirun"},
    {"OMPI_MCA_ess_base_jobid", "text", "none", "rendezvous",
     "name of the job, set by Open MPI's mpirun before version 5"},
    {"PMI_RANK", "integer", "0", "rendezvous",
     "as WEFT_RANK, set by Hydra (MPICH's mpirun) and by srun --mpi=pmi2"},
    {"PMI_SIZE", "integer", "1", "rendezvous", "as WEFT_WORLD_SIZE, set by Hydra and by srun --mpi=pmi2"},
    {"MPI_LOCALNRANKS", "integer", "PMI_SIZE", "rendezvous", "ranks on this host, set by Hydra"},
    {"SLURM_PROCID", "integer", "0", "rendezvous", "as WEFT_RANK, set by srun"},
    {"SLURM_STEP_NUM_TASKS", "integer", "SLURM_NTASKS", "rendezvous", "as WEFT_WORLD_SIZE, set by srun"},
    {"SLURM_NTASKS", "integer", "1", "rendezvous", "as WEFT_WORLD_SIZE, set by srun"},
    {"SLURM_STEP_ID", "integer", "none", "rendezvous",
     "number of the step; without one, Slurm's other variables are not looked at"},
    {"SLURM_JOB_ID", "integer", "none", "rendezvous", "number of the job, set by Slurm"},
    {"SLURM_HET_JOB_ID", "integer", "none", "rendezvous", "number of a job of several parts, set by Slurm"},
    {"SLURM_RESTART_COUNT", "integer", "0", "rendezvous", "how often Slurm has started the job again"},
    {"SLURM_STEP_NUM_NODES", "integer", "SLURM_NNODES", "rendezvous", "hosts of the step, set by srun"},
    {"SLURM_NNODES", "integer", "1", "rendezvous", "hosts of the job, set by Slurm"},
    {"XDG_RUNTIME_DIR", "path", "/tmp/weft-<user id>", "rendezvous",
     "folder of this user's, for the files by which ranks meet"},
    {"WEFT_BACKEND", "text", "none", "auto",
     "the transport that the backend \"auto\" takes; set by weft run --backend"},
    {"WEFT_INTERFACE", "text", "none", "gloo",
     "network interface that gloo listens on where the ranks are on several hosts"},
    {"WEFT_BACKEND_PATH", "paths", "none", "plug-ins",
     "folders, separated by ':', searched for libweft_backend_<name>.so before those of the installation"},
    {"WEFT_GLOO_CHECK", "on, off", "on", "gloo",
     "off: gloo's ranks do not compare what they call before they do it"},
    {"WEFT_MPI_SAFE_BUFFERS", "on, off", "on", "mpi",
     "off: MPI reads and writes the program's memory itself, which a failed call may then never give back"},
    {"WEFT_MPI_CHECK", "on, off", "on", "mpi",
     "off: MPI's ranks do not compare what they call before they do it"},
    {"WEFT_SINGLE_COPY", "auto, pull, push, off", "auto", "shm",
     "what the processes of shm may let the kernel do to each other's foreign memory, where that is faster "
     "and "
     "permitted: pull (read), push (write, too: quiesce() then waits for peers that are stopped) or off; "
     "auto: pull, but off for collectives and messages "
     "where copying twice through shared memory is faster (AMD from Zen 3 on)"},
    {"WEFT_UNEXPECTED_MESSAGES", "integer", "1048576", "messages",
     "messages that a rank keeps, per group, though it has not asked for them yet"},
    {"WEFT_UNEXPECTED_BYTES", "integer", "1073741824", "messages", "bytes of these messages"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "integer", "8", "nccl",
     "hardware queues of a GPU, read by CUDA; nccl names it where they are too few"},
    {"WEFT_PYTHON_FAST", "on, off", "on", "package weft of Python",
     "off: it makes every call by ctypes, even where its compiled calls (weft_fast) are there"},
    {"WEFT_CPU_ISA", "avx2, avx512, avx512_bf16, amx", "the last that the CPU has", "kernels",
     "the last instruction set that reductions, products and all other kernels use; below avx512_bf16, "
     "products of bf16 are made in f32; amx is for products of bf16, all else computes as with avx512_bf16"},
    {"WEFT_HOST_KERNELS", "0, 1", "0", "kernels",
     "1: a kernel that a device does not have runs on the host, on copies of its operands, with one warning "
     "for each kernel; 0: the call is an error that names the kernel"},
    {"WEFT_THREADS", "integer", "usable cores / ranks of the host", "weft train",
     "threads per rank for kernels"},
    {"WEFT_GOLDEN_DIR", "path", "../shared/golden beside the source tree", "tests",
     "reference data for the golden tests"},
    {"WEFT_MUTANT", "text", "none", "tests",
     "the mistake that a build with mistakes makes (src/base/mutant.hpp)"},
    {"WEFT_CHECK_SHOW_MPIRUN", "text", "none", "weft check",
     "set: what mpirun writes of a run is shown, not kept back"},
    {"WEFT_INTEL_MPI_ROOT", "path", "none", "build",
     "where Intel MPI is installed, for comparisons (docs/bench.md)"},
};

bool known(std::string_view name) {
  return std::any_of(std::begin(kVariables), std::end(kVariables),
                     [&](const Variable& v) { return v.name == name; });
}

// Returns the known name nearest to `name`, or "" if more than a third of the letters behind WEFT_ differ.
std::string_view nearest(std::string_view name) {
  std::size_t least = 1 + (name.size() - kPrefix.size()) / 3;
  std::string_view found;
  for (const Variable& v : kVariables)
    if (const std::size_t d = letters_apart(name, v.name); v.name.starts_with(kPrefix) && d < least) {
      least = d;
      found = v.name;
    }
  return found;
}

}  // namespace

std::size_t letters_apart(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::span<const Variable> variables() { return kVariables; }

std::optional<std::string> get(std::string_view name) {
  assert(known(name) && "every variable has a row in the table above");
  (void)known;
  // A program with more rights than its caller (setuid, file capabilities) ignores the caller's variables,
  // since they name plug-ins to load and files to write.
  const char* value = ::secure_getenv(std::string(name).c_str());
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
    throw Error(ErrorCode::bad_argument, fmt::format("{} is \"{}\"; expected an integer from {} to {}", name,
                                                     printable(*text), min, max));
  return value;
}

bool is_on(std::string_view name) {
  const std::string value = get(name).value_or("on");
  if (value != "on" && value != "off")
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is \"{}\"; expected on or off", name, printable(value)));
  return value == "on";
}

std::vector<Unknown> unknown_variables() {
  std::vector<Unknown> all;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (name.starts_with(kPrefix) && !name.starts_with(kTests) && !known(name))
      all.push_back({std::string(name), nearest(name)});
  }
  return all;
}

std::string page() {
  std::string text =
      "# Environment variables\n\n"
      "Made by `weft doctor --environment`, from the table in `src/base/env.cpp`; a test compares them. "
      "`weft doctor`\n"
      "prints those that are set, with their values, and `weft doctor --all` all of them. A variable that is "
      "set and\n"
      "empty counts as not set. A variable whose name begins with `WEFT_` and that is not in this table is "
      "warned of\n"
      "when the first Context of a process is made. Names that begin with `WEFT_TEST_` are for tests. A "
      "program with\n"
      "more rights than its caller (setuid, setgid, file capabilities) reads none of them: each counts as "
      "not set.\n\n"
      "| name | values | where it is not set | read by | meaning |\n|---|---|---|---|---|\n";
  for (const Variable& v : kVariables)
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", v.name, v.type, v.fallback, v.reader, v.meaning);
  return text;
}

}  // namespace weft::env
