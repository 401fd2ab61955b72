// Messages between two weft ranks, by dtype, memory and bytes: half of a round trip (ping_pong), the time per
// message if a window of messages is under way (one_way), and four messages each way as one call, in turns
// with the same calls alone (coalesced).
//
//   p2p_bench --op ping_pong,one_way,coalesced --memory shared,foreign
#include <array>
#include <span>
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

constexpr std::int64_t kParts = 4;  // messages each way

// The calls of `coalesced`, to be made by make(list of calls).
template <class Make>
std::function<void(std::byte*, std::byte*)> parts_of(ProcessGroup& group, const Case& c, const Make& make) {
  const int rank = group.rank();
  if (rank > 1) return [](std::byte*, std::byte*) {};
  return [c, rank, make](std::byte* in, std::byte* out) {
    const auto part = [&](std::int64_t i) {
      const std::int64_t first = c.block() * i / kParts;
      return std::pair(first * size_bytes(c.dtype), c.block() * (i + 1) / kParts - first);
    };
    std::array<Call, 2 * kParts> calls;
    for (std::int64_t i = 0; i < kParts; ++i) {
      const auto [at, count] = part(i);
      const CallOptions options{.tag = static_cast<std::int32_t>(i)};
      const auto n = static_cast<std::size_t>(i);
      calls[n] =
          call::recv(TensorView{out + at, c.dtype, {}, Dims::line(count), Dims::line(1)}, 1 - rank, options);
      calls[kParts + n] = call::send(ConstTensorView{in + at, c.dtype, {}, Dims::line(count), Dims::line(1)},
                                     1 - rank, options);
    }
    make(calls);
  };
}

// Both in short turns: the medians of the turns, and of their ratios.
std::vector<std::pair<std::string, double>> in_turns(const Case& c, RankOfBench& rank,
                                                     const std::string& memory, const Agree& agree,
                                                     double seconds) {
  ProcessGroup* const g = &rank.group;
  const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
  const Prepared coalesced =
      prepare(buffers, parts_of(*g, c, [g](std::span<const Call> calls) { g->coalesced(calls).wait(); }));
  const Prepared alone = prepare(buffers, parts_of(*g, c, [g](std::span<const Call> calls) {
                                   Work works[2 * kParts];
                                   for (std::size_t i = 0; i < calls.size(); ++i)
                                     works[i] = g->submit(calls[i]);
                                   for (Work& w : works) w.wait();
                                 }));
  constexpr int kTurns = 10;
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
