// weft parity: one training on several meshes, with losses side by side.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/files/new_file.hpp"
#include "base/json_reader.hpp"
#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "columns.hpp"
#include "commands.hpp"
#include "config_file.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"
#include "parity_verdict.hpp"
#include "train_flags.hpp"
#include "weft/models/transformer_text.hpp"

namespace weft::tools {
namespace {

struct Flags {
  TrainConfig config;
  std::vector<std::string> meshes{"1x1", "2x1", "1x2", "2x2", "1x4"};
  std::int64_t compared = 0;  // 0: 50, or all if there are fewer
  double tolerance = 1e-5;
  std::int64_t every = 5;
  std::string json;
};

struct Mesh {
  std::string text;
  std::string data = "ddp";
  int dp = 1, tp = 1;
};

// "2x1", "fsdp:2x1"
Mesh parse(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string data = colon == std::string::npos ? "ddp" : text.substr(0, colon),
                    sizes = colon == std::string::npos ? text : text.substr(colon + 1);
  const std::size_t x = std::min(sizes.find('x'), sizes.size());
  const auto dp = parse_integer<int>(sizes.substr(0, x));
  const auto tp = parse_integer<int>(sizes.substr(std::min(x + 1, sizes.size())));
  const bool known = data == "ddp" || data == "fsdp" || data == "hsdp";
  if (!known || !dp || !tp || *dp < 1 || *tp < 1)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("parity: mesh \"{}\" is not dp x tp; expected such as \"2x1\", or \"fsdp:2x1\"", text));
  return {text, data, *dp, *tp};
}

// A folder of this run; the destructor removes it with its contents.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft-parity-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw_errno("parity: a temporary folder", errno);
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

double loss_of(const std::string& line, const std::string& where) {
  const nlohmann::json row = parse_json(line, where + ": it");
  const JsonReader in(where, row, "");
  if (!in.at("loss").is_number())
    in.wrong("loss", fmt::format("is {}; expected a number", shown_json(in.at("loss"))));
  return in.at("loss").get<double>();
}

Losses losses_on(const Mesh& mesh, const Flags& flags, const std::filesystem::path& model,
                 const std::filesystem::path& file) {
  std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe").string(), "train",
                                   "--config", model.string()};
  const std::vector<std::string> words = to_words(flags.config);
  command.insert(command.end(), words.begin(), words.end());
  command.insert(command.end(), {"--data", mesh.data, "--dp", std::to_string(mesh.dp), "--tp",
                                 std::to_string(mesh.tp), "--until", std::to_string(flags.compared),
                                 "--metrics", file.string(), "--progress", "none"});
  fmt::print("dp x tp = {}: {} steps on {} rank{} …\n", mesh.text, flags.compared, mesh.dp * mesh.tp,
             mesh.dp * mesh.tp == 1 ? "" : "s");
  std::fflush(stdout);
  const int status = launch({.ranks = mesh.dp * mesh.tp, .tag_output = true}, command);
  if (status != 0)
    throw Error(ErrorCode::system,
                fmt::format("parity: training on dp x tp = {} ended with {}", mesh.text, status));
  FileIn in(file);
  Losses losses;
  for (std::string line; std::getline(in, line);)
    losses.push_back(loss_of(line, fmt::format("parity: {}:{}", file.string(), losses.size() + 1)));
  if (static_cast<std::int64_t>(losses.size()) != flags.compared)
    throw Error(ErrorCode::system, fmt::format("parity: {} losses on dp x tp = {}; expected {}",
                                               losses.size(), mesh.text, flags.compared));
  return losses;
}

// A row of losses for every `every` steps and the last one, and a row of the largest differences. `control`:
// null if there was no control run.
void print_table(const std::vector<std::string>& names, const std::vector<Losses>& losses,
                 const Losses* control, std::int64_t every) {
  std::vector<const Losses*> columns;
  for (const Losses& l : losses) columns.push_back(&l);
  if (control != nullptr) columns.push_back(control);
  std::vector<std::vector<double>> d;
  for (const Losses* column : columns) d.push_back(differences(losses[0], *column));
  fmt::print("\nLoss in nats per byte, same seed, same global batch; dp x tp:\n\n{:>5}", "step");
  for (const std::string& name : names) fmt::print("  {:>11}", name);
  if (control != nullptr) fmt::print("  {:>11}", "control");
  fmt::print("  {:>10}\n", "worst");
  const std::size_t steps = losses[0].size();
  for (std::size_t step = 0; step < steps; ++step) {
    if (static_cast<std::int64_t>(step) % every != 0 && step + 1 != steps) continue;
    fmt::print("{:>5}", step);
    for (const Losses* column : columns) fmt::print("  {:>11.7f}", (*column)[step]);
    double worst = 0;  // of the meshes
    for (std::size_t i = 0; i < losses.size(); ++i) worst = std::max(worst, d[i][step]);
    fmt::print("  {:>10.2e}\n", worst);
  }
  fmt::print("{:>5}", "worst");
  for (const std::vector<double>& all : d)
    fmt::print("  {:>11.2e}", *std::max_element(all.begin(), all.end()));
}

int parity(Flags flags) {
  std::vector<Mesh> meshes;
  for (const std::string& text : flags.meshes) meshes.push_back(parse(text));
  if (meshes.size() < 2)
    throw Error(ErrorCode::bad_argument,
                fmt::format("parity: meshes are {}: nothing to compare; expected two or more, as in 1x1,2x1",
                            fmt::join(flags.meshes, ",")));
  if (flags.compared > flags.config.steps)
    throw Error(ErrorCode::bad_argument, fmt::format("parity: compare is {}; expected at most {}, the steps",
                                                     flags.compared, flags.config.steps));
  if (flags.compared == 0) flags.compared = std::min<std::int64_t>(50, flags.config.steps);
  for (const Mesh& m : meshes) {  // all of them, before the first one runs
    TrainConfig c = flags.config;
    c.data = m.data;
    c.dp = m.dp;
    c.tp = m.tp;
    c.check(m.dp * m.tp);
  }
  const Scratch scratch;
  const std::filesystem::path model = scratch.path() / "model.toml";
  write_new_file(model, transformer_text(flags.config.model));
  std::vector<Losses> losses;
  for (const Mesh& m : meshes)
    losses.push_back(losses_on(m, flags, model, scratch.path() / (m.text + ".jsonl")));

  ParityVerdict verdict = verdict_of(losses, nullptr, flags.tolerance);
  std::optional<Losses> control;
  if (!verdict.passed) {  // by rounding?
    Flags faster = flags;
    faster.config.peak_lr *= kControlRate;
    faster.config.floor_lr *= kControlRate;
    fmt::print("control: a learning rate 1 + {:.0e} times as high, ", kControlRate - 1);
    control = losses_on(meshes[0], faster, model, scratch.path() / "control.jsonl");
    verdict = verdict_of(losses, &*control, flags.tolerance);
  }
  std::vector<std::string> names;
  for (const Mesh& m : meshes) names.push_back(m.text);
  print_table(names, losses, control ? &*control : nullptr, flags.every);
  fmt::print("\n\n{}\n",
             folded(sentence(verdict, names, losses[0], control ? &*control : nullptr, flags.tolerance)));
  if (!flags.json.empty()) {
    nlohmann::json j{{"worst", verdict.worst}, {"tolerance", flags.tolerance}, {"passed", verdict.passed}};
    for (std::size_t i = 0; i < meshes.size(); ++i) j["loss"][meshes[i].text] = losses[i];
    if (control) j["control"] = *control;
    write_new_file(flags.json, j.dump(1) + "\n", "parity: --json: ");
  }
  return verdict.passed ? 0 : 1;
}

}  // namespace

void add_parity(CLI::App& app, const std::vector<std::string>& words, Body& chosen) {
  auto flags = std::make_shared<Flags>();
  flags->config.threads = 1;  // as many ranks as cores, or more
  CLI::App* sub = app.add_subcommand("parity", "Train on several meshes and compare the losses");
  const auto file = std::make_shared<ConfigFile>(*sub, words);
  add_train_flags(*sub, flags->config, *file);
  file->take(
      sub->add_option(
             "--meshes", flags->meshes,
             "dp x tp, the first is the reference; fsdp:2x1 divides the parameters, hsdp:4x1 in two copies")
          ->delimiter(',')
          ->capture_default_str(),
      &flags->meshes);
  file->take(
      sub->add_option("--compare", flags->compared, "Steps to run of the schedule; 0: 50, or all of fewer")
          ->check(CLI::NonNegativeNumber)
          ->capture_default_str(),
      &flags->compared);
  file->take(sub->add_option("--tolerance", flags->tolerance,
                             "Largest relative difference of a loss without a control run")
                 ->check(number_between(-1, 1e9))  // below 0: one that nothing meets
                 ->capture_default_str(),
             &flags->tolerance);
  file->take(sub->add_option("--every", flags->every, "Print one of so many steps")
                 ->check(CLI::PositiveNumber)
                 ->capture_default_str(),
             &flags->every);
  file->take(sub->add_option("--json", flags->json, "File for all losses"), &flags->json);
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
