#include "harness.hpp"

#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "processes.hpp"
#include "weft/base/env.hpp"
#include "weft/base/tensor.hpp"

namespace weft::bench {
namespace {

class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

constexpr std::int64_t kNoMore = -1;

[[noreturn]] void end(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::fflush(nullptr);
  _exit(1);
}

}  // namespace

Bench::Bench(int& argc, char** argv, const Spec& spec, Agree agree, int rank)
    : spec_(spec), agree_(std::move(agree)), rank_(rank), turns_(spec.turns) {
  if (rank == 0) benchmark::Initialize(&argc, argv);
}

void Bench::add(TableRow row) { rows_.push_back(std::move(row)); }

Numbers Bench::time(const TableRow& row) const {
  try {
    if (row.measure) return row.measure(agree_, spec_.seconds);
    const Times t = measure(row.prepare(), agree_, spec_.seconds);
    Row r;
    add_times(r, t, row.bytes, row.bus_factor);
    return r.numbers;
  } catch (const std::exception& e) {
    end(row.name + ": " + e.what());
  }
}

// The first rank announces the next row; the other ranks do not use Google Benchmark.
void Bench::run() {
  if (rank_ != 0) {
    for (;;) {
      turns_.take();
      const std::int64_t next = agree_(0);
      if (next == kNoMore) return;
      time(rows_[static_cast<std::size_t>(next)]);
    }
  }
  bool more = true;
  for (std::size_t k = 0; k < rows_.size(); ++k) {
    const auto body = [this, k, &more](benchmark::State& state) {
      if (more) more = turns_.take();
      if (!more) {
        state.SkipWithError("no more turns");
        return;
      }
      agree_(static_cast<std::int64_t>(k));
      for ([[maybe_unused]] const auto _ : state) {  // once: the samples are taken inside
        const Numbers numbers = time(rows_[k]);
        state.SetIterationTime(numbers.at(0).second * 1e-6);
        for (const auto& [key, number] : numbers) state.counters[key] = number;
        if (spec_.rows) {
          Row row = rows_[k].row;
          row.numbers.insert(row.numbers.end(), numbers.begin(), numbers.end());
          print(row);
        }
      }
    };
    benchmark::RegisterBenchmark(rows_[k].name.c_str(), body)
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMicrosecond);
  }
  if (spec_.rows) {
    SilentReporter silent;
    benchmark::RunSpecifiedBenchmarks(&silent);
  } else {
    benchmark::RunSpecifiedBenchmarks();
  }
  benchmark::Shutdown();
  if (more) turns_.take();  // waits for this program's turn together with the other ranks
  agree_(kNoMore);
}

namespace {

using Table = std::function<std::vector<TableRow>(RankOfBench&)>;

// A page that all ranks map; it is made before the ranks.
std::byte* make_common() {
  void* const p = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw_errno("bench: mmap", errno);
  return static_cast<std::byte*>(p);
}

void rank_body(const Spec& spec, int argc, char** argv, Context& context, const Membership& m,
               std::byte* common, const Table& table, const std::string& settings) {
  ProcessGroup group = ProcessGroup::create(context, spec.backend, m);
  const Agree agree = [&group](std::int64_t mine) {
    std::int64_t first = mine;
    group.broadcast(view(&mine, 1), view(&first, 1), 0).wait();
    return first;
  };
  RankOfBench rank{context, m.store, group, spec, agree, common};
  Bench bench(argc, argv, spec, agree, m.rank);
  // Prints the settings only when no rank waits in the barrier any more: the next job to start may need the
  // cores.
  group.barrier().wait();
  if (spec.rows && m.rank == 0) spec.print_settings("weft", settings);
  for (TableRow& row : table(rank)) bench.add(std::move(row));
  bench.run();
  group.barrier().wait();  // no rank leaves while another rank still has cases to run
}

Membership member(int rank, int size, std::shared_ptr<Store> store) {
  Membership m;
  m.store = std::move(store);
  m.rank = rank;
  m.size = size;
  m.deadline = std::chrono::minutes(2);
  return m;
}

int run_threads(int n, Bind bind, const std::function<void(int, Context&, std::shared_ptr<Store>)>& body) {
  Context context;
  const std::shared_ptr<Store> store = make_local_store();
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      try {
        bind_to_cores(r, n, bind);
        body(r, context, store);
      } catch (const std::exception& e) {
        end("rank " + std::to_string(r) + ": " + e.what());
      }
    });
  for (std::thread& t : threads) t.join();
  return 0;
}

// Whether a launcher started this process as a rank of this program: mpirun for the MPI backends, weft run
// for any backend.
bool launched(const Spec& spec) {
  return spec.backend.starts_with("mpi-") || env::get("WEFT_RANK").has_value();
}

}  // namespace

Membership RankOfBench::membership(const std::string& name) const {
  Membership m = member(group.rank(), group.size(), store);
  m.name = name;
  return m;
}

int run_ranks(const Spec& spec, int argc, char** argv, const Table& table, const std::string& settings) {
  if (launched(spec)) {
    Context context;
    const Membership m = Membership::from_env(context, std::chrono::minutes(2));
    Spec here = spec;
    here.ranks = m.size;
    rank_body(here, argc, argv, context, m, make_common(), table, settings);
    return 0;
  }
  std::byte* const common = make_common();
  if (spec.threads)
    return run_threads(spec.ranks, spec.bind, [&](int r, Context& context, std::shared_ptr<Store> store) {
      rank_body(spec, argc, argv, context, member(r, spec.ranks, std::move(store)), common, table, settings);
    });
  return run_processes(spec.ranks, [&](int r, std::shared_ptr<Store> store) {
    bind_to_cores(r, spec.ranks, spec.bind);
    Context context;
    rank_body(spec, argc, argv, context, member(r, spec.ranks, std::move(store)), common, table, settings);
  });
}

int bench_main(int argc, char** argv, const Defaults& defaults, const Table& table,
               const std::function<std::string(const Spec&)>& settings) {
  try {
    const Spec spec = parse_spec(argc, argv, defaults);
    return run_ranks(spec, argc, argv, table, settings(spec));
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return e.code() == ErrorCode::bad_argument ? 2 : 1;
  }
}

std::string settings_of(const Spec& spec) {
  const bool room = static_cast<int>(std::thread::hardware_concurrency()) >= spec.ranks;
  const char* const bound = launched(spec)                     ? ""
                            : spec.bind == Bind::none || !room ? ", not bound"
                            : spec.bind == Bind::share         ? ", bound to a share of the cores"
                                                               : ", bound to cores";
  return spec.backend + (spec.threads ? ", ranks are threads" : ", ranks are processes") + bound;
}

Buffers::Allocate allocator(Context& context, std::string_view memory) {
  if (memory != "shared") return allocate_pages;
  return [&context](std::size_t bytes) {
    const Storage storage = Storage::allocate(context, Memory::shared, bytes);
    return std::shared_ptr<std::byte>(storage.data(), [storage](std::byte*) {});
  };
}

std::string name_of(const Case& c, std::string_view memory) {
  return std::string(name(c.kind)) + "/" + std::string(name(c.dtype)) + "/" + std::string(memory) +
         (c.in_place ? "/in_place" : "/out_of_place") + (c.rotating ? "/rotating/" : "/hot/") +
         std::to_string(c.bytes);
}

std::vector<TableRow> table_of(const Spec& spec, const Complete& complete) {
  std::vector<TableRow> rows;
  for (const std::string& memory : spec.memory)
    for (const Case& c : cases_of(spec)) {
      rows.push_back({name_of(c, memory), c.moved_bytes(), 1, {}, {}, row_of(c, memory)});
      complete(rows.back(), c, memory);
    }
  return rows;
}

}  // namespace weft::bench
