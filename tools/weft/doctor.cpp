// weft doctor: what this machine has, what weft will use, and what is wrong.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "backend_names.hpp"
#include "backends/support_table.hpp"
#include "base/cpu/isa.hpp"
#include "base/files/new_file.hpp"
#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "commands.hpp"
#include "trace.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"

namespace weft::tools {
namespace {

std::string first_value(const char* file, const std::string& key) {
  FileIn in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const auto at = line.find_first_not_of(" \t:", key.size());
    return at == std::string::npos ? "" : line.substr(at);
  }
  return "unknown";
}

std::string limit(int resource) {
  rlimit l{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &l) != 0) return "unknown";
  return l.rlim_cur == RLIM_INFINITY ? "unlimited" : fmt::format("{}", l.rlim_cur);
}

void line(std::string_view what, const std::string& value) { fmt::print("  {:<28} {}\n", what, value); }

// The text of an exception of `part`, or nothing.
template <class Part>
std::string trouble_of(const Part& part) {
  try {
    part();
    return {};
  } catch (const std::exception& e) {
    return e.what();
  }
}

// Two ranks as threads add two numbers, in memory of `kind`. Returns the text of the failure, or nothing.
std::string try_shm(Memory kind) {
  try {
    Context context;
    const auto store = make_local_store();
    std::string trouble[2];
    const auto rank = [&](int r) {
      try {
        Membership m;
        m.store = store;
        m.rank = r;
        m.size = 2;
        m.deadline = std::chrono::seconds(5);
        ProcessGroup group = ProcessGroup::create(context, "shm", m);
        const Tensor t(context, Shape{100000}, DType::f32, kind);
        std::fill(t.f32().begin(), t.f32().end(), static_cast<float>(r + 1));
        group.all_reduce(t, t).wait();
        for (const float x : t.f32())
          if (x != 3.0f) trouble[r] = fmt::format("all_reduce gave {} instead of 3", x);
      } catch (const std::exception& e) {
        trouble[r] = e.what();
      }
    };
    std::thread other(rank, 1);
    rank(0);
    other.join();
    return trouble[0].empty() ? trouble[1] : trouble[0];
  } catch (const std::exception& e) {
    return e.what();
  }
}

// Prints the variables that are set, or `all`; then unknown variables that begin with WEFT_.
void print_environment(bool all) {
  fmt::print("\nenvironment{}\n", all ? "" : " (what is set; --all: everything that weft reads)");
  bool any = all;
  for (const env::Variable& v : env::variables()) {
    const auto set = env::get(v.name);
    if (!set && !all) continue;
    any = true;
    line(v.name, set ? (v.secret ? "(set, not shown)" : *set) : fmt::format("(not set: {})", v.fallback));
    if (all) fmt::print("  {:<28}   {}\n", "", v.meaning);
  }
  for (const env::Unknown& v : env::unknown_variables()) {
    any = true;
    line(v.name, v.nearest.empty() ? "weft does not know it"
                                   : fmt::format("weft does not know it; is {} meant?", v.nearest));
  }
  if (!any) fmt::print("  nothing is set\n");
}

// "23.5 GiB", of the system's "24684084 kB", which are KiB.
std::string in_gib(const std::string& kib) {
  const auto count = parse_integer<std::int64_t>(kib.substr(0, kib.find(' ')));
  return count ? fmt::format("{:.1f} GiB", static_cast<double>(*count) / (1 << 20)) : kib;
}

// Checks whether traces can be written to the folder that WEFT_TRACE names; returns what is wrong, or
// nothing.
std::string trace_trouble(const std::filesystem::path& folder) {
  std::error_code no;
  if (std::filesystem::is_directory(folder, no))
    return ::access(folder.c_str(), W_OK | X_OK) == 0
               ? ""
               : fmt::format("{} cannot be written to: {}", folder.string(), system_words(errno));
  if (std::filesystem::exists(folder, no)) return fmt::format("{} is not a folder", folder.string());
  return fmt::format("there is no folder {}", folder.string());
}

// Checks whether groups that leave the choice to weft get the transport that WEFT_BACKEND names; returns what
// is wrong, or nothing.
std::string backend_trouble(const std::string& wanted, const std::vector<FoundBackend>& found) {
  if (wanted == "auto") return {};
  std::vector<std::string> names = {"auto"};
  for (const FoundBackend& b : found) {
    if (b.name == wanted) return b.problem.empty() ? "" : fmt::format("{}: {}", wanted, b.problem);
    names.push_back(b.name);
  }
  return unknown_backend(wanted, names);
}

// Prints the transports that were found. Returns the number of faults.
int check_backends() {
  int wrong = 0;
  fmt::print("\nbackends\n");
  for (const Memory kind : {Memory::shared, Memory::local}) {
    const std::string trouble = try_shm(kind);
    wrong += !trouble.empty();
    line(kind == Memory::shared ? "shm, shared memory" : "shm, foreign memory",
         trouble.empty() ? "works" : "WRONG: " + trouble);
  }
  Context context;
  {
    const Tensor t(context, Shape{1024}, DType::f32, Memory::shared);
    const bool shared = t.storage().memory() == Memory::shared;
    line("memory that peers map",
         shared ? "works" : "cannot be allocated: collectives copy (see the address space limit)");
  }

  fmt::print("\nplug-ins\n");
  const std::vector<FoundBackend> found = find_backends(context);
  for (const FoundBackend& b : found) {
    if (b.name == "shm") continue;  // built in, tried above
    line(b.name, b.problem.empty() ? fmt::format("{} ({})", b.version, b.path)
                                   : fmt::format("cannot be used: {} ({})", b.problem, b.path));
  }
  line("searched in", fmt::format("{}", fmt::join(backend_folders(), ", ")));
  if (const auto wanted = env::get("WEFT_BACKEND")) {
    const std::string trouble = backend_trouble(*wanted, found);
    wrong += !trouble.empty();
    if (!trouble.empty()) line("WEFT_BACKEND", "WRONG: " + trouble);
  }
  return wrong;
}

int doctor(bool all) {
  int wrong = 0;
  utsname host{};
  uname(&host);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  fmt::print("host\n");
  line("kernel", fmt::format("{} {} {}", host.sysname, host.release, host.machine));
  line("processor", first_value("/proc/cpuinfo", "model name"));
  line("usable cores",
       sched_getaffinity(0, sizeof(cores), &cores) == 0 ? fmt::format("{}", CPU_COUNT(&cores)) : "unknown");
  line("memory", in_gib(first_value("/proc/meminfo", "MemTotal")));
  line("huge pages on request", first_value("/sys/kernel/mm/transparent_hugepage/enabled", ""));
  line("address space limit, bytes", limit(RLIMIT_AS));
  line("open files limit", limit(RLIMIT_NOFILE));

  try {
    line("instruction set", isa_in_words(cpu_has(), env::get("WEFT_CPU_ISA")));
    line("matrix products", products_in_words(cpu_isa()));
  } catch (const Error& e) {
    line("instruction set", std::string("WRONG: ") + e.what());
  }

  // If a variable makes every Context throw, everything else would look wrong.
  if (const std::string trouble = trouble_of([] { Context context; }); trouble.empty()) {
    wrong += check_backends();
  } else {
    fmt::print("\nContext (without one, nothing else can be tried)\n");
    line("WRONG", trouble);
    ++wrong;
  }
  if (const auto folder = env::get("WEFT_TRACE")) {
    if (const std::string trouble = trace_trouble(*folder); !trouble.empty()) {
      fmt::print("\ntraces\n");
      line("WEFT_TRACE", "WRONG: no traces are written: " + trouble);
      ++wrong;
    }
  }

  print_environment(all);
  fmt::print("\n{}\n", wrong == 0 ? "nothing is wrong"
                                  : fmt::format("{} thing{} wrong", wrong, wrong == 1 ? " is" : "s are"));
  return wrong == 0 ? 0 : 1;
}

int doctor_trace(const std::vector<std::string>& paths, const std::string& chrome) {
  const std::vector<TraceFile> files = read_traces(paths);
  if (!chrome.empty()) {
    std::vector<Trace> traces;
    for (const TraceFile& f : files) traces.push_back(f.trace);
    write_new_file(chrome, to_chrome(traces, shifts(files)), "--chrome: ");
  }
  fmt::print("{}", report(files));
  return 0;
}

}  // namespace

void add_doctor(CLI::App& app, Body& chosen) {
  CLI::App* sub = app.add_subcommand("doctor", "What this machine has, what will be used, what is wrong");
  const CLI::Option* tables =
      sub->add_flag("--tables")
          ->description("Print what each backend does and promises, as docs/support.md has it");
  const CLI::Option* environment =
      sub->add_flag("--environment")
          ->description("Print the table of environment variables, as docs/environment.md has it");
  const CLI::Option* all =
      sub->add_flag("--all")->description("Show the environment variables that are not set, too");
  CLI::App* trace =
      sub->add_subcommand("trace", "Lay the trace files of a job's ranks side by side: who was late");
  const auto files = std::make_shared<std::vector<std::string>>();
  const auto chrome = std::make_shared<std::string>();
  trace->add_option("files", *files, "What WEFT_TRACE left, or folders of it")
      ->required()
      ->type_name("FILES");
  trace->add_option("--chrome", *chrome, "Write all of it as one trace for chrome://tracing and Perfetto")
      ->type_name("FILE");
  trace->callback(
      [&chosen, files, chrome] { chosen = [files, chrome] { return doctor_trace(*files, *chrome); }; });
  sub->callback([&chosen, tables, environment, all, trace] {
    if (trace->parsed()) return;
    if (tables->count() != 0 || environment->count() != 0)
      chosen = [text = tables->count() != 0 ? support_tables() : env::page()] {
        fmt::print("{}", text);
        return 0;
      };
    else
      chosen = [everything = all->count() != 0] { return doctor(everything); };
  });
}

}  // namespace weft::tools
