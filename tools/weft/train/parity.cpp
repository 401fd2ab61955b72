// weft parity: one training on several meshes, with losses side by side.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/files/new_file.hpp"
#include "base/json_reader.hpp"
#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "commands.hpp"
#include "config_file.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"
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

std::vector<double> losses_on(const Mesh& mesh, const Flags& flags, const std::filesystem::path& model,
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
  std::vector<double> losses;
  for (std::string line; std::getline(in, line);)
    losses.push_back(loss_of(line, fmt::format("parity: {}:{}", file.string(), losses.size() + 1)));
  if (static_cast<std::int64_t>(losses.size()) != flags.compared)
    throw Error(ErrorCode::system, fmt::format("parity: {} losses on dp x tp = {}; expected {}",
                                               losses.size(), mesh.text, flags.compared));
  return losses;
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
  std::vector<std::vector<double>> losses;
  for (const Mesh& m : meshes)
    losses.push_back(losses_on(m, flags, model, scratch.path() / (m.text + ".jsonl")));

  fmt::print("\nLoss in nats per byte, same seed, same global batch; dp x tp:\n\n{:>5}", "step");
  for (const Mesh& m : meshes) fmt::print("  {:>11}", m.text);
  fmt::print("  {:>10}\n", "worst");
  std::vector<double> worst(meshes.size(), 0);
  double overall = 0;
  for (std::int64_t step = 0; step < flags.compared; ++step) {
    const auto at = static_cast<std::size_t>(step);
    double here = 0;
    for (std::size_t i = 0; i < meshes.size(); ++i) {
      const double d = std::abs(losses[i][at] - losses[0][at]) / std::abs(losses[0][at]);
      worst[i] = std::max(worst[i], d);
      here = std::max(here, d);
      if (!std::isfinite(losses[i][at])) here = worst[i] = INFINITY;
    }
    overall = std::max(overall, here);
    if (step % flags.every != 0 && step + 1 != flags.compared) continue;
    fmt::print("{:>5}", step);
    for (const auto& l : losses) fmt::print("  {:>11.7f}", l[at]);
    fmt::print("  {:>10.2e}\n", here);
  }
  fmt::print("{:>5}", "worst");
  for (const double w : worst) fmt::print("  {:>11.2e}", w);
  const bool good = overall <= flags.tolerance;
  fmt::print("\n\nworst difference relative to {}: {:.2e}; at most {:.0e} is allowed: {}\n", meshes[0].text,
             overall, flags.tolerance, good ? "passed" : "FAILED");
  if (!flags.json.empty()) {
    nlohmann::json j{{"worst", overall}, {"tolerance", flags.tolerance}, {"passed", good}};
    for (std::size_t i = 0; i < meshes.size(); ++i) j["loss"][meshes[i].text] = losses[i];
    write_new_file(flags.json, j.dump(1) + "\n", "parity: --json: ");
  }
  return good ? 0 : 1;
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
  file->take(sub->add_option("--tolerance", flags->tolerance, "Largest relative difference of a loss")
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
