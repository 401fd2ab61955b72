// Forces each path of the shared-memory transport in turn and prints one table; the thresholds in
// src/backends/shm/paths.hpp come from it.
//
//   WEFT_SINGLE_COPY=push paths_bench [ranks] [op|all] [foreign|shared] [largest bytes]
//
// A cell is the median in microseconds, for f32 out of place, with the same buffers every time; "-" means
// that the path cannot take the call. Bytes are the size of the longer of the two buffers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backends/test_hooks.hpp"
#include "measure.hpp"
#include "processes.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"

namespace weft::bench {
namespace {

constexpr const char* kPaths[] = {"inline", "direct", "staged", "single"};
constexpr const char* kOps[] = {"all_reduce", "reduce",    "reduce_scatter",
                                "all_gather", "broadcast", "all_to_all"};

struct Arguments {
  int ranks = 2;
  std::string op = "all";
  Memory memory = Memory::local;
  std::int64_t largest = 128 << 20;
};

std::function<void()> call(ProcessGroup& g, const std::string& op, const Tensor& in, const Tensor& out) {
  const std::int64_t each = in.count() / g.size();
  const Tensor in_part = in.slice_flat(0, Shape{each}), out_part = out.slice_flat(0, Shape{each});
  if (op == "all_reduce") return [&g, in, out] { g.all_reduce(in, out).wait(); };
  if (op == "reduce") return [&g, in, out] { g.reduce(in, out, 0).wait(); };
  if (op == "reduce_scatter") return [&g, in, out_part] { g.reduce_scatter(in, out_part).wait(); };
  if (op == "all_gather") return [&g, in_part, out] { g.all_gather(in_part, out).wait(); };
  if (op == "broadcast") return [&g, in, out] { g.broadcast(in, out, 0).wait(); };
  return [&g, in, out] { g.all_to_all(in, out).wait(); };
}

// Ranks contribute their number plus one. Returns an empty string if `out` is right.
std::string wrong(const std::string& op, int rank, int ranks, const Tensor& out) {
  const std::span<const float> got = out.as<float>();
  const std::size_t each = got.size() / static_cast<std::size_t>(ranks);
  const bool sums = op == "all_reduce" || op.starts_with("reduce");
  if (op == "reduce" && rank != 0) return {};
  for (std::size_t i = 0; i < (op == "reduce_scatter" ? each : got.size()); ++i) {
    const float want = sums                ? static_cast<float>(ranks * (ranks + 1) / 2)
                       : op == "broadcast" ? 1.0f
                                           : static_cast<float>(i / each + 1);
    if (got[i] != want && i / each < static_cast<std::size_t>(ranks))
      return op + ": element " + std::to_string(i) + " is " + std::to_string(got[i]);
  }
  return {};
}

void body(int rank, const Arguments& a, const std::shared_ptr<Store>& store) {
  Context context;
  Membership m;
  m.store = store;
  m.rank = rank;
  m.size = a.ranks;
  m.deadline = std::chrono::seconds(60);
  m.name = "between";
  ProcessGroup between = ProcessGroup::create(context, "shm", m);
  std::vector<ProcessGroup> groups;
  for (const char* path : kPaths) {
    m.name = path;
    const ScopedTestHooks hooks(context, rank, {.path = path});
    groups.push_back(ProcessGroup::create(context, "shm", m));
  }
  const auto agree = [&](std::int64_t mine) {
    std::int64_t first = 0;
    between.broadcast(view(&mine, 1), view(&first, 1), 0).wait();
    return first;
  };
  for (const std::string op : kOps) {
    if (a.op != "all" && a.op != op) continue;
    if (rank == 0) {
      std::printf("\n%s, %d ranks\n\n| bytes |", op.c_str(), a.ranks);
      for (const char* path : kPaths) std::printf(" %s |", path);
      std::printf("\n|---|---|---|---|---|\n");
    }
    for (std::int64_t bytes = 256; bytes <= a.largest; bytes *= bytes < (512 << 10) ? 2 : 4) {
      const Shape shape{bytes / 4};
      const Tensor in(context, shape, DType::f32, a.memory), out(context, shape, DType::f32, a.memory);
      std::ranges::fill(in.as<float>(), static_cast<float>(rank + 1));
      std::ranges::fill(out.as<float>(), -1.0f);
      if (rank == 0) std::printf("| %lld |", static_cast<long long>(bytes));
      for (ProcessGroup& g : groups) {
        std::function<void()> run;
        bool can = static_cast<bool>(g);
        if (can) {
          try {
            run = call(g, op, in, out);
            run();
          } catch (const Error& e) {
            if (e.code() != ErrorCode::unsupported) throw;
            can = false;
            g = {};
          }
        }
        // A root that waits for nobody would run ahead, so all ranks leave a call together.
        const auto together = [&] {
          run();
          if (op == "broadcast" || op == "reduce") between.barrier().wait();
        };
        const auto verify = [&] { return wrong(op, rank, a.ranks, out); };
        const double us = can ? measure({together, verify}, agree, 0.3).median_us : 0;
        if (rank == 0) std::printf(can ? " %.4g |" : " - |", us);
        std::fflush(stdout);
      }
      if (rank == 0) std::printf("\n");
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {  // a path that refused a call has failed its group
      m.name = kPaths[i];
      const ScopedTestHooks hooks(context, rank, {.path = kPaths[i]});
      groups[i] = ProcessGroup::create(context, "shm", m);
    }
  }
  between.barrier().wait();
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::Arguments a;
  if (argc > 1) a.ranks = std::atoi(argv[1]);
  if (argc > 2) a.op = argv[2];
  if (argc > 3) a.memory = std::string(argv[3]) == "shared" ? weft::Memory::shared : weft::Memory::local;
  if (argc > 4) a.largest = std::atoll(argv[4]);
  if (a.ranks < 2 || a.ranks > 64) {
    std::fprintf(stderr, "paths_bench: %s ranks; expected 2 to 64\n", argv[1]);
    return 2;
  }
  return weft::bench::run_processes(a.ranks, [&](int rank, std::shared_ptr<weft::Store> store) {
    return weft::bench::body(rank, a, store);
  });
}
