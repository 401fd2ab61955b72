// A rank with a fault scribbles on the memory that the ranks share. The others may get wrong sums or an
// Error, within the deadline. They do not crash, and they do not hang. Which Error says what:
// damaged_words_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "support/sanitizers.hpp"
#include "support/scribbled_job.hpp"

namespace weft::test::scribble_test {
namespace {

using namespace std::chrono_literals;

constexpr Duration kDeadline = 150ms;

// Collectives and messages of all kinds and sizes, and groups.
class AllCalls final : public ScribbledJob::Calls {
 public:
  AllCalls(Rank& r, KeptBuffers& buffers, ProcessGroup& group) : rank_(r), buffers_(buffers), group_(group) {
    groups_.push_back(group_.duplicate());
  }

  std::function<void()> make(std::mt19937_64& random) override {
    const auto works = std::make_shared<std::vector<Work>>();
    for (std::uint64_t i = 0; i <= random() % 3; ++i) call(random, *works);
    return [works] {
      for (Work& w : *works) w.wait();
    };
  }

 private:
  void call(std::mt19937_64& random, std::vector<Work>& works) {
    const auto number = [&](std::uint64_t below) { return static_cast<std::int64_t>(random() % below); };
    const std::int64_t n = rank_.size;
    const CallOptions options{.deadline = kDeadline};
    constexpr std::array<std::int64_t, 6> kCounts{3, 300, 1500, 3000, 40'000, 200'000};
    const std::int64_t count = kCounts[static_cast<std::size_t>(number(number(4) == 0 ? 6 : 5))];
    const Memory memory = number(2) == 0 ? Memory::local : Memory::shared;
    // Calls in flight together have buffers of their own.
    const auto view_of = [&](int which, std::int64_t elements) {
      return buffers_.view_of(rank_, memory, which + 2 * static_cast<int>(works.size()), elements);
    };
    const TensorView a = view_of(0, count), b = view_of(1, count), all_a = view_of(0, n * count),
                     all_b = view_of(1, n * count);
    const int root = static_cast<int>(number(static_cast<std::uint64_t>(n)));
    std::vector<std::int64_t> counts(static_cast<std::size_t>(n));
    for (std::int64_t& c : counts) c = number(static_cast<std::uint64_t>(count)) + 1;
    std::int64_t sum = 0;
    for (const std::int64_t c : counts) sum += c;
    const std::int64_t own = counts[static_cast<std::size_t>(rank_.rank)];
    const int next = static_cast<int>((rank_.rank + 1) % n),
              last = static_cast<int>((rank_.rank + n - 1) % n);
    switch (number(19)) {
      case 0: return works.push_back(group_.all_reduce(a, b, options));
      case 1: return works.push_back(group_.reduce(a, b, root, options));
      case 2: return works.push_back(group_.broadcast(a, root, options));
      case 3: return works.push_back(group_.all_gather(a, all_b, options));
      case 4: return works.push_back(group_.reduce_scatter(all_a, b, options));
      case 5: return works.push_back(group_.all_to_all(all_a, all_b, options));
      case 6: return works.push_back(group_.scan(a, b, options));
      case 7: return works.push_back(group_.exscan(a, b, options));
      case 8: return works.push_back(group_.barrier(options));
      case 9:
        return works.push_back(group_.all_gather_v(view_of(0, own), view_of(1, sum), {counts}, options));
      case 10:
      case 11:
        return works.push_back(group_.reduce_scatter_v(view_of(0, sum), view_of(1, own), {counts}, options));
      case 12: {
        // Rank r gives counts[q] to each rank q, and gets counts[r] from each.
        const std::vector<std::int64_t> from(static_cast<std::size_t>(n), own);
        return works.push_back(
            group_.all_to_all_v(view_of(0, sum), view_of(1, n * own), {counts}, {from}, options));
      }
      case 13:
      case 14:
      case 15:
        works.push_back(group_.send(a, next, options));
        return works.push_back(group_.recv(b, number(2) == 0 ? last : any_source, options));
      case 16:
        works.push_back(group_.send(a, rank_.rank, options));
        return works.push_back(group_.recv(b, rank_.rank, options));
      case 17: return works.push_back(groups_[0].all_reduce(a, b, options));
      default:
        if (number(4) != 0 || !works.empty()) return;
        groups_.push_back(group_.duplicate());  // they all stay: their memory is scribbled on
        works.push_back(groups_.back().barrier(options));
    }
  }

  Rank& rank_;
  KeptBuffers& buffers_;
  ProcessGroup& group_;
  std::vector<ProcessGroup> groups_;
};

class Scribble : public testing::Test {
 protected:
  void SetUp() override {
    if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  }
  static bool full() { return std::getenv("WEFT_TEST_FULL") != nullptr; }
  // Jobs at once: where words are damaged ranks wait most of the time.
  static void run(std::uint64_t seed, const std::vector<std::string>& kinds, Duration time,
                  std::size_t most_bytes = 16 << 20) {
    run_in_children(
        full() ? 6 : 3,
        [&](int job) {
          for (int k = 0; k < (full() ? 10 : 1); ++k)
            ScribbledJob{.seed = seed + static_cast<std::uint64_t>(100 * k + job),
                         .time = full() ? 10s : time,
                         .kinds = kinds,
                         .most_bytes = most_bytes}
                .run([](Rank& r, KeptBuffers& buffers, ProcessGroup& group) {
                  return std::make_unique<AllCalls>(r, buffers, group);
                });
        },
        400s);
  }
};

TEST_F(Scribble, OnTheMemoryOfAGroup) { run(1, {"region"}, 3s); }

// It lies at the beginnings of segments, with some data.
TEST_F(Scribble, OnTheMemoryOfPairs) { run(2001, {"segment"}, 3s, 2 << 20); }

// If a process is taken for dead, that is for all later groups.
TEST_F(Scribble, OnAllMemoryThatProcessesShare) { run(5001, {"region", "segment", "process"}, 1s); }

}  // namespace
}  // namespace weft::test::scribble_test
