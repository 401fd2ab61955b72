#include "contest.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "columns.hpp"
#include "competitors.hpp"
#include "results.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

using json = nlohmann::ordered_json;

Duration seconds(double s) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s)); }

}  // namespace

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

Contest::Contest(const Options& options, std::string op, std::vector<std::string> cases)
    : o_(options), op_(std::move(op)), cases_(std::move(cases)) {}

Contestant& Contest::enter(const WorkFolder& folder, const std::string& title, bool ours, Job::Start start) {
  Contestant c;
  c.title = title;
  c.ours = ours;
  const std::string flags[] = {
      "--seconds", fmt::format("{}", o_.seconds), "--ranks", std::to_string(start.ranks),
      "--rounds",  std::to_string(o_.rounds),     "--rows"};
  start.command.insert(start.command.end(), std::begin(flags), std::end(flags));
  c.cells.resize(cases_.size());
  c.job = std::make_unique<Job>(folder, fmt::format("{}.{}", op_, all_.size()), start);
  const auto hello = c.job->next(seconds(std::max(o_.limit, 60.0)));
  if (hello && hello->contains("settings")) {
    c.version = hello->at("settings").get<std::string>();
  } else {
    give_up(c, hello ? "it printed no settings" : c.job->problem());
  }
  all_.push_back(std::move(c));
  return all_.back();
}

void Contest::run() {
  for (int round = 0; round < o_.rounds; ++round)
    for (std::size_t k = 0; k < cases_.size(); ++k) {
      checks_ = json();
      for (Contestant& c : all_) turn(c, k);
      tell(k);
    }
  for (Contestant& c : all_) c.job.reset();
  busy_ = load_.note();
}

// Our own program must be there; a peer is shown as gone.
void Contest::give_up(Contestant& c, const std::string& why) const {
  if (c.ours) throw Error(ErrorCode::system, fmt::format("bench: {}: {}: {}", op_, c.title, why));
  fmt::print(stderr, "bench: {}: {} is left out: {}\n", op_, c.title, why);
  c.gone = why;
  c.job.reset();
}

void Contest::turn(Contestant& c, std::size_t k) {
  if (c.job == nullptr) return;
  c.job->go();
  const auto row = c.job->next(seconds(std::max(o_.limit, 100.0)));
  if (!row) return give_up(c, fmt::format("{}: {}", cases_[k], c.job->problem()));
  if (row->value("case", "") != cases_[k])
    throw Error(ErrorCode::system, fmt::format("bench: {}: a row of {}; expected {}", c.title,
                                               row->value("case", ""), cases_[k]));
  if (row->contains("unsupported")) return;  // the program has no such case
  compare(c, k, *row);
  if (!c.cells[k]) c.cells[k].emplace();
  ContestCell& cell = *c.cells[k];
  const double median = row->at("median_us");
  cell.rounds.push_back(median);
  if (cell.rounds.size() > 1 && median >= cell.median_us) return;
  cell = {median, row->at("p99_us"), std::move(cell.rounds), *row};
}

void Contest::tell(std::size_t k) const {
  std::string line;
  for (const Contestant& c : all_)
    if (const ContestCell* const cell = c.cell(k); cell != nullptr && !cell->rounds.empty())
      line += fmt::format("{} {} {}", line.empty() ? "" : ",", c.title, digits(cell->rounds.back()));
  fmt::print(stderr, "{}: {}: us:{}\n", op_, cases_[k], line);
}

// Random projections and norms of all results must be equal to those of the first program.
void Contest::compare(const Contestant& c, std::size_t k, const json& row) {
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

std::string Contest::times_table(const std::string& title) const {
  std::vector<std::vector<std::string>> times = {{title}};
  for (const Contestant& c : all_) times[0].push_back(c.title);
  for (std::size_t k = 0; k < cases_.size(); ++k) {
    times.push_back({cases_[k]});
    for (const Contestant& c : all_) {
      const ContestCell* const cell = c.cell(k);
      times.back().push_back(
          cell == nullptr ? "-" : fmt::format("{} ({})", digits(cell->median_us), digits(cell->p99_us)));
    }
  }
  return fmt::format("{}: us, median of the better of {} rounds (99th percentile)\n\n{}\n", op_, o_.rounds,
                     draw_table(times, o_.markdown));
}

std::string Contest::notes() const {
  std::string text;
  const auto bullet = [&](const std::string& words) {
    text += o_.markdown ? "- " + words + "\n" : "  " + tools::folded(words, 4, 2) + "\n";
  };
  for (const Contestant& c : all_)
    bullet(fmt::format("{}: {}", c.title, c.gone.empty() ? c.version : "left out: " + c.gone));
  bullet(fmt::format("{} cores, {}", usable_cores(), scheduling()));
  if (!busy_.empty()) bullet(busy_);
  return text;
}

json Contest::to_json() const {
  json rows = json::array();
  for (const Contestant& c : all_)
    for (std::size_t k = 0; k < cases_.size(); ++k)
      if (const ContestCell* const cell = c.cell(k)) {
        json row = {{"who", c.title},         {"ranks", cell->row.value("ranks", 0)},
                    {"case", cases_[k]},      {"median_us", cell->median_us},
                    {"p99_us", cell->p99_us}, {"rounds_us", cell->rounds}};
        for (const char* extra :
             {"sent_bytes", "theory_bytes", "GFLOPs", "peak_GFLOPs", "local_us", "exchange_us", "over",
              "serial_us", "gain", "bare_us", "combine_us", "dense_us", "samples"})
          if (cell->row.contains(extra)) row[extra] = cell->row.at(extra);
        rows.push_back(std::move(row));
      }
  return {{"op", op_}, {"rows", std::move(rows)}};
}

}  // namespace weft::bench
