#include "run_bench.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>

#include "columns.hpp"
#include "data.hpp"
#include "domain.hpp"
#include "experts.hpp"
#include "layers.hpp"
#include "other_load.hpp"
#include "pipeline.hpp"
#include "results.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

using json = nlohmann::ordered_json;
using Who = Competitor::Who;

const std::vector<std::string> kMessages = {"ping_pong", "one_way"},
                               kHalos = {"halo_rows", "halo_columns", "halo_four_columns",
                                         "halo_3d",   "halo_fields",  "halo_3d_fields"};
struct Operation {
  std::string name, program, about;
};
const std::vector<Operation> kOperations = {
    {"all_reduce", "collectives_bench", "every rank gets the sum of all ranks' buffers"},
    {"all_gather", "collectives_bench", "every rank gets all ranks' blocks"},
    {"reduce_scatter", "collectives_bench", "every rank gets its block of the sum"},
    {"broadcast", "collectives_bench", "every rank gets the root's buffer"},
    {"all_to_all", "collectives_bench", "every rank gets a block from each rank"},
    {"reduce", "collectives_bench", "the root gets the sum"},
    {"p2p", "p2p_bench", "half of a round trip, and a window of messages one way"},
    {"halo", "halo_bench", "faces of both neighbours in a ring: all of the following"},
    {"halo_rows", "halo_bench", "rows of a matrix"},
    {"halo_columns", "halo_bench", "columns of a matrix"},
    {"halo_four_columns", "halo_bench", "four columns of a matrix"},
    {"halo_3d", "halo_bench", "faces of a cuboid"},
    {"halo_fields", "halo_bench", "rows of eight matrices in one exchange"},
    {"halo_3d_fields", "halo_bench", "faces of eight cuboids in one exchange"},
    {"facade", "facade_bench", "what ProcessGroup costs above its transport, ours alone"},
    {"overlap", "overlap_bench", "what Progress::thread hides behind computation, ours alone"},
    {"layers", "layers_bench", "layers of a model on one rank and over several (--tp), and in torch"},
    {"data", "data_bench",
     "gradients in buckets, and a step with averaged gradients and sharded, also in torch"},
    {"domain", "domain_bench", "layers on maps and sequences that are cut over the ranks, ours alone"},
    {"pipeline", "pipeline_bench",
     "the bubbles of pipeline schedules on ranks that sleep, and messages between stages, ours alone"},
    {"experts", "experts_bench", "tokens on their way to experts, and layers of experts, ours alone"},
};

std::vector<std::string> names_of_operations() {
  std::vector<std::string> names;
  for (const Operation& operation : kOperations) names.push_back(operation.name);
  return names;
}

[[noreturn]] void refuse(const std::string& flag, const std::string& value, const std::string& expected) {
  throw Error(ErrorCode::bad_argument, fmt::format("bench: {} \"{}\"; expected {}", flag, value, expected));
}

bool among(const std::string& word, const std::vector<std::string>& known) {
  return std::find(known.begin(), known.end(), word) != known.end();
}

void check(const std::string& flag, const std::vector<std::string>& words,
           const std::vector<std::string>& known) {
  for (const std::string& w : words)
    if (!among(w, known)) refuse(flag, w, fmt::format("{}", fmt::join(known, ", ")));
}

std::int64_t bytes_of(const std::string& size) {
  constexpr std::int64_t kMost = std::int64_t{1} << 32;
  std::int64_t n = 0;
  const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), n);
  const std::string unit(end, size.data() + size.size());
  if (n <= kMost && (unit == "K" || unit == "M")) n <<= unit == "K" ? 10 : 20;
  if (error != std::errc{} || (!unit.empty() && unit != "K" && unit != "M") || n < 1 || n > kMost)
    refuse("--bytes", size, "sizes from 1 to 4294967296, such as 8, 32K or 8M");
  return n;
}

// weft's own backends are known by name. The benchmark program reports a missing one. Other backends are
// loaded.
void check_backend(const std::string& backend) {
  const std::string expected =
      "shm, gloo, mpi-openmpi, mpi-mpich or a plug-in in WEFT_BACKEND_PATH that moves host memory";
  bool device = backend == "auto";
  try {
    Context context;
    device = device || backend_traits(context, backend).device;
  } catch (const Error& e) {
    refuse("--backend", backend, fmt::format("{}: {}", expected, e.what()));
  }
  if (device) refuse("--backend", backend, expected);
}

void check(Options& o) {
  if (o.op.empty())
    throw Error(ErrorCode::bad_argument, fmt::format("bench: no operation was given; expected {} (or --list)",
                                                     fmt::join(names_of_operations(), ", ")));
  check("operation", {o.op}, names_of_operations());
  if (o.c && o.op != "facade") refuse("--c", o.op, "the operation facade");
  check("--against", o.against, known_peers());
  check("--memory", o.memory, {"shared", "foreign", "single_copy", "staged"});
  for (const std::string& backend : o.backends) check_backend(backend);
  if (!o.place.empty()) check("--place", {o.place}, {"in", "out"});
  if (o.place == "in" && (o.op == "all_to_all" || o.op == "p2p" || o.op.starts_with("halo")))
    refuse("--place", "in", "out: " + o.op + " has no form in place");
  check("--buffers", {o.buffers}, {"hot", "rotating"});
  check("--ranks-as", {o.ranks_as}, {"processes", "threads"});
  for (const std::string& d : o.dtypes) dtype_from_name(d);
  if (o.dtypes.size() > 1 && !o.against.empty() && o.op != "layers")
    refuse("--dtype", fmt::format("{}", fmt::join(o.dtypes, ",")), "one dtype with --against");
  if (o.ranks < 2 || o.ranks > 64) refuse("--ranks", std::to_string(o.ranks), "2 to 64");
  if (o.op == "p2p" && o.ranks != 2)
    refuse("--ranks", std::to_string(o.ranks), "2: p2p is between two ranks");
  if (o.rounds < 1 || o.rounds > 100) refuse("--rounds", std::to_string(o.rounds), "1 to 100");
  if (!(o.seconds > 0 && o.seconds <= 60))
    refuse("--seconds", fmt::format("{}", o.seconds), "above 0, up to 60");
  if (!(o.limit >= 1 && o.limit <= 3600)) refuse("--limit", fmt::format("{}", o.limit), "1 to 3600 seconds");
  std::sort(o.bytes.begin(), o.bytes.end());
  o.bytes.erase(std::unique(o.bytes.begin(), o.bytes.end()), o.bytes.end());
}

Duration seconds(double s) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s)); }

void say(const std::string& text) { fmt::print(stderr, "bench: {}\n", text); }

// The turns of one operation. Every competitor measures one size, then the next, round by round, so that
// changes on the machine affect all competitors equally.
class Race {
 public:
  Race(const Options& o, const std::string& op, const WorkFolder& folder) : result_{op, o} {
    for (Competitor& c : competitors(o, op)) enter(std::move(c), folder);
  }

  Result run() {
    const Options& o = result_.options;
    for (int round = 0; round < o.rounds; ++round)
      for (const std::int64_t bytes : o.bytes) {
        if (::isatty(STDERR_FILENO))
          fmt::print(stderr, "\r{} round {} of {}, {} bytes \033[K", result_.op, round + 1, o.rounds, bytes);
        for (std::size_t k = 0; k < jobs_.size(); ++k) turn(k, bytes);
      }
    if (::isatty(STDERR_FILENO)) fmt::print(stderr, "\r\033[K");
    jobs_.clear();
    take_machine();
    if (std::string busy = load_.note(); !busy.empty()) result_.notes.push_back(std::move(busy));
    return std::move(result_);
  }

 private:
  void enter(Competitor c, const WorkFolder& folder) {
    std::string why = c.missing;
    std::unique_ptr<Job> job;
    Column column{c};
    if (why.empty()) {
      job = std::make_unique<Job>(folder, result_.op + "." + c.name, c.start);
      const auto hello = job->next(seconds(std::max(result_.options.limit, 30.0)));
      if (hello && hello->contains("settings")) {
        column.version = hello->at("settings").get<std::string>();
      } else {
        why = hello ? "it printed no settings" : job->problem();
      }
    }
    if (!why.empty()) {
      if (c.who == Who::weft || c.who == Who::machine)
        throw Error(ErrorCode::system, fmt::format("bench: {}: {}", c.title, why));
      result_.notes.push_back(fmt::format("{} is left out: {}", c.name, why));
      say(result_.notes.back());
      return;
    }
    result_.columns.push_back(std::move(column));
    jobs_.push_back(std::move(job));
  }

  void turn(std::size_t k, std::int64_t bytes) {
    Column& column = result_.columns[k];
    std::unique_ptr<Job>& job = jobs_[k];
    if (job == nullptr) {
      column.gaps.emplace(bytes, "not run");
      return;
    }
    job->go();
    // Our own program is given up only if it must be: without it there is nothing to compare.
    const bool peer = column.competitor.who == Who::mpi || column.competitor.who == Who::other;
    const auto row =
        job->next(seconds(peer ? result_.options.limit : std::max(result_.options.limit, 100.0)));
    if (!row) {
      if (!peer)
        throw Error(ErrorCode::system, fmt::format("bench: {} {} bytes: {}: {}", result_.op, bytes,
                                                   column.competitor.title, job->problem()));
      say(fmt::format("{} {} bytes: {} {}", result_.op, bytes, column.competitor.title, job->problem()));
      column.cells.erase(bytes);
      column.gaps[bytes] = job->timed_out() ? job->problem() : "failed";
      if (!job->timed_out())
        result_.notes.push_back(
            fmt::format("{} at {} bytes: {}", column.competitor.name, bytes, job->problem()));
      job->kill();
      job.reset();
      return;
    }
    take(column, *row, bytes);
  }

  void take(Column& column, const json& row, std::int64_t bytes) {
    if (row.value("bytes", std::int64_t{0}) != bytes)
      throw Error(ErrorCode::system,
                  fmt::format("bench: {}: a row of {} bytes; expected {}", column.competitor.title,
                              row.value("bytes", std::int64_t{0}), bytes));
    if (row.contains("unsupported")) {
      column.gaps[bytes] = "-";
      const std::string note =
          fmt::format("{}: {}", column.competitor.name, row.at("unsupported").get<std::string>());
      if (!among(note, result_.notes)) result_.notes.push_back(note);
      return;
    }
    if (column.competitor.who == Who::machine) {
      Cell& cell = column.cells[bytes];
      const auto least = [](double& x, double y) { x = x == 0 ? y : std::min(x, y); };
      least(cell.median_us, row.at("copy_us"));  // see take_machine()
      least(cell.p99_us, row.at("pass_us"));
      least(cell.alg_gbs, row.at("line_us"));
      return;
    }
    result_.place = row.at("place");
    Cell& cell = column.cells[bytes];
    const double median = row.at("median_us");
    cell.rounds.push_back(median);
    if (cell.rounds.size() > 1 && median >= cell.median_us) return;
    cell.median_us = median;
    cell.p99_us = row.at("p99_us");
    cell.alg_gbs = row.at("alg_GBs");
    cell.bus_gbs = row.at("bus_GBs");
  }

  // The machine's cells hold copy, pass and line; they become the limit of this operation. If there are more
  // ranks than cores, a rank's pass says nothing about all of them.
  void take_machine() {
    const auto machine = std::find_if(result_.columns.begin(), result_.columns.end(),
                                      [](const Column& c) { return c.competitor.who == Who::machine; });
    double line = std::numeric_limits<double>::max();
    for (const auto& [bytes, cell] : machine->cells) line = std::min(line, cell.alg_gbs);
    if (result_.options.ranks <= usable_cores())
      for (const auto& [bytes, cell] : machine->cells)
        result_.limit_us[bytes] =
            (pipelined(result_.op) ? 0 : line) + limit_factor(result_.op, result_.options.ranks) *
                                                     (result_.passes() ? cell.p99_us : cell.median_us);
    result_.columns.erase(machine);
  }

  OtherLoad load_;
  Result result_;
  std::vector<std::unique_ptr<Job>> jobs_;  // parallel to result_.columns; null: given up
};

std::string numbered(const std::string& path, std::size_t k, std::size_t of, const std::string& op) {
  if (of < 2 || k == 0) return path;
  const std::size_t dot = path.rfind('.');
  return dot == std::string::npos ? path + "." + op : path.substr(0, dot) + "." + op + path.substr(dot);
}

int compare(const Options& o, const std::vector<std::string>& ops) {
  const WorkFolder folder;
  std::vector<Result> results;
  for (std::size_t k = 0; k < ops.size(); ++k) {
    results.push_back(Race(o, ops[k], folder).run());
    fmt::print("{}\n", tables(results.back()));
    std::fflush(stdout);
    if (!o.plot.empty()) write_file(numbered(o.plot, k, ops.size(), ops[k]), to_svg(results.back()));
  }
  if (!o.json.empty()) write_file(o.json, to_json(results));
  return 0;
}

// The fields of a row of such a program, in its order.
std::vector<std::pair<std::string, double>> numbers(const json& row) {
  std::vector<std::pair<std::string, double>> all;
  for (const auto& [key, x] : row.items())
    if (x.is_number() && key != "ranks" && key != "bytes") all.emplace_back(key, x.get<double>());
  return all;
}

// facade and overlap: a single program of ours, whose rows name their numbers themselves.
int alone(const Options& o, const std::string& op) {
  const WorkFolder folder;
  std::vector<std::string> bytes;
  for (int r = 0; r < o.rounds; ++r)
    for (const std::int64_t b : o.bytes) bytes.push_back(std::to_string(b));
  std::vector<std::string> command = {program(o, op + "_bench")};
  if (o.c) command.emplace_back("--c");
  const std::string flags[] = {"--rows",
                               "--bytes",
                               fmt::format("{}", fmt::join(bytes, ",")),
                               "--dtype",
                               o.dtypes.at(0),
                               "--memory",
                               o.memory.at(0) == "shared" ? "shared" : "foreign",
                               "--seconds",
                               fmt::format("{}", o.seconds),
                               "--ranks",
                               std::to_string(o.ranks),
                               "--ranks-as",
                               o.ranks_as,
                               "--bind",
                               op == "overlap" ? "share" : "cores"};
  command.insert(command.end(), std::begin(flags), std::end(flags));
  const OtherLoad load;
  std::optional<Job> job;
  job.emplace(folder, op, Job::Start{command, {}, o.ranks});
  std::vector<json> rows;
  std::string settings;
  const auto failed = [&] {
    return Error(ErrorCode::system, fmt::format("bench: {}: {}", op, job->problem()));
  };
  const auto hello = job->next(seconds(o.limit));
  if (!hello) throw failed();
  settings = hello->value("settings", "");
  const std::size_t cases = o.bytes.size() * static_cast<std::size_t>(o.rounds);
  for (std::size_t k = 0; k < cases; ++k) {
    job->go();
    auto row = job->next(seconds(o.limit));
    if (!row) throw failed();
    rows.push_back(std::move(*row));
  }
  job.reset();
  // The better round is the one with the smaller first number.
  std::map<std::int64_t, json> best;
  for (const json& row : rows) {
    const std::int64_t at = row.at("bytes");
    const auto first = [&](const json& r) { return numbers(r).at(0).second; };
    if (best.count(at) == 0 || first(row) < first(best.at(at))) best[at] = row;
  }
  // One number per line, because there are many numbers and few sizes.
  std::vector<std::vector<std::string>> table = {{"bytes"}};
  for (const auto& [key, x] : numbers(rows.at(0))) table.push_back({key});
  for (const auto& [at, row] : best) {
    table[0].push_back(std::to_string(at));
    std::size_t line = 1;
    for (const auto& [key, x] : numbers(row)) table.at(line++).push_back(digits(x));
  }
  const std::string busy = load.note();
  fmt::print("{}\n\n{}{}\n",
             tools::folded(fmt::format("{}: {} {}, {}; the better of {} rounds, {}", op, o.ranks, o.ranks_as,
                                       settings, o.rounds, scheduling())),
             draw_table(table, o.markdown), busy.empty() ? "" : "\n  " + tools::folded(busy, 4, 2) + "\n");
  if (!o.json.empty())
    write_file(o.json, json{{"op", op}, {"settings", settings}, {"rows", rows}}.dump(1) + "\n");
  return 0;
}

// Lists the operations and peers, without running any of them.
int list(Options o) {
  std::string absent;  // why
  if (o.programs.empty()) {
    try {
      o.programs = find_programs();
    } catch (const Error& e) {
      absent = e.what();
      o.programs = installed_programs();  // the folder of peers in separate packages
    }
  }
  fmt::print("operations\n");
  for (const Operation& operation : kOperations) fmt::print("  {:<16} {}\n", operation.name, operation.about);
  fmt::print("peers (--against)\n");
  for (const Competitor& peer : all_peers(o))
    fmt::print("  {:<16} {}\n", peer.name,
               peer.missing.empty() ? "is there" : "is left out: " + peer.missing);
  fmt::print("programs\n  {}\n", absent.empty() ? o.programs : absent);
  return absent.empty() ? 0 : 1;
}

}  // namespace

std::string known_ops() {
  std::vector<std::string_view> names;
  for (const Operation& operation : kOperations) names.push_back(operation.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string about(const std::string& op) {
  std::string text;
  for (const Operation& operation : kOperations) {
    if (operation.name == op)
      return fmt::format("{}: {}. Its program is {}.", op, operation.about, operation.program);
    text += fmt::format("  {:<16} {}\n", operation.name, operation.about);
  }
  return "Operations:\n" + text + "What of it there is here: weft bench --list";
}

int run_bench(Options o) {
  if (o.list) return list(o);
  for (const std::string& size : o.sizes) o.bytes.push_back(bytes_of(size));
  if (o.bytes.empty()) {
    if (o.op == "facade") {
      o.bytes = {8, 2048, 32768, 524288, 8388608};
    } else if (o.op == "overlap") {
      o.bytes = {1 << 20};
    } else if (o.op.starts_with("halo")) {
      o.bytes = {128, 1024, 8192, 65536, 524288, 4194304, 8388608};  // faces of half of them
    } else {
      for (std::int64_t b = 8; b <= 128 << 20; b *= 4) o.bytes.push_back(b);
    }
  }
  if (o.memory.empty())
    o.memory = o.op == "facade" || o.op == "overlap" ? std::vector<std::string>{"shared"}
                                                     : std::vector<std::string>{"shared", "foreign"};
  check(o);
  if (o.programs.empty()) o.programs = find_programs();
  const int policy = ::sched_getscheduler(0);
  if (o.ranks > usable_cores() && (policy == SCHED_FIFO || policy == SCHED_RR))
    say("more ranks than cores under a real-time policy: a peer that spins keeps the cores from the ranks it "
        "waits for");
  scheduling();  // before it changes
  const Watch watch;
  try {
    if (o.op == "layers") return bench_layers(o), 0;
    if (o.op == "data") return bench_data(o), 0;
    if (o.op == "domain") return bench_domain(o), 0;
    if (o.op == "pipeline") return bench_pipeline(o);
    if (o.op == "experts") return bench_experts(o), 0;
    if (o.op == "facade" || o.op == "overlap") return alone(o, o.op);
    return compare(o, o.op == "p2p" ? kMessages : o.op == "halo" ? kHalos : std::vector<std::string>{o.op});
  } catch (const Interrupted& i) {
    return 128 + i.signal;
  }
}

}  // namespace weft::bench
