#include "command.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "number_flag.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"

namespace weft::check {
namespace {

struct Flags {
  Options options;
  std::string backend = "shm";
  std::vector<std::string> kinds, points, steps;
  double deadline = 1, patience = 10;
  std::int64_t only = -1;
  std::string programs_file, reports_file;
  bool no_shrink = false;
};

std::string own_path() {
  char path[4096];
  const ssize_t n = ::readlink("/proc/self/exe", path, sizeof path - 1);
  return n > 0 ? std::string(path, static_cast<std::size_t>(n)) : "weft";
}

// The traits of any backend from which a group can be made. A plug-in that is not weft's own is loaded; its
// name stays valid after this call, as plug-ins are never unloaded.
Traits traits_of(const std::string& backend) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("check: backend \"{}\" is not one to check; expected shm, gloo, mpi-openmpi, "
                            "mpi-mpich or a plug-in in WEFT_BACKEND_PATH that moves host memory{}",
                            backend, why));
  };
  if (backend == "auto") refuse("");
  Traits traits;
  try {
    Context context;
    traits = backend_traits(context, backend);
  } catch (const Error& e) {
    refuse(fmt::format(": {}", e.what()));
  }
  if (traits.device) refuse("");
  return traits;
}

/// The value between first and end - 1 whose name is `word`.
template <class Value>
Value named(std::string_view flag, std::string_view what, const std::string& word, int first, int end) {
  std::vector<std::string> names;
  for (int v = first; v < end; ++v) {
    names.emplace_back(name(static_cast<Value>(v)));
    if (names.back() == word) return static_cast<Value>(v);
  }
  throw Error(ErrorCode::bad_argument, fmt::format("check: {}: there is no {} \"{}\"; expected some of {}",
                                                   flag, what, word, fmt::join(names, ", ")));
}

int check(Flags& f, const MoreBackends& others) {
  Options& o = f.options;
  o.settings.backend = o.range.backend = f.backend;
  o.settings.deadline = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(f.deadline));
  o.settings.patience = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(f.patience));
  if (!others || !others(f.backend, o.settings)) {
    const bool single_copy = f.backend == "shm" && env::get("WEFT_SINGLE_COPY") == "push";
    o.settings.traits = single_copy ? shm_single_copy_traits() : traits_of(f.backend);
  }
  o.range.traits = o.settings.traits;
  o.settings.self = own_path();
  if (!f.programs_file.empty()) return run_job_rank(f.programs_file, f.reports_file, o.settings);
  if (f.backend == "mpi-openmpi") o.settings.mpirun = {"mpirun.openmpi", "--oversubscribe"};
  if (f.backend == "mpi-openmpi" && ::geteuid() == 0) o.settings.mpirun.push_back("--allow-run-as-root");
  if (f.backend == "mpi-mpich") o.settings.mpirun = {"mpirun.mpich"};
  o.range.job = !o.settings.mpirun.empty();
  if (o.range.job) o.range.threads = false;
  for (const std::string& word : f.kinds)
    o.range.kinds.push_back(named<FaultKind>("--kinds", "fault", word, 1, kFaultKinds));
  for (const std::string& word : f.points)
    o.range.points.push_back(named<FaultPoint>("--points", "point of a call", word, 0, kFaultPoints));
  for (const std::string& word : f.steps)
    o.range.steps.push_back(named<Does>("--steps", "kind of step", word, 0, kDoesHere));
  if (!f.kinds.empty() || !f.points.empty()) o.range.faults = true;
  if (o.range.faults && std::all_of(o.range.ranks.begin(), o.range.ranks.end(), [](int n) { return n < 2; }))
    throw Error(ErrorCode::bad_argument,
                "check: --ranks is 1; faults need 2 or more, so that somebody notices");
  if (!o.range.threads && !o.range.processes)
    throw Error(
        ErrorCode::bad_argument,
        "check: --no-threads and --no-processes: ranks must be one or the other; expected one of them");
  if (f.only >= 0) o.only = static_cast<std::uint64_t>(f.only);
  if (!o.replay.empty()) o.range.faults = true;  // one program a job
  o.shrinks = !f.no_shrink;
  o.command = fmt::format("weft check --backend {}{}{}", f.backend, o.range.faults ? " --faults" : "",
                          f.kinds.empty() ? "" : fmt::format(" --kinds {}", fmt::join(f.kinds, ",")));
  if (!f.points.empty()) o.command += fmt::format(" --points {}", fmt::join(f.points, ","));
  if (!f.steps.empty()) o.command += fmt::format(" --steps {}", fmt::join(f.steps, ","));
  if (o.range.ranks != Range().ranks) o.command += fmt::format(" --ranks {}", fmt::join(o.range.ranks, ","));
  if (!o.range.threads && !o.range.job) o.command += " --no-threads";
  if (!o.range.processes) o.command += " --no-processes";
  if (o.range.most != Range().most) o.command += fmt::format(" --most {}", o.range.most);
  return run_check(o);
}

}  // namespace

void add_check(CLI::App& app, std::function<int()>& chosen, const MoreBackends& others) {
  auto f = std::make_shared<Flags>();
  Options& o = f->options;
  CLI::App* c = app.add_subcommand("check", "Random programs of collectives, with faults, against an oracle");
  c->add_option("--backend", f->backend, "shm, gloo, mpi-openmpi, mpi-mpich or a plug-in's name")
      ->capture_default_str();
  c->add_option("--programs", o.programs, "How many")->check(CLI::Range(1, 100000000))->capture_default_str();
  c->add_option("--seed", o.seed, "What they are drawn from")->capture_default_str();
  c->add_flag("--faults", o.range.faults, "Most of them are struck by a fault");
  c->add_option("--kinds", f->kinds, "Only these faults")->delimiter(',');
  c->add_option("--points", f->points, "Only at these points of a call, where a fault may be there")
      ->delimiter(',');
  c->add_option("--steps", f->steps,
                "Every program has some of these: call, window, agreement, overlap, gradients")
      ->delimiter(',');
  c->add_option("--ranks", o.range.ranks, "Numbers of ranks to choose from")
      ->delimiter(',')
      ->check(CLI::Range(1, kMostRanks))
      ->capture_default_str();
  c->add_option("--most", o.range.most, "Elements of the largest blocks")->check(CLI::Range(1, 1 << 24));
  c->add_flag("!--no-threads", o.range.threads, "Ranks are never threads");
  c->add_flag("!--no-processes", o.range.processes, "Ranks are never processes");
  c->add_option("--only", f->only, "Run this program of the seed alone");
  c->add_option("--program", o.replay, "Run the program in this file")->check(CLI::ExistingFile);
  c->add_option("--deadline", f->deadline, "Seconds, of calls that run into it")
      ->check(number_between(0.1, 60.0));
  c->add_option("--patience", f->patience, "Seconds, the deadline of all other calls")
      ->check(number_between(1.0, 600.0))
      ->capture_default_str();
  c->add_option("--jobs", o.jobs, "Programs at once")->check(CLI::Range(1, 64));
  c->add_flag("--keep-going", o.keep_going, "Go on after a failure");
  c->add_flag("--no-shrink", f->no_shrink, "Do not make a failing program smaller");
  c->add_flag("--show", o.show, "Print the programs");
  c->add_option("--progress", o.progress, "auto, bar, lines or none")
      ->check(CLI::IsMember({"auto", "bar", "lines", "none"}));
  c->add_option("--json", o.json, "Write a summary to this file, too");
  c->add_option("--programs-file", f->programs_file)->group("");  // the ranks of an mpirun
  c->add_option("--reports-file", f->reports_file)->group("");
  c->callback([f, c, &chosen, others] {
    if (c->get_subcommands().empty()) chosen = [f, others] { return check(*f, others); };
  });
}

int check_main(int argc, char** argv, const MoreBackends& others) {
  CLI::App app("weft check");
  app.require_subcommand(1);
  std::function<int()> chosen;
  add_check(app, chosen, others);
  CLI11_PARSE(app, argc, argv);
  try {
    return chosen();
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 2;
  }
}

}  // namespace weft::check
