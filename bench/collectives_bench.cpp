// Measures weft's collectives over any backend, between processes or threads of one host, for every
// combination of operation, dtype, memory, place, buffers and bytes. docs/bench.md has the flags.
//
//   collectives_bench --op all_reduce,all_gather --memory shared,foreign --ranks 4
//   mpirun.openmpi -n 2 collectives_bench --backend mpi-openmpi
#include <string>

#include "harness.hpp"
#include "weft/base/env.hpp"

namespace weft::bench {
namespace {

std::function<void(std::byte*, std::byte*)> call_of(ProcessGroup& group, const Case& c) {
  const auto views = [c](std::byte* in, std::byte* out) {
    const Device cpu{};
    return std::pair{ConstTensorView{in, c.dtype, cpu, Dims::line(c.in_count()), Dims::line(1)},
                     TensorView{out, c.dtype, cpu, Dims::line(c.out_count()), Dims::line(1)}};
  };
  const auto run = [&](auto call) {
    return [call, views](std::byte* in, std::byte* out) {
      const auto [from, to] = views(in, out);
      call(from, to).wait();
    };
  };
  ProcessGroup* const g = &group;
  switch (c.kind) {
    case Kind::all_reduce: return run([g](auto in, auto out) { return g->all_reduce(in, out); });
    case Kind::reduce: return run([g](auto in, auto out) { return g->reduce(in, out, 0); });
    case Kind::broadcast: return run([g](auto in, auto out) { return g->broadcast(in, out, 0); });
    case Kind::all_gather: return run([g](auto in, auto out) { return g->all_gather(in, out); });
    case Kind::reduce_scatter: return run([g](auto in, auto out) { return g->reduce_scatter(in, out); });
    case Kind::all_to_all: return run([g](auto in, auto out) { return g->all_to_all(in, out); });
    case Kind::ping_pong:
    case Kind::one_way:
    default: break;  // p2p_bench and halo_bench measure the other kinds
  }
  return {};
}

std::vector<TableRow> table(RankOfBench& rank) {
  return table_of(rank.spec, [&rank](TableRow& row, const Case& c, const std::string& memory) {
    row.bus_factor = bus_factor(c.kind, c.ranks);
    row.prepare = [c, memory, &rank] {
      const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
      return prepare(buffers, call_of(rank.group, c));
    };
  });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using weft::bench::Kind;
  const auto settings = [](const weft::bench::Spec& s) {
    using weft::bench::settings_of;
    const auto push = weft::env::get("WEFT_SINGLE_COPY");
    return settings_of(s) + (push ? ", WEFT_SINGLE_COPY=" + *push : "");
  };
  return weft::bench::bench_main(argc, argv,
                                 {{Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::all_gather,
                                   Kind::reduce_scatter, Kind::all_to_all},
                                  {"shared", "foreign"}},
                                 weft::bench::table, settings);
}
