// The results, and their display: tables, JSON, a plot.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "competitors.hpp"
#include "options.hpp"

namespace weft::bench {

struct Cell {
  double median_us = 0, p99_us = 0, alg_gbs = 0, bus_gbs = 0;
  std::vector<double> rounds{};  ///< the medians of all of them; median_us is the least
};

struct Column {
  Competitor competitor;
  std::string version{};  ///< as the program itself says
  std::map<std::int64_t, Cell> cells{};
  std::map<std::int64_t, std::string> gaps{};  ///< why there is no cell: "did not finish in 100 s"
};

/// One operation, with all competitors.
struct Result {
  std::string op;
  Options options;
  std::string place{};  ///< "in" or "out", as the programs had it
  std::vector<Column> columns{};
  std::map<std::int64_t, double> limit_us{};  ///< the least time that the machine permits: see limit_factor()
  std::vector<std::string> notes{};           ///< who is left out, and the reason

  /// Returns whether every rank reads and writes the same bytes (a reduction in place), or copies from one
  /// place to another.
  bool passes() const;
  const Column* find(const std::string& name) const;
  /// The fastest MPI at that size; null if there is none.
  const Column* best_mpi(std::int64_t bytes) const;
};

/// Returns whether consecutive calls overlap: then the first rank never waits for the others, and a cache
/// line's latency is not in its time.
bool pipelined(const std::string& op);
/// The machine's time for an operation is the latency of a cache line (unless pipelined) plus this factor
/// times the time of one pass over `bytes` by every rank (in place: read and written; otherwise copied). At
/// least, a rank of n reads a part of every input and writes a part of every output.
double limit_factor(const std::string& op, int ranks);

/// Prints times, then a table of ratios per competitor of ours, then how each program was run.
std::string tables(const Result& r);
/// Writes all results, for programs.
std::string to_json(const std::vector<Result>& results);
/// Time over bytes, both logarithmic, and the machine's limit as a dashed line.
std::string to_svg(const Result& r);

/// Rows of cells as a table: in Markdown, or in columns for a terminal. The first column is aligned left.
std::string draw_table(const std::vector<std::vector<std::string>>& rows, bool markdown);
/// "4.18", "0.287", "24900": three or four digits.
std::string digits(double x);

/// Writes a file, or throws system that names it.
void write_file(const std::string& path, const std::string& text);

}  // namespace weft::bench
