#include "layers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "competitors.hpp"
#include "contest.hpp"
#include "results.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

std::vector<std::string> cases_of(const Options& o) {
  std::vector<std::string> cases;  // in the order of the programs
  for (const std::string& layer : o.layers)
    for (const std::string& dtype : o.dtypes)
      for (const std::int64_t tokens : o.tokens)
        for (const std::string& pass : o.passes)
          cases.push_back(fmt::format("{}/{}/{}/{}", layer, dtype, tokens, pass));
  return cases;
}

void check_layers(const Options& o) {
  expect_known("--layers", o.layers, {"linear2", "mlp", "attention", "conv", "head"});
  expect_known("--passes", o.passes, {"forward", "both"});
  if (o.against.empty()) {
    expect_known("--dtype", o.dtypes, {"f32", "bf16", "f8e4m3"});
  } else {
    expect_known("--against", o.against, {"torch"});
    expect_known("--dtype", o.dtypes, {"f32", "bf16"});
  }
  std::vector<std::string> tokens;
  for (const std::int64_t t : o.tokens) tokens.push_back(std::to_string(t));
  expect_known("--tokens", tokens, {"8", "32", "128", "512", "2048", "8192"});
  for (const int n : o.tp)
    if (n != 1 && n != 2 && n != 4 && n != 8)
      throw Error(ErrorCode::bad_argument, fmt::format("bench: --tp \"{}\"; expected 1, 2, 4, 8", n));
}

enum class What { ours, independent, torch };

// weft's layers on one rank and on several, and torch's.
class Layers {
 public:
  Layers(const Options& o, const WorkFolder& folder) : o_(o), contest_(o, "layers", cases_of(o)) {
    enter(folder, What::ours, 1);
    for (const int n : o.tp)
      if (n > 1) enter(folder, What::ours, n);
    for (const int n : o.tp)
      if (n > 1 && n <= usable_cores()) enter(folder, What::independent, n);
    if (o.against.empty()) return;
    enter(folder, What::torch, 1);
    for (const int n : o.tp)
      if (n > 1) enter(folder, What::torch, n);
  }
  Contest& contest() { return contest_; }
  std::string ratios() const;

 private:
  struct Entered {
    What what;
    int ranks;
    const Contestant* contestant;
  };
  // If ranks share a core, peaks are not reported.
  static bool share_counts(const Entered& e) {
    return e.what != What::independent && e.ranks <= usable_cores();
  }
  std::string share_of_peak(const Entered& e, std::size_t k) const;
  void enter(const WorkFolder& folder, What what, int ranks) {
    const std::string n = std::to_string(ranks);
    const auto strings = [](const auto& numbers) { return fmt::format("{}", fmt::join(numbers, ",")); };
    std::string title;
    Job::Start start;
    start.ranks = ranks;
    const char* const crowded = ranks > usable_cores() ? " (oversubscribed)" : "";
    if (what == What::torch) {
      title = ranks == 1 ? "torch" : "torch tp " + n;
      start.command = {o_.python, o_.programs + "/torch_layers.py"};
      start.environment["OMP_NUM_THREADS"] = "1";
    } else {
      title = what == What::independent ? "weft " + n + " x 1" : ranks == 1 ? "weft" : "weft tp " + n;
      start.command = {program(o_, "layers_bench")};
      if (what == What::independent) start.command.emplace_back("--independent");
    }
    title += crowded;
    const std::string flags[] = {"--layers", strings(o_.layers), "--dtype",  strings(o_.dtypes),
                                 "--tokens", strings(o_.tokens), "--passes", strings(o_.passes)};
    start.command.insert(start.command.end(), std::begin(flags), std::end(flags));
    all_.push_back({what, ranks, &contest_.enter(folder, title, what != What::torch, std::move(start))});
  }
  const Contestant* find(What what, int ranks) const {
    for (const Entered& e : all_)
      if (e.what == what && e.ranks == ranks) return e.contestant;
    return nullptr;
  }

  const Options& o_;
  Contest contest_;
  std::vector<Entered> all_;
};

// The products alone, as a fraction of the rate that as many cores reach on registers alone. Our program with
// as many ranks measured that rate in the same round.
std::string Layers::share_of_peak(const Entered& e, std::size_t k) const {
  const ContestCell *const one = find(What::ours, 1)->cell(k),
                           *const ours = find(What::ours, e.ranks)->cell(k),
                           *const cell = e.contestant->cell(k);
  if (one == nullptr || ours == nullptr || cell == nullptr) return "-";
  const double products = one->row.value("GFLOPs", 0.0) * one->median_us,
               peak = ours->row.value("peak_GFLOPs", 0.0) * e.ranks;
  return peak > 0 ? fmt::format("{:.0f}", 100 * products / cell->median_us / peak) : "-";
}

std::string Layers::ratios() const {
  // A quotient of times: numerator, denominator, factor.
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
  for (const Entered& e : all_)
    if (e.what == What::torch)
      ratios.push_back({e.contestant->title + " / weft", e.contestant, find(What::ours, e.ranks), 1});
  std::vector<std::vector<std::string>> table = {{"layer, dtype, tokens, pass", "GFLOP/s"}};
  for (const Ratio& r : ratios) table[0].push_back(r.title);
  for (const Entered& e : all_)
    if (share_counts(e)) table[0].push_back(e.contestant->title + " % of peak");
  for (std::size_t k = 0; k < contest_.cases().size(); ++k) {
    table.push_back({contest_.cases()[k],
                     one->cell(k) == nullptr ? "-" : digits(one->cell(k)->row.value("GFLOPs", 0.0))});
    for (const Ratio& r : ratios) {
      const ContestCell *const slow = r.slow->cell(k), *const fast = r.fast->cell(k);
      table.back().push_back(slow == nullptr || fast == nullptr
                                 ? "-"
                                 : fmt::format("{:.2f}", r.factor * slow->median_us / fast->median_us));
    }
    for (const Entered& e : all_)
      if (share_counts(e)) table.back().push_back(share_of_peak(e, k));
  }
  return draw_table(table, o_.markdown);
}

}  // namespace

void bench_layers(const Options& o) {
  check_layers(o);
  const WorkFolder folder;
  Layers layers(o, folder);
  layers.contest().run();
  fmt::print("{}{}\n{}", layers.contest().times_table("layer, dtype, tokens, pass"), layers.ratios(),
             layers.contest().notes());
  if (!o.json.empty()) write_file(o.json, layers.contest().to_json().dump(1) + "\n");
}

}  // namespace weft::bench
