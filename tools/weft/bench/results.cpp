#include "results.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files/new_file.hpp"
#include "base/text/plain_streams.hpp"
#include "columns.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

using json = nlohmann::ordered_json;
using Who = Competitor::Who;
using Rows = std::vector<std::vector<std::string>>;

std::string processor() {
  FileIn file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string heading(const Result& r) {
  std::string what = fmt::format("{} {}, {} {}", r.op, fmt::join(r.options.dtypes, " and "), r.options.ranks,
                                 r.options.ranks_as);
  if (r.op != "ping_pong" && r.op != "one_way") what += r.place == "in" ? ", in place" : ", out of place";
  return what + (r.options.buffers == "hot" ? ", the same buffers every time" : ", rotating buffers");
}

std::string time_cell(const Column& c, std::int64_t bytes) {
  if (const auto cell = c.cells.find(bytes); cell != c.cells.end())
    return fmt::format("{} ({})", digits(cell->second.median_us), digits(cell->second.p99_us));
  if (const auto gap = c.gaps.find(bytes); gap != c.gaps.end()) return gap->second;
  return "-";
}

std::string ratio_cell(const Column& ours, const Column* theirs, std::int64_t bytes) {
  const auto mine = ours.cells.find(bytes);
  if (theirs == nullptr || mine == ours.cells.end()) return "-";
  const auto other = theirs->cells.find(bytes);
  if (other != theirs->cells.end())
    return fmt::format("{:.2f}", other->second.median_us / mine->second.median_us);
  return theirs->gaps.count(bytes) != 0 && theirs->gaps.at(bytes).starts_with("did not finish") ? "ahead"
                                                                                                : "-";
}

}  // namespace

bool Result::passes() const {
  return place == "in" && (op == "all_reduce" || op == "reduce" || op == "reduce_scatter");
}

const Column* Result::find(const std::string& name) const {
  for (const Column& c : columns)
    if (c.competitor.name == name) return &c;
  return nullptr;
}

const Column* Result::best_mpi(std::int64_t bytes) const {
  const Column* best = nullptr;
  for (const Column& c : columns)
    if (c.competitor.who == Who::mpi && c.cells.count(bytes) != 0 &&
        (best == nullptr || c.cells.at(bytes).median_us < best->cells.at(bytes).median_us))
      best = &c;
  return best;
}

bool pipelined(const std::string& op) { return op == "broadcast" || op == "reduce" || op == "one_way"; }

double limit_factor(const std::string& op, int ranks) {
  // The amount that is read and written per rank, in halves of a copy: all of S, or S read and S / n written.
  if (op == "reduce_scatter" || op == "reduce") return (1 + 1.0 / ranks) / 2;
  return 1;
}

std::string digits(double x) {
  if (!(x > 0)) return fmt::format("{}", x);
  const int before = static_cast<int>(std::floor(std::log10(x))) + 1;
  return fmt::format("{:.{}f}", x, std::clamp(4 - std::max(before, 1), 0, 3));
}

namespace {

std::string draw_panel(const Rows& rows, bool markdown);

// The tables that are printed one below the other, so that each fits a terminal. All have the first column.
std::vector<Rows> panels(const Rows& rows) {
  std::vector<std::size_t> width;
  for (const auto& row : rows)
    for (std::size_t k = 0; k < row.size(); ++k) {
      if (k == width.size()) width.push_back(3);
      width[k] = std::max(width[k], row[k].size());
    }
  std::vector<Rows> all;
  for (std::size_t first = 1; first < width.size() || all.empty();) {
    std::size_t end = first, columns = width.empty() ? 0 : width[0];
    while (end < width.size() && (end == first || columns + 2 + width[end] <= tools::kColumns))
      columns += 2 + width[end++];
    Rows panel;
    for (const auto& row : rows) {
      std::vector<std::string> part;
      for (std::size_t k = 0; k < row.size(); ++k)
        if (k == 0 || (k >= first && k < end)) part.push_back(row[k]);
      panel.push_back(std::move(part));
    }
    all.push_back(std::move(panel));
    first = std::max(end, first + 1);
  }
  return all;
}

}  // namespace

std::string draw_table(const Rows& rows, bool markdown) {
  if (markdown) return draw_panel(rows, true);
  std::string text;
  for (const Rows& panel : panels(rows)) text += (text.empty() ? "" : "\n") + draw_panel(panel, false);
  return text;
}

namespace {

std::string draw_panel(const Rows& rows, bool markdown) {
  std::vector<std::size_t> width;
  for (const auto& row : rows)
    for (std::size_t k = 0; k < row.size(); ++k) {
      if (k == width.size()) width.push_back(3);
      width[k] = std::max(width[k], row[k].size());
    }
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::string line = markdown ? "|" : "";
    for (std::size_t k = 0; k < rows[i].size(); ++k)
      line += k == 0 ? fmt::format("{}{:<{}}", markdown ? " " : "", rows[i][k], width[k])
                     : fmt::format("{}{:>{}}", markdown ? " | " : "  ", rows[i][k], width[k]);
    text += line + (markdown ? " |\n" : "\n");
    if (i == 0) {
      std::string rule = markdown ? "|" : "";
      for (std::size_t k = 0; k < width.size(); ++k)
        rule += markdown ? (k == 0 ? "---|" : "---:|")
                         : fmt::format("{}{:-<{}}", k == 0 ? "" : "  ", "", width[k]);
      text += rule + "\n";
    }
  }
  return text;
}

}  // namespace

std::string tables(const Result& r) {
  const bool md = r.options.markdown;
  const auto title = [&](const std::string& words) {
    return (md ? "**" + words + "**" : tools::folded(words)) + "\n\n";
  };
  bool above_limit = false;
  std::string text =
      title(heading(r) +
            fmt::format(": us, median of the better of {} rounds (99th percentile)", r.options.rounds));
  Rows times = {{"bytes"}};
  for (const Column& c : r.columns) times[0].push_back(c.competitor.title);
  times[0].push_back("memory limit");
  for (const std::int64_t b : r.options.bytes) {
    times.push_back({std::to_string(b)});
    for (const Column& c : r.columns) times.back().push_back(time_cell(c, b));
    const auto limit = r.limit_us.find(b);
    times.back().push_back(limit == r.limit_us.end() ? "-" : digits(limit->second));
  }
  text += draw_table(times, md) + "\n";

  for (const Column& ours : r.columns) {
    const Competitor& mine = ours.competitor;
    if (mine.who != Who::weft || mine.dtype != r.options.dtypes.at(0)) continue;
    // The peers, and the same memory in other dtypes.
    const auto beside = [&](const Column& c) {
      return c.competitor.who != Who::weft || (c.competitor.memory == mine.memory && &c != &ours);
    };
    Rows ratios = {{"bytes", "GB/s", "bus GB/s"}};
    bool mpi = false;
    for (const Column& c : r.columns) mpi = mpi || c.competitor.who == Who::mpi;
    if (mpi) ratios[0].push_back("best MPI");
    for (const Column& c : r.columns)
      if (beside(c)) ratios[0].push_back(c.competitor.title);
    ratios[0].push_back("of the limit");
    for (const std::int64_t b : r.options.bytes) {
      const auto cell = ours.cells.find(b);
      const bool have = cell != ours.cells.end();
      ratios.push_back({std::to_string(b), have ? digits(cell->second.alg_gbs) : "-",
                        have ? digits(cell->second.bus_gbs) : "-"});
      if (mpi) {
        const Column* best = r.best_mpi(b);
        ratios.back().push_back(ratio_cell(ours, best, b) +
                                (best == nullptr ? "" : " " + best->competitor.name));
      }
      for (const Column& c : r.columns)
        if (beside(c)) ratios.back().push_back(ratio_cell(ours, &c, b));
      const auto limit = r.limit_us.find(b);
      const double share =
          have && limit != r.limit_us.end() ? 100 * limit->second / cell->second.median_us : 0;
      above_limit = above_limit || share > 100.5;
      ratios.back().push_back(share > 0 ? fmt::format("{:.0f} %", share) : "-");
    }
    text += title(fmt::format("{}: bandwidth, and the others' time divided by it", ours.competitor.title));
    text += draw_table(ratios, md) + "\n";
  }
  const auto bullet = [&](const std::string& words) {
    text += md ? "- " + words + "\n" : "  " + tools::folded(words, 4, 2) + "\n";
  };
  for (const Column& c : r.columns)
    bullet(fmt::format("{}: {}{}{}", c.competitor.title, c.version,
                       c.version.empty() || c.competitor.settings.empty() ? "" : "; ",
                       c.competitor.settings));
  if (!r.limit_us.empty())
    bullet(fmt::format("memory limit: {}each rank's {} of the bytes it must read and write",
                       pipelined(r.op) ? "" : "a cache line from rank to rank, and ",
                       r.passes() ? "pass in place" : "copy"));
  if (above_limit)
    bullet("above 100 % of the limit: the machine was busy with something else while the limit was measured");
  bullet(
      fmt::format("machine: {}, {} cores, {}", processor(), ::sysconf(_SC_NPROCESSORS_ONLN), scheduling()));
  for (const std::string& note : r.notes) bullet(note);
  return text;
}

std::string to_json(const std::vector<Result>& results) {
  utsname system{};
  ::uname(&system);
  json all = {{"machine",
               {{"processor", processor()},
                {"cores", ::sysconf(_SC_NPROCESSORS_ONLN)},
                {"system", fmt::format("{} {}", system.sysname, system.release)},
                {"scheduling", scheduling()}}},
              {"results", json::array()}};
  for (const Result& r : results) {
    json one = {{"op", r.op},
                {"dtype", fmt::format("{}", fmt::join(r.options.dtypes, ","))},
                {"ranks", r.options.ranks},
                {"ranks_as", r.options.ranks_as},
                {"place", r.place},
                {"buffers", r.options.buffers},
                {"rounds", r.options.rounds},
                {"seconds", r.options.seconds},
                {"competitors", json::array()},
                {"limit", json::array()},
                {"left_out", r.notes}};
    for (const Column& c : r.columns) {
      json rows = json::array();
      for (const auto& [bytes, cell] : c.cells)
        rows.push_back({{"bytes", bytes},
                        {"median_us", cell.median_us},
                        {"p99_us", cell.p99_us},
                        {"alg_GBs", cell.alg_gbs},
                        {"bus_GBs", cell.bus_gbs},
                        {"rounds_us", cell.rounds}});
      for (const auto& [bytes, why] : c.gaps) rows.push_back({{"bytes", bytes}, {"gap", why}});
      one["competitors"].push_back({{"name", c.competitor.name},
                                    {"version", c.version},
                                    {"settings", c.competitor.settings},
                                    {"rows", rows}});
    }
    for (const auto& [bytes, us] : r.limit_us) one["limit"].push_back({{"bytes", bytes}, {"us", us}});
    all["results"].push_back(std::move(one));
  }
  return all.dump(1) + "\n";
}

void write_file(const std::string& path, const std::string& text) { write_new_file(path, text, "bench: "); }

}  // namespace weft::bench
