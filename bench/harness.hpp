// The harness of weft's benchmarks: it registers each row of a table with Google Benchmark, verifies it,
// times it and reports it, on one rank or on many ranks that follow the first. A program makes the table in a
// function that every rank runs, and passes this function to run_ranks(); a program of one rank makes a Bench
// itself.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases.hpp"
#include "measure.hpp"
#include "weft/group/process_group.hpp"

namespace weft::bench {

using Numbers = std::vector<std::pair<std::string, double>>;

struct TableRow {
  std::string name;                        ///< "all_reduce/f32/shared/in_place/2097152"
  std::int64_t bytes = 0;                  ///< the bytes for the algorithm bandwidth, per run
  double bus_factor = 1;                   ///< bus bandwidth = algorithm bandwidth x bus_factor
  std::function<Prepared()> prepare = {};  ///< the returned Prepared owns the buffers
  /// If set, replaces `prepare` and measures the row itself; the first number is the time in us. Every rank
  /// calls it.
  std::function<Numbers(const Agree&, double seconds)> measure = {};
  Row row = {};  ///< the labels that --rows prints before the numbers
};

/// Verifies and times every row (measure.hpp). Reports the median (also as Time) and 99th percentile over the
/// samples, and the bandwidths at the median. A wrong result ends the program before it reports a number for
/// the row.
class Bench {
 public:
  /// Takes the --benchmark_… flags out of the arguments. Rank 0 runs the rows that --benchmark_filter
  /// selects, and reports them; the other ranks run the rows that rank 0 announces through `agree`.
  Bench(int& argc, char** argv, const Spec& spec = {}, Agree agree = alone, int rank = 0);
  void add(TableRow row);
  void run();

 private:
  Numbers time(const TableRow& row) const;
  std::vector<TableRow> rows_;
  Spec spec_;
  Agree agree_;
  int rank_;
  Turns turns_;
};

/// A rank of a program with many ranks.
struct RankOfBench {
  Context& context;
  std::shared_ptr<Store> store;
  ProcessGroup& group;  ///< "world", over spec.backend
  const Spec& spec;
  Agree agree;        ///< over `group`
  std::byte* common;  ///< a zeroed page that all ranks map, for data that is not communicated by collectives
  /// The means to make another group of the same ranks.
  Membership membership(const std::string& name) const;
};

/// Runs the table in spec.ranks processes or threads of this host. If a launcher (weft run, mpirun) started
/// this process as a rank, runs only that rank. Call it before the program has any thread. Returns the exit
/// status.
int run_ranks(const Spec& spec, int argc, char** argv,
              const std::function<std::vector<TableRow>(RankOfBench&)>& table, const std::string& settings);

/// The main() of such a program: parses the flags, runs the ranks, prints errors, and returns the exit
/// status; 2 means wrong flags.
int bench_main(int argc, char** argv, const Defaults& defaults,
               const std::function<std::vector<TableRow>(RankOfBench&)>& table,
               const std::function<std::string(const Spec&)>& settings);

/// "shm, ranks are processes, bound to cores"
std::string settings_of(const Spec& spec);
/// The allocator of a case's buffers: "shared" memory, or pages of the program's own.
Buffers::Allocate allocator(Context& context, std::string_view memory);
/// "/f32/shared/in_place/hot/2048"
std::string name_of(const Case& c, std::string_view memory);
/// Makes a row for each memory and case of the spec; `complete` then sets what the row measures.
using Complete = std::function<void(TableRow& row, const Case& c, const std::string& memory)>;
std::vector<TableRow> table_of(const Spec& spec, const Complete& complete);

}  // namespace weft::bench
