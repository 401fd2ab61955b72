// The limits of this machine, measured like the collectives: by as many ranks at once, in the same sizes. One
// row for each size, in us. `copy_us`: every rank copies that many bytes of its own memory. `pass_us`: every
// rank reads and writes that many bytes in place. `line_us`: the time until rank 1 sees a cache line written
// by rank 0.
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>

#include "harness.hpp"

namespace weft::bench {
namespace {

// One-way latency in us: half of a round trip of a cache line between ranks 0 and 1, the other ranks asleep.
double line_latency(RankOfBench& rank, double seconds) {
  using Clock = std::chrono::steady_clock;
  if (rank.group.size() < 2) return 0;
  struct alignas(128) Line {
    std::atomic<std::uint64_t> turn;
  };
  auto* const lines = reinterpret_cast<Line*>(rank.common);  // zeroed; the count continues in the next case
  constexpr int kTrips = 200;
  std::vector<double> us;
  const auto begin = Clock::now();
  bool more = true;
  while (more) {
    const auto start = Clock::now();
    for (int k = 0; k < kTrips && rank.group.rank() < 2; ++k) {
      if (rank.group.rank() == 0) {
        const std::uint64_t t = lines[0].turn.load(std::memory_order_relaxed) + 1;
        lines[0].turn.store(t, std::memory_order_release);
        while (lines[1].turn.load(std::memory_order_acquire) != t) __builtin_ia32_pause();
      } else {
        const std::uint64_t t = lines[1].turn.load(std::memory_order_relaxed) + 1;
        while (lines[0].turn.load(std::memory_order_acquire) != t) __builtin_ia32_pause();
        lines[1].turn.store(t, std::memory_order_release);
      }
    }
    us.push_back(std::chrono::duration<double>(Clock::now() - start).count() * 1e6 / kTrips / 2);
    more = rank.agree(std::chrono::duration<double>(Clock::now() - begin).count() < seconds) != 0;
  }
  return times_of(us).median_us;
}

// Negates each word: a load and a store, in the widest vectors there are.
__attribute__((target_clones("avx512f", "avx2", "default"))) void negate(std::uint64_t* words,
                                                                         std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) words[i] = ~words[i];
}

Prepared passing(std::int64_t bytes, bool copy) {
  const auto size = static_cast<std::size_t>((bytes + 7) / 8 * 8);
  const auto from = allocate_pages(size), to = copy ? allocate_pages(size) : from;
  std::memset(from.get(), 1, size);
  std::memset(to.get(), 1, size);
  Prepared p;
  if (copy) {
    p.run = [=] { std::memcpy(to.get(), from.get(), size); };
    p.verify = [=] {
      return std::memcmp(to.get(), from.get(), size) == 0 ? "" : "the copy differs from what was copied";
    };
  } else {
    p.run = [=] { negate(reinterpret_cast<std::uint64_t*>(to.get()), size / 8); };
    p.verify = [=]() -> std::string {
      return to.get()[0] == std::byte{0xfe} ? "" : "the pass did not negate its word";
    };
  }
  return p;
}

std::vector<TableRow> table(RankOfBench& rank) {
  std::vector<TableRow> rows;
  for (const std::int64_t bytes : rank.spec.bytes) {
    TableRow row;
    row.name = "machine/" + std::to_string(bytes);
    row.measure = [&rank, bytes](const Agree& agree, double seconds) -> Numbers {
      const double copy = measure(passing(bytes, true), agree, seconds / 3).median_us;
      const double pass = measure(passing(bytes, false), agree, seconds / 3).median_us;
      return {{"copy_us", copy}, {"pass_us", pass}, {"line_us", line_latency(rank, seconds / 5)}};
    };
    row.row = {{{"op", "machine"}}, rank.spec.ranks, bytes, {}};
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  // This program accepts --op, --dtype and --memory like the other programs, and ignores them.
  using weft::bench::Kind;
  return weft::bench::bench_main(argc, argv, {{Kind::all_reduce}}, weft::bench::table,
                                 [](const weft::bench::Spec&) { return "memory and cache lines"; });
}
