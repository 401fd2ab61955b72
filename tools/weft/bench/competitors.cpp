#include "competitors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/text/plain_streams.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

namespace fs = std::filesystem;

bool executable(const std::string& path) {
  return ::access(path.c_str(), X_OK) == 0 && !fs::is_directory(path);
}

bool in_path(const std::string& name) {
  if (name.find('/') != std::string::npos) return executable(name);
  const char* const path = std::getenv("PATH");
  TextIn folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (executable(folder + "/" + name)) return true;
  return false;
}

std::string own_folder() {
  char path[4096];
  const ssize_t n = ::readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string self(path, n > 0 ? static_cast<std::size_t>(n) : 0);
  return self.substr(0, self.rfind('/'));
}

constexpr const char* kToInstall =
    "install libbenchmark-dev, configure weft again with WEFT_BENCH=ON (the default), build and install it, "
    "or name the folder of "
    "the programs by --programs";

// Returns whether this python finds the module; the module is not imported.
bool has_module(const std::string& python, const std::string& module) {
  std::string code =
      fmt::format("import importlib.util, sys; sys.exit(importlib.util.find_spec('{}') is None)", module);
  std::string program = python, flag = "-c";
  char* const argv[] = {program.data(), flag.data(), code.data(), nullptr};
  posix_spawn_file_actions_t quiet;
  ::posix_spawn_file_actions_init(&quiet);
  ::posix_spawn_file_actions_addopen(&quiet, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = -1;
  const int error = ::posix_spawnp(&child, program.c_str(), &quiet, nullptr, argv, environ);
  ::posix_spawn_file_actions_destroy(&quiet);
  int status = 0;
  return error == 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::vector<std::string> flags(const Options& o, const std::string& op, const std::string& dtype) {
  std::vector<std::string> bytes;
  for (int r = 0; r < o.rounds; ++r)
    for (const std::int64_t b : o.bytes) bytes.push_back(std::to_string(b));
  std::vector<std::string> words = {"--op",      op,
                                    "--dtype",   dtype,
                                    "--bytes",   fmt::format("{}", fmt::join(bytes, ",")),
                                    "--buffers", o.buffers,
                                    "--seconds", fmt::format("{}", o.seconds),
                                    "--rows"};
  if (!o.place.empty()) words.insert(words.end(), {"--place", o.place});
  return words;
}

// `bound`: whether processes are bound to cores. They are not if a process has threads other than MPI's.
Competitor mpi_job(const Options& o, const std::string& name, bool bound) {
  Competitor c;
  c.name = name;
  c.who = Competitor::Who::mpi;
  const std::string n = std::to_string(o.ranks);
  const bool oversubscribed = o.ranks > usable_cores();
  const bool bind = bound && !oversubscribed;
  std::string mpirun;
  if (name == "openmpi") {
    mpirun = "mpirun.openmpi";
    c.title = "Open MPI";
    c.start.command = {mpirun, "--mca", "pml", "ob1", "--mca", "btl", "self,vader"};
    if (oversubscribed) c.start.command.push_back("--oversubscribe");
    c.start.command.insert(c.start.command.end(), {"--bind-to", bind ? "core" : "none"});
    c.start.command.insert(c.start.command.end(), {"-n", n});
    // Open MPI runs for root only if both variables allow it.
    if (::geteuid() == 0)
      c.start.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
    c.settings = oversubscribed ? "pml ob1, btl vader (shared memory), oversubscribed"
                                : "pml ob1, btl vader (shared memory), bound to cores";
  } else if (name == "mpich") {
    mpirun = "mpirun.mpich";
    c.title = "MPICH";
    c.start.command = {mpirun, "-n", n};
    if (bind) c.start.command.insert(c.start.command.end(), {"-bind-to", "core"});
    c.settings = oversubscribed ? "ch4, shared memory, not bound" : "ch4, shared memory, bound to cores";
  } else {
    c.title = "Intel MPI";
    std::string root = o.intel_mpi;
    if (root.empty()) {
      FileIn file(o.programs + "/mpi_collectives_intelmpi.root");
      std::getline(file, root);
    }
    if (root.empty()) {
      c.missing =
          "its folder is not known; pip install impi-rt impi-devel, then configure with WEFT_INTEL_MPI_ROOT "
          "and build weft again";
      return c;
    }
    mpirun = root + "/bin/mpiexec.hydra";
    c.start.command = {mpirun, "-n", n};
    const char* const libraries = std::getenv("LD_LIBRARY_PATH");
    c.start.environment = {
        {"LD_LIBRARY_PATH", root + "/lib" + (libraries == nullptr ? "" : ":" + std::string(libraries))},
        {"I_MPI_FABRICS", "shm"},
        {"I_MPI_PIN", oversubscribed ? "0" : "1"}};
    c.settings = oversubscribed ? "I_MPI_FABRICS=shm, not pinned" : "I_MPI_FABRICS=shm, pinned to cores";
  }
  if (!in_path(mpirun))
    c.missing = fmt::format("{} is not there; install {}", mpirun,
                            name == "openmpi" ? "openmpi-bin"
                            : name == "mpich" ? "mpich"
                                              : "impi-rt (pip)");
  return c;
}

Competitor peer(const Options& o, const std::string& name, const std::string& op) {
  Competitor c;
  std::string path, package;
  const char* const bound = o.ranks > usable_cores() ? "not bound" : "bound to cores";
  if (name == "openmpi" || name == "mpich" || name == "intelmpi") {
    c = mpi_job(o, name, true);
    path = o.programs + "/mpi_collectives_" + name;
    package = name == "openmpi" ? "libopenmpi-dev" : name == "mpich" ? "libmpich-dev" : "impi-devel (pip)";
    c.start.command.push_back(path);
  } else if (name == "gloo") {
    c.title = "Gloo";
    c.who = Competitor::Who::other;
    path = o.programs + "/gloo_collectives";
    package = "libgloo-dev";
    c.start.command = {path, "--ranks", std::to_string(o.ranks)};
    c.settings = fmt::format("TCP over loopback, {}", bound);
  } else {
    const bool deepspeed = name == "deepspeed";
    c.title = deepspeed ? "DeepSpeed" : "torch Gloo";
    c.who = Competitor::Who::other;
    path = o.programs + "/torch_collectives.py";
    package = "python3";
    c.start.command = {
        o.python, path, "--library", deepspeed ? "deepspeed" : "gloo", "--ranks", std::to_string(o.ranks)};
    c.start.environment = {{"OMP_NUM_THREADS", "1"}};
    c.settings = fmt::format(
        "{}, OMP_NUM_THREADS=1, torch.set_num_threads(1), {}",
        deepspeed ? "its all_reduce in shared memory" : "torch.distributed, gloo over loopback", bound);
    if (!in_path(o.python))
      c.missing = fmt::format("{} is not there; name a python that has {} by --python", o.python, name);
  }
  c.name = name;
  c.start.ranks = o.ranks;
  if (c.missing.empty() && !fs::exists(path))
    c.missing =
        fmt::format("{} is not there; install {}, then configure and build weft again", path, package);
  const std::vector<std::string> more = flags(o, op, o.dtypes.at(0));
  c.start.command.insert(c.start.command.end(), more.begin(), more.end());
  return c;
}

Competitor ours(const Options& o, const std::string& op, const std::string& dtype, const std::string& backend,
                const std::string& memory) {
  Competitor c;
  if (backend == "mpi-openmpi" || backend == "mpi-mpich") c = mpi_job(o, backend.substr(4), false);
  const bool message = op == "ping_pong" || op == "one_way";
  c.start.command.push_back(program(o, message                   ? "p2p_bench"
                                       : op.starts_with("halo_") ? "halo_bench"
                                                                 : "collectives_bench"));
  const std::vector<std::string> more = flags(o, op, dtype);
  c.start.command.insert(c.start.command.end(), more.begin(), more.end());
  c.start.command.insert(c.start.command.end(),
                         {"--backend", backend, "--memory", memory == "shared" ? "shared" : "foreign",
                          "--ranks", std::to_string(o.ranks), "--ranks-as", o.ranks_as});
  if (memory == "single_copy") c.start.environment["WEFT_SINGLE_COPY"] = "push";
  if (memory == "staged") c.start.environment["WEFT_SINGLE_COPY"] = "off";
  c.start.ranks = o.ranks;
  if (!c.settings.empty()) c.settings = "not bound";
  c.who = Competitor::Who::weft;
  c.name = c.memory = backend == "shm" ? memory : backend;
  c.dtype = dtype;
  if (o.dtypes.size() > 1) c.name += " " + dtype;
  c.title = "weft " + c.name;
  return c;
}

}  // namespace

const std::vector<std::string>& known_peers() {
  static const std::vector<std::string> names = {"openmpi", "mpich", "intelmpi",
                                                 "gloo",    "torch", "deepspeed"};
  return names;
}

Competitor mpi_launcher(const Options& o, const std::string& name) { return mpi_job(o, name, true); }

std::vector<Competitor> all_peers(const Options& o) {
  std::vector<Competitor> all;
  for (const std::string& name : known_peers()) {
    all.push_back(peer(o, name, "all_reduce"));
    if (!all.back().missing.empty() || (name != "torch" && name != "deepspeed")) continue;
    for (const std::string& module : {std::string("torch"), name})
      if (all.back().missing.empty() && !has_module(o.python, module))
        all.back().missing =
            fmt::format("{} has no module {}; name a python that has it by --python", o.python, module);
  }
  return all;
}

std::string installed_programs() {
  return fs::path(own_folder() + "/" + WEFT_BENCH_FOLDER).lexically_normal();
}

std::string find_programs() {
  const std::string own = own_folder(), installed = installed_programs();
  for (const std::string& folder : {own, installed})
    if (executable(folder + "/collectives_bench")) return folder;
  throw Error(ErrorCode::unsupported, fmt::format("bench: collectives_bench is neither in {} nor in {}: this "
                                                  "weft was built without its benchmarks; {}",
                                                  own, installed, kToInstall));
}

std::string program(const Options& o, const std::string& name) {
  const std::string path = o.programs + "/" + name;
  if (!executable(path))
    throw Error(
        ErrorCode::unsupported,
        fmt::format("bench: {} is not there; expected a benchmark program of weft: {}", path, kToInstall));
  return path;
}

std::vector<Competitor> competitors(const Options& o, const std::string& op) {
  std::vector<Competitor> all;
  for (const std::string& backend : o.backends)
    for (const std::string& memory : backend == "shm" ? o.memory : std::vector<std::string>{"foreign"})
      for (const std::string& dtype : o.dtypes) all.push_back(ours(o, op, dtype, backend, memory));
  for (const std::string& name : o.against) all.push_back(peer(o, name, op));
  Competitor machine;
  machine.name = "machine";
  machine.title = "machine";
  machine.who = Competitor::Who::machine;
  machine.start.ranks = o.ranks;
  machine.start.command = {program(o, "machine_bench"), "--ranks", std::to_string(o.ranks)};
  Options plain = o;
  plain.place.clear();
  const std::vector<std::string> more = flags(plain, "all_reduce", "f32");
  machine.start.command.insert(machine.start.command.end(), more.begin(), more.end());
  all.push_back(machine);
  return all;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string scheduling() {
  static const std::string first = [] {
    sched_param p{};
    ::sched_getparam(0, &p);
    switch (::sched_getscheduler(0)) {
      case SCHED_FIFO: return fmt::format("SCHED_FIFO {}", p.sched_priority);
      case SCHED_RR: return fmt::format("SCHED_RR {}", p.sched_priority);
      default: return fmt::format("SCHED_OTHER, nice {}", ::getpriority(PRIO_PROCESS, 0));
    }
  }();
  return first;
}

}  // namespace weft::bench
