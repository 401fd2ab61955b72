// A rank with a fault scribbles on the memory that the ranks share. The others may get wrong sums or an Error, within the deadline. They do not
// crash, and they do not hang. Which Error says what: damaged_words_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "support/sanitizers.hpp"
#include "support/scribbled_job.hpp"

namespace weft::test::scribble_test {
namespace {

using namespace std::chrono_literals;

constexpr Duration kDeadline = 200ms;
// Calls of a round: the same on all ranks, of all kinds and sizes.
void make_calls(ScribbledJob::Round& round) {
  Rank& r = round.rank;
  ProcessGroup& group = round.group;
  std::mt19937_64 random(round.seed);
  const auto number = [&](std::uint64_t below) { return static_cast<std::int64_t>(random() % below); };
  const std::int64_t n = r.size;
  const CallOptions options{.deadline = kDeadline};
  constexpr std::array<std::int64_t, 6> kCounts{3, 300, 1500, 3000, 40'000, 200'000};
  round.other = group.duplicate();
  round.scribble();
  for (int i = 0; i < 150; ++i) {
    const std::int64_t count = kCounts[static_cast<std::size_t>(number(number(4) == 0 ? 6 : 4))];
    const Memory memory = number(2) == 0 ? Memory::local : Memory::shared;
    const auto view_of = [&](int which, std::int64_t elements) {
      return round.buffers.view_of(r, memory, which, elements);
    };
    const TensorView a = view_of(0, count), b = view_of(1, count), all_a = view_of(0, n * count),
                     all_b = view_of(1, n * count);
    const int root = static_cast<int>(number(static_cast<std::uint64_t>(n)));
    std::vector<std::int64_t> counts(static_cast<std::size_t>(n));
    for (std::int64_t& c : counts) c = number(static_cast<std::uint64_t>(count)) + 1;
    std::int64_t sum = 0;
    for (const std::int64_t c : counts) sum += c;
    const std::int64_t own = counts[static_cast<std::size_t>(r.rank)];
    const int next = static_cast<int>((r.rank + 1) % n), last = static_cast<int>((r.rank + n - 1) % n);
    // A rank that comes late: what the others have written meanwhile is damaged before it is read.
    if (const std::int64_t late = number(4 * static_cast<std::uint64_t>(n)); late == r.rank)
      std::this_thread::sleep_for(300us);
    switch (number(16)) {
      case 0: group.all_reduce(a, b, options).wait(); break;
      case 1: group.reduce(a, b, root, options).wait(); break;
      case 2: group.broadcast(a, root, options).wait(); break;
      case 3: group.all_gather(a, all_b, options).wait(); break;
      case 4: group.reduce_scatter(all_a, b, options).wait(); break;
      case 5: group.all_to_all(all_a, all_b, options).wait(); break;
      case 6: group.scan(a, b, options).wait(); break;
      case 7: group.exscan(a, b, options).wait(); break;
      case 8: group.barrier(options).wait(); break;
      case 9: group.all_gather_v(view_of(0, own), view_of(1, sum), {counts}, options).wait(); break;
      case 10: group.reduce_scatter_v(view_of(0, sum), view_of(1, own), {counts}, options).wait(); break;
      case 11: {
        // Rank r gives counts[q] to each rank q, and gets counts[r] from each.
        const std::vector<std::int64_t> from(static_cast<std::size_t>(n), own);
        group.all_to_all_v(view_of(0, sum), {counts}, view_of(1, n * own), {from}, options).wait();
        break;
      }
      case 12:
      case 13: {
        Work send = group.send(a, next, options);
        group.recv(b, number(2) == 0 ? last : any_source, options).wait();
        send.wait();
        break;
      }
      case 14: {
        Work send = group.send(a, r.rank, options);
        group.recv(b, r.rank, options).wait();
        send.wait();
        break;
      }
      default: {
        round.other.all_reduce(a, b, options).wait();
        if (number(8) != 0) break;
        ProcessGroup part = group.duplicate();  // one more, which ends at once
        part.barrier(options).wait();
      }
    }
  }
}

class Scribble : public testing::Test {
 protected:
  void SetUp() override {
    if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  }
  static bool full() { return std::getenv("WEFT_TEST_FULL") != nullptr; }
};

// Jobs at once: where words are damaged ranks wait most of the time.
TEST_F(Scribble, OnTheMemoryOfAGroup) {
  run_in_children(
      full() ? 6 : 3,
      [](int job) {
        for (int k = 0; k < (full() ? 10 : 1); ++k)
          ScribbledJob{.seed = static_cast<std::uint64_t>(1 + 100 * k + job), .time = full() ? 10s : 3s}.run(
              make_calls);
      },
      300s);
}

TEST_F(Scribble, OnWhatSaysWhetherProcessesLive) {
  run_in_children(
      3,
      [](int job) {
        for (int k = 0; k < (full() ? 10 : 1); ++k)
          ScribbledJob{.seed = static_cast<std::uint64_t>(5001 + 100 * k + job),
                       .time = 1s,
                       .rounds_most = 2,
                       .processes_too = true}
              .run(make_calls);
      },
      300s);
}

}  // namespace
}  // namespace weft::test::scribble_test
