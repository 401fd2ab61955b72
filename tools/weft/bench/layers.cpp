#include "layers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "competitors.hpp"
#include "job.hpp"
#include "results.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

using json = nlohmann::ordered_json;

struct LayersCell {
  double median_us = 0, p99_us = 0, gflops = 0;
  std::vector<double> rounds{};
};

// A program with its number of ranks, and what it measured, case by case.
struct Contestant {
  enum class What { ours, independent, torch };
  What what = What::ours;
  int ranks = 1;
  std::string title{}, version{};
  std::unique_ptr<Job> job{};
  std::vector<std::optional<LayersCell>> cells{};
  std::string gone{};  // why it measures no more

  const LayersCell* cell(std::size_t k) const { return k < cells.size() && cells[k] ? &*cells[k] : nullptr; }
};

std::vector<std::string> cases_of(const Options& o) {
  std::vector<std::string> cases;  // in the order of the programs
  for (const std::string& layer : o.layers)
    for (const std::string& dtype : o.dtypes)
      for (const std::int64_t tokens : o.tokens)
        for (const std::string& pass : o.passes)
          cases.push_back(fmt::format("{}/{}/{}/{}", layer, dtype, tokens, pass));
  return cases;
}

void expect_known(const char* flag, const std::vector<std::string>& words,
                  const std::vector<std::string>& known) {
  if (words.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("bench: {} \"\"; expected {}", flag, fmt::join(known, ", ")));
  for (const std::string& w : words)
    if (std::find(known.begin(), known.end(), w) == known.end())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("bench: {} \"{}\"; expected {}", flag, w, fmt::join(known, ", ")));
}

void check(const Options& o) {
  expect_known("--layers", o.layers, {"linear2", "mlp", "attention", "conv", "head"});
  expect_known("--passes", o.passes, {"forward", "both"});
  expect_known("--dtype", o.dtypes, {"f32", "bf16"});
  if (!o.against.empty()) expect_known("--against", o.against, {"torch"});
  std::vector<std::string> tokens;
  for (const std::int64_t t : o.tokens) tokens.push_back(std::to_string(t));
  expect_known("--tokens", tokens, {"8", "32", "128", "512", "2048", "8192"});
  for (const int n : o.tp)
    if (n != 1 && n != 2 && n != 4 && n != 8)
      throw Error(ErrorCode::bad_argument, fmt::format("bench: --tp \"{}\"; expected 1, 2, 4, 8", n));
}

Duration seconds(double s) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s)); }

class Contest {
 public:
  Contest(const Options& o, const WorkFolder& folder) : o_(o), cases_(cases_of(o)) {
    enter(folder, Contestant::What::ours, 1);
    for (const int n : o.tp)
      if (n > 1) enter(folder, Contestant::What::ours, n);
    for (const int n : o.tp)
      if (n > 1 && n <= usable_cores()) enter(folder, Contestant::What::independent, n);
    if (o.against.empty()) return;
    enter(folder, Contestant::What::torch, 1);
    for (const int n : o.tp)
      if (n > 1) enter(folder, Contestant::What::torch, n);
  }

  void run() {
    for (int round = 0; round < o_.rounds; ++round)
      for (std::size_t k = 0; k < cases_.size(); ++k) {
        checks_ = json();
        for (Contestant& c : all_) turn(c, k);
      }
    for (Contestant& c : all_) c.job.reset();
  }

  std::string tables() const;
  json to_json() const;

 private:
  void enter(const WorkFolder& folder, Contestant::What what, int ranks) {
    Contestant c;
    c.what = what;
    c.ranks = ranks;
    const std::string n = std::to_string(ranks);
    Job::Start start;
    start.ranks = ranks;
    if (what == Contestant::What::torch) {
      c.title = ranks == 1 ? "torch" : "torch tp " + n;
      start.command = {o_.python, o_.programs + "/torch_layers.py"};
      start.environment["OMP_NUM_THREADS"] = "1";
    } else {
      c.title = what == Contestant::What::independent ? "weft " + n + " x 1"
                : ranks == 1                          ? "weft"
                                                      : "weft tp " + n;
      start.command = {program(o_, "layers_bench")};
      if (what == Contestant::What::independent) start.command.emplace_back("--independent");
    }
    const auto strings = [](const auto& numbers) { return fmt::format("{}", fmt::join(numbers, ",")); };
    const std::string flags[] = {"--layers",  strings(o_.layers),
                                 "--dtype",   strings(o_.dtypes),
                                 "--tokens",  strings(o_.tokens),
                                 "--passes",  strings(o_.passes),
                                 "--seconds", fmt::format("{}", o_.seconds),
                                 "--ranks",   n,
                                 "--rounds",  std::to_string(o_.rounds),
                                 "--rows"};
    start.command.insert(start.command.end(), std::begin(flags), std::end(flags));
    c.cells.resize(cases_.size());
    c.job = std::make_unique<Job>(folder, fmt::format("layers.{}", all_.size()), start);
    const auto hello = c.job->next(seconds(std::max(o_.limit, 60.0)));
    if (hello && hello->contains("settings")) {
      c.version = hello->at("settings").get<std::string>();
    } else {
      give_up(c, hello ? "it printed no settings" : c.job->problem());
    }
    all_.push_back(std::move(c));
  }

  // Ours must be there; a peer is shown as gone.
  void give_up(Contestant& c, const std::string& why) const {
    if (c.what != Contestant::What::torch)
      throw Error(ErrorCode::system, fmt::format("bench: layers: {}: {}", c.title, why));
    fmt::print(stderr, "bench: layers: {} is left out: {}\n", c.title, why);
    c.gone = why;
    c.job.reset();
  }

  void turn(Contestant& c, std::size_t k) {
    if (c.job == nullptr) return;
    c.job->go();
    const auto row = c.job->next(seconds(std::max(o_.limit, 100.0)));
    if (!row) return give_up(c, fmt::format("{}: {}", cases_[k], c.job->problem()));
    if (row->value("case", "") != cases_[k])
      throw Error(ErrorCode::system, fmt::format("bench: {}: a row of {}; expected {}", c.title,
                                                 row->value("case", ""), cases_[k]));
    compare(c, k, *row);
    if (!c.cells[k]) c.cells[k].emplace();
    LayersCell& cell = *c.cells[k];
    const double median = row->at("median_us");
    cell.rounds.push_back(median);
    if (cell.rounds.size() > 1 && median >= cell.median_us) return;
    cell = {median, row->at("p99_us"), row->value("GFLOPs", 0.0), std::move(cell.rounds)};
  }

  // Random projections and norms of all results must be those of our one rank.
  void compare(const Contestant& c, std::size_t k, const json& row) {
    if (checks_.is_null()) {
      checks_ = row;
      return;
    }
    const double limit = cases_[k].find("/bf16/") == std::string::npos ? 1e-4 : 3e-2;
    for (const auto& [key, want] : checks_.items()) {
      const bool norm = key.starts_with("norm_");
      if (!norm && !key.starts_with("along_")) continue;
      const double scale = norm ? want.get<double>() : checks_.at("norm_" + key.substr(6)).get<double>();
      const double got = row.value(key, std::nan(""));
      if (!(std::abs(got - want.get<double>()) <= limit * scale))
        throw Error(ErrorCode::system,
                    fmt::format("bench: {}: {}: {} is {}; expected {} as weft has it, within {}", c.title,
                                cases_[k], key, got, want.get<double>(), limit * scale));
    }
  }

  const Contestant* find(Contestant::What what, int ranks) const {
    for (const Contestant& c : all_)
      if (c.what == what && c.ranks == ranks) return &c;
    return nullptr;
  }

  const Options& o_;
  std::vector<std::string> cases_;
  std::vector<Contestant> all_;
  json checks_;  // the first program's row of this case
};

std::string Contest::tables() const {
  using What = Contestant::What;
  std::vector<std::vector<std::string>> times = {{"layer, dtype, tokens, pass"}};
  for (const Contestant& c : all_) times[0].push_back(c.title);
  for (std::size_t k = 0; k < cases_.size(); ++k) {
    times.push_back({cases_[k]});
    for (const Contestant& c : all_) {
      const LayersCell* const cell = c.cell(k);
      times.back().push_back(
          cell == nullptr ? "-" : fmt::format("{} ({})", digits(cell->median_us), digits(cell->p99_us)));
    }
  }
  // Numerator, denominator, factor: times divided.
  struct Ratio {
    std::string title;
    const Contestant *slow, *fast;
    double factor;
  };
  std::vector<Ratio> ratios;
  const Contestant* const one = find(What::ours, 1);
  for (const int n : o_.tp) {
    if (n == 1) continue;
    ratios.push_back({fmt::format("tp {}: gain", n), one, find(What::ours, n), 1});
    if (const Contestant* const apart = find(What::independent, n))
      ratios.push_back({fmt::format("{} x 1: gain", n), one, apart, static_cast<double>(n)});
  }
  for (const Contestant& c : all_)
    if (c.what == What::torch) ratios.push_back({c.title + " / weft", &c, find(What::ours, c.ranks), 1});
  std::vector<std::vector<std::string>> table = {{"layer, dtype, tokens, pass", "GFLOP/s of one rank"}};
  for (const Ratio& r : ratios) table[0].push_back(r.title);
  for (std::size_t k = 0; k < cases_.size(); ++k) {
    table.push_back({cases_[k], one->cell(k) == nullptr ? "-" : digits(one->cell(k)->gflops)});
    for (const Ratio& r : ratios) {
      const LayersCell *const slow = r.slow->cell(k), *const fast = r.fast->cell(k);
      table.back().push_back(slow == nullptr || fast == nullptr
                                 ? "-"
                                 : fmt::format("{:.2f}", r.factor * slow->median_us / fast->median_us));
    }
  }
  const std::string bullet = o_.markdown ? "- " : "  ";
  std::string text =
      fmt::format("layers: us, median of the better of {} rounds (99th percentile)\n\n{}\n{}\n", o_.rounds,
                  draw_table(times, o_.markdown), draw_table(table, o_.markdown));
  for (const Contestant& c : all_)
    text += fmt::format("{}{}: {}\n", bullet, c.title, c.gone.empty() ? c.version : "left out: " + c.gone);
  return text + fmt::format("{}{} cores, {}\n", bullet, usable_cores(), scheduling());
}

json Contest::to_json() const {
  json all = json::array();
  for (const Contestant& c : all_)
    for (std::size_t k = 0; k < cases_.size(); ++k)
      if (const LayersCell* const cell = c.cell(k))
        all.push_back({{"who", c.title},
                       {"ranks", c.ranks},
                       {"case", cases_[k]},
                       {"median_us", cell->median_us},
                       {"p99_us", cell->p99_us},
                       {"rounds_us", cell->rounds}});
  return all;
}

}  // namespace

void bench_layers(const Options& o) {
  check(o);
  const WorkFolder folder;
  Contest contest(o, folder);
  contest.run();
  fmt::print("{}", contest.tables());
  if (!o.json.empty()) write_file(o.json, json{{"op", "layers"}, {"rows", contest.to_json()}}.dump(1) + "\n");
}

}  // namespace weft::bench
