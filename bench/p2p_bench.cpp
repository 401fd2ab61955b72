// Messages between two weft ranks, by dtype, memory and bytes: half of a round trip (ping_pong), the time per
// message if a window of messages is under way (one_way), and four messages each way as one call, in turns
// with the same calls alone (coalesced).
//
//   p2p_bench --op ping_pong,one_way,coalesced --memory shared,foreign
#include <string>
#include <utility>
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

// Four messages each way: of part i of the buffers, with tag i.
struct Parts {
  static constexpr std::int64_t kMany = 4;
  const Case c;
  std::byte *in, *out;
  int other;

  template <class View, class Byte>
  View part(Byte* data, std::int64_t i) const {
    const std::int64_t first = c.block() * i / kMany, count = c.block() * (i + 1) / kMany - first;
    return {data + first * size_bytes(c.dtype), c.dtype, {}, Dims::line(count), Dims::line(1)};
  }
  ConstTensorView from(std::int64_t i) const { return part<ConstTensorView>(in, i); }
  TensorView to(std::int64_t i) const { return part<TensorView>(out, i); }
  static CallOptions tag(std::int64_t i) { return {.tag = static_cast<std::int32_t>(i)}; }
  Call send(std::int64_t i) const { return call::send(from(i), other, tag(i)); }
  Call recv(std::int64_t i) const { return call::recv(to(i), other, tag(i)); }
};

void run_coalesced(ProcessGroup& g, const Parts& p) {
  g.coalesced({p.recv(0), p.recv(1), p.recv(2), p.recv(3), p.send(0), p.send(1), p.send(2), p.send(3)})
      .wait();
}
void run_alone(ProcessGroup& g, const Parts& p) {
  const auto recv = [&](std::int64_t i) { return g.recv(p.to(i), p.other, Parts::tag(i)); };
  const auto send = [&](std::int64_t i) { return g.send(p.from(i), p.other, Parts::tag(i)); };
  Work works[] = {recv(0), recv(1), recv(2), recv(3), send(0), send(1), send(2), send(3)};
  for (Work& w : works) w.wait();
}

// Both in short turns: the medians of the turns, and of their ratios.
std::vector<std::pair<std::string, double>> in_turns(const Case& c, RankOfBench& rank,
                                                     const std::string& memory, const Agree& agree,
                                                     double seconds) {
  ProcessGroup* const g = &rank.group;
  const int me = g->rank();
  const auto buffers = std::make_shared<Buffers>(c, me, allocator(rank.context, memory));
  const auto prepared = [&](auto run) {
    return prepare(buffers, [=](std::byte* in, std::byte* out) {
      if (me < 2) run(*g, Parts{c, in, out, 1 - me});
    });
  };
  const Prepared coalesced = prepared(run_coalesced), alone = prepared(run_alone);
  constexpr int kTurns = 40;
  std::vector<double> of_coalesced, of_alone, ratios;
  for (int turn = 0; turn < kTurns; ++turn) {
    double us[2] = {};
    for (const int which : {turn % 2, 1 - turn % 2})
      us[which] = measure(which == 0 ? coalesced : alone, agree, seconds / (2 * kTurns)).median_us;
    of_coalesced.push_back(us[0]);
    of_alone.push_back(us[1]);
    ratios.push_back(us[0] / us[1]);
  }
  Row numbers;
  add_times(numbers, times_of(of_coalesced), c.moved_bytes(), 1);
  numbers.numbers.emplace_back("alone_us", times_of(of_alone).median_us);
  numbers.numbers.emplace_back("of_alone", times_of(ratios).median_us);
  return numbers.numbers;
}

std::vector<TableRow> table(RankOfBench& rank) {
  return table_of(rank.spec, [&rank](TableRow& row, const Case& c, const std::string& memory) {
    row.measure = [c, memory, &rank](const Agree& agree, double seconds) {
      if (c.kind == Kind::coalesced) return in_turns(c, rank, memory, agree, seconds);
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
  return weft::bench::bench_main(argc, argv,
                                 {{Kind::ping_pong, Kind::one_way, Kind::coalesced}, {"shared", "foreign"}},
                                 weft::bench::table, weft::bench::settings_of);
}
