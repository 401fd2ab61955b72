#include "data.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "contest.hpp"
#include "results.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

const std::vector<std::string> kCases = {"reduce/one",   "reduce/one_foreign", "reduce/buckets",
                                         "reduce/bound", "reduce/each",        "step/local",
                                         "step/ddp",     "step/fully_shard"};

// The baseline of a case. It is one all-reduce of the same memory, or a step without communication.
std::string baseline_of(const std::string& name) {
  if (name.starts_with("step/")) return "step/local";
  return name == "reduce/bound" || name == "reduce/one_foreign" ? "reduce/one_foreign" : "reduce/one";
}

void check_data(const Options& o) {
  expect_known("--cases", o.cases, kCases);
  if (!o.against.empty()) expect_known("--against", o.against, {"torch"});
}

void enter(Contest& contest, const WorkFolder& folder, const Options& o, bool ours) {
  Job::Start start;
  start.ranks = o.ranks;
  if (ours) {
    start.command = {program(o, "data_bench")};
  } else {
    start.command = {o.python, o.programs + "/torch_data.py"};
    start.environment["OMP_NUM_THREADS"] = "1";
  }
  start.command.insert(start.command.end(), {"--cases", fmt::format("{}", fmt::join(contest.cases(), ","))});
  contest.enter(folder, ours ? "weft" : "torch", ours, std::move(start));
}

std::string megabytes(const ContestCell* cell, const char* what) {
  if (cell == nullptr || !cell->row.contains(what)) return "-";
  return fmt::format("{:.2f}", cell->row.at(what).get<double>() * 1e-6);
}

// Each case next to its baseline, torch next to weft, and how much a rank sends.
std::string ratios(const Contest& contest, bool markdown) {
  const std::vector<std::string>& cases = contest.cases();
  std::vector<std::vector<std::string>> table = {{"case", "baseline"}};
  for (const Contestant& c : contest.all()) table[0].push_back(c.title + " / baseline");
  for (const Contestant& c : contest.all())
    if (!c.ours) table[0].push_back(c.title + " / weft");
  for (const Contestant& c : contest.all()) table[0].push_back(c.title + ": MB sent by a rank");
  table[0].push_back("in theory");
  const auto ratio = [](const ContestCell* of, const ContestCell* to) {
    return of == nullptr || to == nullptr ? "-" : fmt::format("{:.3f}", of->median_us / to->median_us);
  };
  for (std::size_t k = 0; k < cases.size(); ++k) {
    const std::string baseline = baseline_of(cases[k]);
    const auto at = static_cast<std::size_t>(std::find(cases.begin(), cases.end(), baseline) - cases.begin());
    const Contestant& ours = contest.all().front();
    table.push_back({cases[k], baseline});
    for (const Contestant& c : contest.all()) table.back().push_back(ratio(c.cell(k), c.cell(at)));
    for (const Contestant& c : contest.all())
      if (!c.ours) table.back().push_back(ratio(c.cell(k), ours.cell(k)));
    for (const Contestant& c : contest.all()) table.back().push_back(megabytes(c.cell(k), "sent_bytes"));
    table.back().push_back(megabytes(ours.cell(k), "theory_bytes"));
  }
  return draw_table(table, markdown);
}

}  // namespace

void bench_data(const Options& given) {
  Options o = given;
  if (o.cases.empty()) o.cases = kCases;
  check_data(o);
  const WorkFolder folder;
  Contest contest(o, "data", o.cases);
  enter(contest, folder, o, true);
  if (!o.against.empty()) enter(contest, folder, o, false);
  contest.run();
  fmt::print("{}{}\n{}", contest.times_table(fmt::format("{} ranks", o.ranks)), ratios(contest, o.markdown),
             contest.notes());
  if (!o.json.empty()) write_file(o.json, contest.to_json().dump(1) + "\n");
}

}  // namespace weft::bench
