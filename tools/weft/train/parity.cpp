// weft parity: one training on several meshes, with losses side by side.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/files/new_file.hpp"
#include "base/files/regular_file.hpp"
#include "base/json_reader.hpp"
#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "columns.hpp"
#include "commands.hpp"
#include "config_file.hpp"
#include "contents.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"
#include "parity_verdict.hpp"
#include "train_flags.hpp"

namespace weft::tools {
namespace {

// Meshes to compare unless the flags name others.
const std::vector<std::string> kMeshes{"1x1", "2x1", "1x2", "2x2", "1x4"},
    kExactMeshes{"1x1", "2x1", "1x2", "2x2", "sp:1x2", "fsdp:2x1"},
    kMapMeshes{"1x1", "2x1", "1x2", "d2", "d4", "2x1xd2"},
    kExactMapMeshes{"1x1", "2x1", "d2", "d4", "2x1xd2", "fsdp:2x1xd2"};

struct Flags {
  TrainConfig config;
  std::vector<std::string> meshes;  // empty: those of the kind and mode
  std::vector<std::string> backends{"auto"};
  bool resume = false;
  std::int64_t compared = 0;  // 0: 50, or all if there are fewer
  double tolerance = 1e-5;
  std::int64_t every = 5;
  std::string json;
};

struct Mesh {
  std::string text;
  std::string data = "ddp";
  int dp = 1, tp = 1, domain = 1;
  bool sequence_parallel = false;
  int ranks() const noexcept { return dp * tp * domain; }
};

// A training of one column: on `mesh` over a transport, or first on `before` and then resumed on `mesh`.
struct Run {
  Mesh mesh;
  std::optional<Mesh> before;
  std::string backend, name;
};

// "2x1", "fsdp:2x1", "sp:1x2", "sp:fsdp:2x2"; of maps "2x1xd2", or "d2": one rank of data and of tensors
Mesh parse(const std::string& text) {
  Mesh mesh{.text = text, .sequence_parallel = text.starts_with("sp:")};
  const std::string rest = text.substr(mesh.sequence_parallel ? 3 : 0);
  const std::size_t colon = rest.find(':');
  if (colon != std::string::npos) mesh.data = rest.substr(0, colon);
  std::string sizes = colon == std::string::npos ? rest : rest.substr(colon + 1);
  std::optional<int> domain = 1, dp = 1, tp = 1;
  if (const std::size_t d = sizes.find('d');
      d != std::string::npos && (d == 0 || (d > 1 && sizes[d - 1] == 'x'))) {
    domain = parse_integer<int>(sizes.substr(d + 1));
    sizes.resize(d == 0 ? 0 : d - 1);
  }
  if (domain == 1 || !sizes.empty()) {
    const std::size_t x = std::min(sizes.find('x'), sizes.size());
    dp = parse_integer<int>(sizes.substr(0, x));
    tp = parse_integer<int>(sizes.substr(std::min(x + 1, sizes.size())));
  }
  const bool known = mesh.data == "ddp" || mesh.data == "fsdp" || mesh.data == "hsdp";
  if (!known || !dp || !tp || !domain || *dp < 1 || *tp < 1 || *domain < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("parity: mesh \"{}\" is not dp x tp; expected such as \"2x1\", or \"fsdp:2x1\", "
                            "or of maps \"2x1xd2\", with a domain axis",
                            text));
  mesh.dp = *dp;
  mesh.tp = *tp;
  mesh.domain = *domain;
  return mesh;
}

// "2x1", or "2x1>1x2": stopped in the middle on the first mesh and resumed on the second.
Run parse_run(const std::string& text) {
  const std::size_t sign = text.find('>');
  if (sign == std::string::npos) return {parse(text), {}, "auto", text};
  return {parse(text.substr(sign + 1)), parse(text.substr(0, sign)), "auto", text};
}

// The columns. Each mesh of several ranks is trained over each of several transports; one rank needs none.
std::vector<Run> runs_of(const Flags& flags) {
  std::vector<Run> meshes, runs;
  for (const std::string& text : flags.meshes) meshes.push_back(parse_run(text));
  if (flags.resume && meshes.size() > 1)
    meshes.push_back(parse_run(fmt::format("{}>{}", meshes[1].mesh.text, meshes.back().mesh.text)));
  for (const Run& run : meshes) {
    const bool alone = run.mesh.ranks() == 1 && (!run.before || run.before->ranks() == 1);
    for (const std::string& backend : flags.backends) {
      Run& added = runs.emplace_back(run);
      added.backend = backend;
      if (flags.backends.size() > 1 && !alone) added.name = fmt::format("{} {}", run.name, backend);
      if (alone) break;
    }
  }
  return runs;
}

// The configuration of the run on a mesh.
TrainConfig config_on(const Mesh& mesh, const TrainConfig& of_all) {
  TrainConfig c = of_all;
  c.data = mesh.data;
  c.dp = mesh.dp;
  c.tp = mesh.tp;
  c.domain = mesh.domain;
  c.sequence_parallel = c.sequence_parallel || mesh.sequence_parallel;
  return c;
}

// Throws what is wrong with it.
void check(const Mesh& mesh, const TrainConfig& of_all) {
  try {
    config_on(mesh, of_all).check(mesh.ranks());
  } catch (const Error& e) {
    constexpr std::string_view kTrain = "train: ";
    std::string_view text = e.what();
    if (text.starts_with(kTrain)) text.remove_prefix(kTrain.size());
    throw Error(e.code(), fmt::format("parity: on {}: {}", mesh.text, text));
  }
}

// A folder of this run; the destructor removes it with its contents.
class Scratch {
 public:
  Scratch() {
    std::error_code error;
    const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
    std::string pattern = (parent / "weft-parity-XXXXXX").string();
    if (error || mkdtemp(pattern.data()) == nullptr)
      throw Error(ErrorCode::system,
                  fmt::format("parity: cannot make a temporary folder{}; TMPDIR says where",
                              error ? "" : fmt::format(" \"{}\": {}", pattern, system_words(errno))));
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& file) {
  constexpr std::size_t kMostOfRun = std::size_t{1} << 32;
  return read_regular_file(file.string(), fmt::format("parity: \"{}\":", file.string()), kMostOfRun);
}

// Reads the losses and norms of a run from its metrics.
void read_metrics(const std::filesystem::path& file, RunContents& to) {
  FileIn in(file);
  for (std::string line; std::getline(in, line);) {
    const std::string where = fmt::format("parity: {}:{}", file.string(), to.losses.size() + 1);
    const nlohmann::json row = parse_json(line, where + ": it");
    const JsonReader reader(where, row, "");
    const auto number = [&](const char* key, bool may_be_none = false) {
      // JSON has no NaN and no infinity: the norm of a step that loss scaling skips is null.
      if (may_be_none && reader.at(key).is_null()) return std::numeric_limits<double>::quiet_NaN();
      if (!reader.at(key).is_number())
        reader.wrong(key, fmt::format("is {}; expected a number", shown_json(reader.at(key))));
      return reader.at(key).get<double>();
    };
    to.losses.push_back(number("loss"));
    to.norms.push_back(number("grad_norm", true));
  }
}

// Trains once and compares nothing. The folder `files` is this run's own.
class Runner {
 public:
  Runner(const Flags& flags, const Scratch& scratch)
      : flags_(flags), scratch_(scratch), model_(scratch.path() / "model.toml") {
    write_new_file(model_, kind_of(flags.config).table(flags.config));
  }

  // The first `steps` steps. `values_of`: the tensor whose elements in the last step are wanted. A run over
  // two meshes changes them in the middle of the steps that are compared, also if it is to end earlier.
  RunContents operator()(const Run& run, std::int64_t steps, double lr_factor = 1,
                         const std::string& values_of = "") {
    files_ = scratch_.path() / std::to_string(count_++);
    std::filesystem::create_directory(files_);
    RunContents contents;
    const RunEnds ends = run.before ? ends_of_run(steps, flags_.compared) : RunEnds{0, steps};
    const std::string save = (files_ / "save").string();
    if (ends.second == 0) {
      start(run, *run.before, ends.first, lr_factor, {}, values_of);
    } else if (ends.first > 0) {
      start(run, *run.before, ends.first, lr_factor, {"--save", save});
      read_hashes(contents);
      start(run, run.mesh, ends.second, lr_factor, {"--save", save, "--resume"}, values_of);
    } else {
      start(run, run.mesh, ends.second, lr_factor, {}, values_of);
    }
    read_hashes(contents);
    read_metrics(files_ / "metrics", contents);
    if (static_cast<std::int64_t>(contents.losses.size()) != steps)
      throw Error(ErrorCode::system, fmt::format("parity: {} losses on dp x tp = {}; expected {}",
                                                 contents.losses.size(), run.name, steps));
    return contents;
  }
  // The elements of the tensor in the last run.
  std::string values() const { return read_file(files_ / "values"); }

 private:
  void start(const Run& run, const Mesh& mesh, std::int64_t until, double lr_factor,
             const std::vector<std::string>& more, const std::string& values_of = "") {
    TrainConfig config = config_on(mesh, flags_.config);
    config.peak_lr *= lr_factor;
    config.floor_lr *= lr_factor;
    std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe").string(), "train",
                                     "--config", model_.string()};
    const std::vector<std::string> words = to_words(config);
    command.insert(command.end(), words.begin(), words.end());
    command.insert(command.end(),
                   {"--data", mesh.data, "--dp", std::to_string(mesh.dp), "--tp", std::to_string(mesh.tp),
                    "--domain", std::to_string(mesh.domain), "--until", std::to_string(until), "--metrics",
                    (files_ / "metrics").string(), "--progress", "none"});
    if (mesh.ranks() > 1) command.insert(command.end(), {"--backend", run.backend});
    command.insert(command.end(), more.begin(), more.end());
    if (flags_.config.exact)
      command.insert(command.end(), {"--hash-every", "1", "--hash-file", (files_ / "hashes").string()});
    if (!values_of.empty())
      command.insert(command.end(),
                     {"--values-of", values_of, "--values-file", (files_ / "values").string()});
    fmt::print("dp x tp = {}: to step {} on {} rank{} …\n", run.name, until, mesh.ranks(),
               mesh.ranks() == 1 ? "" : "s");
    std::fflush(stdout);
    const int status = launch({.ranks = mesh.ranks(), .tag_output = true}, command);
    if (status != 0)
      throw Error(ErrorCode::system,
                  fmt::format("parity: training on dp x tp = {} ended with {}", run.name, status));
  }
  void read_hashes(RunContents& to) const {
    if (!flags_.config.exact) return;
    const std::filesystem::path file = files_ / "hashes";
    const auto more = read_contents(read_file(file), "parity: " + file.string());
    to.hashes.insert(to.hashes.end(), more.begin(), more.end());
  }

  const Flags& flags_;
  const Scratch& scratch_;
  const std::filesystem::path model_;
  std::filesystem::path files_;  // of the last run
  int count_ = 0;
};

// A row of losses for every `every` steps and the last one, and a row of the largest differences. `control`:
// null if there was no control run. Many meshes are several tables of kColumns.
void print_table(std::vector<std::string> names, const std::vector<Losses>& losses, const Losses* control,
                 std::int64_t every, const std::string& loss) {
  std::vector<const Losses*> columns;
  for (const Losses& l : losses) columns.push_back(&l);
  if (control != nullptr) {
    names.emplace_back("control");
    columns.push_back(control);
  }
  std::vector<std::vector<double>> d;
  for (const Losses* column : columns) d.push_back(differences(losses[0], *column));
  const std::size_t steps = losses[0].size();
  std::size_t width = 9;  // of a loss with 7 digits behind the point
  for (const std::string& name : names) width = std::max(width, name.size());
  constexpr std::size_t kStep = 5, kGap = 2, kOfWorst = 7;
  const std::size_t in_a_table = (kColumns - kStep - kGap - kOfWorst) / (width + kGap);
  fmt::print("\nLoss in {}, same seed, same global batch; dp x tp:\n", loss);
  for (std::size_t first = 0; first < columns.size(); first += in_a_table) {
    const std::size_t end = std::min(first + in_a_table, columns.size());
    const bool last = end == columns.size();  // it tells the worst of all meshes
    fmt::print("\n{:>5}", "step");
    for (std::size_t i = first; i < end; ++i) fmt::print("  {:>{}}", names[i], width);
    fmt::print("{}\n", last ? "    worst" : "");
    for (std::size_t step = 0; step < steps; ++step) {
      if (static_cast<std::int64_t>(step) % every != 0 && step + 1 != steps) continue;
      fmt::print("{:>5}", step);
      for (std::size_t i = first; i < end; ++i) fmt::print("  {:>{}.7f}", (*columns[i])[step], width);
      double worst = 0;
      for (std::size_t i = 0; i < losses.size(); ++i) worst = std::max(worst, d[i][step]);
      fmt::print("{}\n", last ? fmt::format("  {:>7.1e}", worst) : "");
    }
    fmt::print("{:>5}", "worst");
    for (std::size_t i = first; i < end; ++i)
      fmt::print("  {:>{}.2e}", *std::max_element(d[i].begin(), d[i].end()), width);
    fmt::print("\n");
  }
}

// The values of the tensor in which two runs differ first: both are trained again up to that step.
std::string explain(const ContentDifference& d, const Run& first, const Run& other, Runner& train) {
  if (!d.tensor) return fmt::format("step {}: {}", d.step, d.what);
  const std::string name = fmt::format("{} {}", d.tensor->kind, d.tensor->path);
  std::string values[2];
  for (const bool second : {false, true}) {
    train(second ? other : first, d.step + 1, 1, name);
    values[second ? 1 : 0] = train.values();
  }
  return fmt::format("step {}: {}: {}", d.step, name, value_difference(values[0], values[1], "parity"));
}

void publish(NewFile& file, const nlohmann::json& content) {
  file.write(content.dump(1) + "\n");
  file.publish();
}

// Compares the bits of all runs with those of the first.
int exact_parity(const Flags& flags, const std::vector<Run>& runs, Runner& train, NewFile* to) {
  std::vector<RunContents> found;
  std::vector<std::string> names;
  nlohmann::json j{{"exact", true}, {"steps", flags.compared}};
  std::string verdict;
  for (const Run& run : runs) {
    found.push_back(train(run, flags.compared));
    names.push_back(run.name);
    j["loss"][run.name] = found.back().losses;
    const auto d = first_difference(found[0], found.back());
    if (!d || !verdict.empty()) continue;
    verdict = fmt::format("{} differs from {}: {}", run.name, runs[0].name, explain(*d, runs[0], run, train));
  }
  const bool passed = verdict.empty();
  if (passed) {
    const auto count = [&](std::string_view kind) {
      return std::count_if(found[0].hashes.begin(), found[0].hashes.end(), [&](const RunContents::Hash& h) {
        return h.name.kind == kind && h.name.step + 1 == flags.compared;
      });
    };
    verdict = fmt::format(
        "EXACT: {} have the same bits of {} activations, losses, norms, {} gradients, {} parameters and {} "
        "tensors of the optimizer's state in each of {} steps",
        fmt::join(names, ", "), count("activation"), count("gradient"), count("parameter"), count("state"),
        flags.compared);
  }
  fmt::print("\n{}\n", folded(verdict));
  j["passed"] = passed;
  j["verdict"] = verdict;
  if (to != nullptr) publish(*to, j);
  return passed ? 0 : 1;
}

// Compares the losses of all runs with those of the first, and with a control run if they differ.
int loss_parity(const Flags& flags, const std::vector<Run>& runs, Runner& train, NewFile* to) {
  std::vector<Losses> losses;
  std::vector<std::string> names;
  for (const Run& run : runs) {
    losses.push_back(train(run, flags.compared).losses);
    names.push_back(run.name);
  }
  ParityVerdict verdict = verdict_of(losses, nullptr, flags.tolerance);
  std::optional<Losses> control;
  if (!verdict.passed) {  // by rounding?
    fmt::print("control, a learning rate 1 + {:.0e} times as high:\n", kControlRate - 1);
    control = train(runs[0], flags.compared, kControlRate).losses;
    verdict = verdict_of(losses, &*control, flags.tolerance);
  }
  print_table(names, losses, control ? &*control : nullptr, flags.every,
              kind_of(flags.config).words(flags.config).loss);
  fmt::print("\n{}\n",
             folded(sentence(verdict, names, losses[0], control ? &*control : nullptr, flags.tolerance)));
  if (to != nullptr) {
    nlohmann::json j{{"worst", verdict.worst}, {"tolerance", flags.tolerance}, {"passed", verdict.passed}};
    for (std::size_t i = 0; i < runs.size(); ++i) j["loss"][names[i]] = losses[i];
    if (control) j["control"] = *control;
    publish(*to, j);
  }
  return verdict.passed ? 0 : 1;
}

int parity(Flags flags) {
  const bool exact = flags.config.exact;
  if (flags.meshes.empty())
    flags.meshes =
        flags.config.is_of_maps() ? (exact ? kExactMapMeshes : kMapMeshes) : (exact ? kExactMeshes : kMeshes);
  const std::vector<Run> runs = runs_of(flags);
  if (runs.size() < 2)
    throw Error(ErrorCode::bad_argument,
                fmt::format("parity: meshes are {}: nothing to compare; expected two or more, as in 1x1,2x1",
                            fmt::join(flags.meshes, ",")));
  if (flags.compared > flags.config.steps)
    throw Error(ErrorCode::bad_argument, fmt::format("parity: compare is {}; expected at most {}, the steps",
                                                     flags.compared, flags.config.steps));
  if (flags.compared == 0) flags.compared = std::min<std::int64_t>(exact ? 5 : 50, flags.config.steps);
  for (const Run& run : runs) {  // all of them, before the first one runs
    check(run.mesh, flags.config);
    if (!run.before) continue;
    check(*run.before, flags.config);
    if (flags.compared < 2)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("parity: compare is {}; expected 2 or more for {}, which stops in the middle",
                              flags.compared, run.name));
  }
  std::optional<NewFile> file;  // a file that cannot be written is an error before the first run, too
  if (!flags.json.empty()) file.emplace(flags.json, "parity: --json: ");
  // If nobody reads the output any more, the write that fails says so, and the folder is removed.
  ::signal(SIGPIPE, SIG_IGN);
  const Scratch scratch;
  Runner train(flags, scratch);
  return (exact ? exact_parity : loss_parity)(flags, runs, train, file ? &*file : nullptr);
}

}  // namespace

void add_parity(CLI::App& app, const std::vector<std::string>& words, Body& chosen) {
  auto flags = std::make_shared<Flags>();
  flags->config.threads = 1;  // as many ranks as cores, or more
  CLI::App* sub = app.add_subcommand(
      "parity", "Train on several meshes and compare the losses, or with --exact all bits");
  const auto file = std::make_shared<ConfigFile>(*sub, words);
  add_train_flags(*sub, flags->config, *file);
  file->take(
      sub->add_option(
             "--meshes", flags->meshes,
             "dp x tp, the first is the reference; fsdp:2x1 divides the parameters, hsdp:4x1 in two copies; "
             "sp:1x2 cuts sequences; d2 and 2x1xd2 cut the maps of --model weather. Without: "
             "1x1,2x1,1x2,2x2,1x4; with --exact: 1x1,2x1,1x2,2x2,sp:1x2,fsdp:2x1; of maps "
             "1x1,2x1,1x2,d2,d4,2x1xd2; with --exact 1x1,2x1,d2,d4,2x1xd2,fsdp:2x1xd2")
          ->delimiter(','),
      &flags->meshes);
  file->take(sub->add_option("--backends", flags->backends,
                             "Transports, each of which trains every mesh of several ranks: shm, gloo, "
                             "mpi-openmpi, mpi-mpich or auto")
                 ->delimiter(',')
                 ->capture_default_str(),
             &flags->backends);
  file->take(sub->add_flag("--resume", flags->resume,
                           "Add a run that stops in the middle on the second mesh and is resumed on the "
                           "last; --meshes takes such runs, too: 2x1>1x2"),
             &flags->resume);
  file->take(sub->add_option("--compare", flags->compared,
                             "Steps to run of the schedule; 0: 50 (with --exact 5), or all of fewer")
                 ->check(number_at_least(0))
                 ->capture_default_str(),
             &flags->compared);
  file->take(sub->add_option("--tolerance", flags->tolerance,
                             "Relative difference of a loss from which on a control run judges")
                 ->check(number_between(0, 1e9))
                 ->capture_default_str(),
             &flags->tolerance);
  file->take(sub->add_option("--every", flags->every, "Print one of so many steps")
                 ->check(number_at_least(1))
                 ->capture_default_str(),
             &flags->every);
  file->take(sub->add_option("--json", flags->json, "File for all losses"), &flags->json);
  arrange_tables(*file);
  sub->callback([flags, file, &chosen] {
    flags->config.fill_in();
    if (file->print_asked()) {
      chosen = [file] {
        fmt::print("{}", file->text());
        return 0;
      };
    } else {
      chosen = [flags] { return parity(*flags); };
    }
  });
}

}  // namespace weft::tools
