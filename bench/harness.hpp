// The harness of our benchmarks: a row of a table is registered with Google Benchmark, verified, timed and
// reported the same way everywhere, by one rank or by many that follow the first. A program makes the table
// in a function of the rank and hands it to run_ranks(), or, for one rank, makes a Bench itself.
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
  std::int64_t bytes = 0;                  ///< what the algorithm bandwidth counts, per run
  double bus_factor = 1;                   ///< bus bandwidth = algorithm bandwidth x bus_factor
  std::function<Prepared()> prepare = {};  ///< owns the buffers through what it returns; they go with it
  /// Instead of prepare: measures itself; the first number is the time, in us. Every rank calls it.
  std::function<Numbers(const Agree&, double seconds)> measure = {};
  Row row = {};  ///< what --rows prints, before the numbers
};

/// Every row is verified and timed (measure.hpp). Reported: median (also as Time) and 99th percentile over
/// the samples and the bandwidths at the median. A wrong result ends the program: no number without a right
/// answer.
class Bench {
 public:
  /// Takes the --benchmark_… flags out of the arguments. Rank 0 runs what --benchmark_filter names and
  /// reports; the others run what it says through `agree`.
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

/// A rank of a program of many.
struct RankOfBench {
  Context& context;
  std::shared_ptr<Store> store;
  ProcessGroup& group;  ///< "world", over spec.backend
  const Spec& spec;
  Agree agree;        ///< over `group`
  std::byte* common;  ///< a page that all ranks map, zeroed: for what is no collective
  /// Another group of the same ranks, or what one is made from.
  Membership membership(const std::string& name) const;
};

/// Runs the table in spec.ranks processes or threads of this host, or, where a launcher started this process
/// as one of them (weft run, mpirun), as that one. Call it before the program has any thread. Returns the
/// exit status.
int run_ranks(const Spec& spec, int argc, char** argv,
              const std::function<std::vector<TableRow>(RankOfBench&)>& table, const std::string& settings);

/// The whole main() of such a program: parses the flags, runs the ranks, prints what went wrong. 2: wrong
/// flags.
int bench_main(int argc, char** argv, const Defaults& defaults,
               const std::function<std::vector<TableRow>(RankOfBench&)>& table,
               const std::function<std::string(const Spec&)>& settings);

/// "shm, ranks are processes, bound to cores"
std::string settings_of(const Spec& spec);
/// The memory of a case's buffers: "shared", or pages of the program's own.
Buffers::Allocate allocator(Context& context, std::string_view memory);
/// "/f32/shared/in_place/hot/2048"
std::string name_of(const Case& c, std::string_view memory);
/// A row for each memory and case of the spec, without what is to be done: that is `complete`'s to say.
using Complete = std::function<void(TableRow& row, const Case& c, const std::string& memory)>;
std::vector<TableRow> table_of(const Spec& spec, const Complete& complete);

}  // namespace weft::bench
