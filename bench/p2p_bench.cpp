// Messages between two weft ranks, by dtype, memory and bytes: half of a round trip (ping_pong), and the time
// per message if a window of messages is under way (one_way).
//
//   p2p_bench --op ping_pong,one_way --memory shared,foreign
#include <vector>

#include "harness.hpp"

namespace weft::bench {
namespace {

std::function<void(std::byte*, std::byte*)> call_of(ProcessGroup& group, const Case& c) {
  ProcessGroup* const g = &group;
  const int rank = group.rank(), other = 1 - rank;
  const auto from = [c](std::byte* p) {
    return ConstTensorView{p, c.dtype, {}, Dims::line(c.block()), Dims::line(1)};
  };
  const auto to = [c](std::byte* p) {
    return TensorView{p, c.dtype, {}, Dims::line(c.block()), Dims::line(1)};
  };
  if (rank > 1) return [](std::byte*, std::byte*) {};
  if (c.kind == Kind::ping_pong)
    return [=](std::byte* in, std::byte* out) {
      if (rank == 0) g->send(from(in), other).wait();
      g->recv(to(out), other).wait();
      if (rank == 1) g->send(from(in), other).wait();
    };
  return [=](std::byte* in, std::byte* out) {
    Work window[kWindow];
    for (Work& w : window) w = rank == 0 ? g->send(from(in), other) : g->recv(to(out), other);
    for (Work& w : window) w.wait();
    std::int32_t answer = 0;
    if (rank == 0) g->recv(view(&answer, 1), other, {.tag = 1}).wait();
    if (rank == 1) g->send(view<const std::int32_t>(&answer, 1), other, {.tag = 1}).wait();
  };
}

std::vector<TableRow> table(RankOfBench& rank) {
  return table_of(rank.spec, [&rank](TableRow& row, const Case& c, const std::string& memory) {
    row.measure = [c, memory, &rank](const Agree& agree, double seconds) {
      const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
      const Times t = measure(prepare(buffers, call_of(rank.group, c)), agree, seconds);
      Row numbers;
      add_times(numbers, per_message(t, c.kind), c.moved_bytes(), 1);
      return numbers.numbers;
    };
  });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using weft::bench::Kind;
  return weft::bench::bench_main(argc, argv, {{Kind::ping_pong, Kind::one_way}, {"shared", "foreign"}},
                                 weft::bench::table, weft::bench::settings_of);
}
