// A job in which one rank writes nonsense to the memory that the ranks share. It has many rounds, each with
// groups of its own. A round is a sequence of steps. In a step some ranks make their calls. Then the words
// that these calls have changed are damaged. Then the other ranks make their calls, and all wait.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/run_ranks.hpp"
#include "support/shared_memory.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {

/// A rank's buffers that stay the same from round to round. No other call uses what a failed call leaves to a
/// peer. They are zeros, so the only changes in shared memory are the words that ranks write for their calls.
class KeptBuffers {
 public:
  TensorView view_of(Rank& r, Memory memory, int which, std::int64_t floats) {
    TensorView v =
        kept_.try_emplace({static_cast<int>(memory), which}, r.context, Shape{kMost}, DType::f32, memory)
            .first->second;
    v.shape = Shape{floats};
    v.strides = Strides{1};
    return v;
  }
  static constexpr std::int64_t kMost = 3 << 18;

 private:
  std::map<std::pair<int, int>, Tensor> kept_;
};

struct ScribbledJob {
  static constexpr int kRanks = 3, kScribbles = 1;  ///< kScribbles: the rank that writes nonsense

  /// One rank's calls of a round.
  class Calls {
   public:
    virtual ~Calls() = default;
    /// Makes the calls of a step. The generator chooses them; it gives all ranks the same numbers. Returns a
    /// function that waits for them.
    virtual std::function<void()> make(std::mt19937_64& random) = 0;
  };
  using Begin = std::function<std::unique_ptr<Calls>(Rank&, KeptBuffers&, ProcessGroup&)>;

  std::uint64_t seed = 1;
  Duration time = std::chrono::seconds(3);  ///< of all rounds
  Duration deadline = std::chrono::milliseconds(500);
  std::vector<std::string> kinds = {"region"};  ///< of memory: see shared_mappings()
  std::size_t most_bytes = 16 << 20;            ///< of each mapping, from its beginning

  /// Each rank ends by itself, without a signal, and no exception but an Error of weft reaches it.
  void run(const Begin& begin) const {
    void* const page =
        ::mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(page, MAP_FAILED);
    Meeting& meeting = *new (page) Meeting;
    const auto body = [&](Rank& r) {
      KeptBuffers buffers;
      int rounds = 0, steps = 0, errors = 0;
      for (const Deadline end = Deadline::after(time);; ++rounds) {
        if (!meeting.meet(r.rank != 0 || !end.passed())) break;
        const auto began = Clock::now();
        const std::string why =
            round(r, seed * 1000 + static_cast<std::uint64_t>(rounds), meeting, buffers, begin, steps);
        EXPECT_LT(Clock::now() - began, std::chrono::seconds(30)) << why;
        errors += why.empty() ? 0 : 1;
      }
      if (r.rank == 0)
        std::fprintf(stderr, "seed %d: %d rounds of %d steps, %d errors\n", static_cast<int>(seed), rounds,
                     steps, errors);
      std::fflush(nullptr);
    };
    RankOptions options;
    options.context.log_level = LogLevel::error;  // without one warning per round
    options.limit = time + std::chrono::seconds(60);
    RankProcesses ranks(kRanks, body, options);
    ranks.finish();
    ::munmap(page, sizeof(Meeting));
  }

 private:
  static constexpr int kSteps = 200;

  // The place where the ranks meet: memory that weft does not own.
  struct Meeting {
    std::atomic<int> came{0}, turns{0};
    std::array<std::atomic<int>, 2> bad{};
    /// Whether all are well.
    bool meet(bool well) {
      const int turn = turns.load();
      std::atomic<int>& count = bad[static_cast<std::size_t>(turn % 2)];
      if (!well) count.fetch_add(1);
      if (came.fetch_add(1) + 1 == kRanks) {
        bad[static_cast<std::size_t>((turn + 1) % 2)].store(0);
        came.store(0);
        turns.store(turn + 1);
      }
      const Deadline limit = Deadline::after(std::chrono::seconds(25));
      for (int looks = 0; turns.load() == turn; ++looks) {
        if (limit.passed()) {
          std::fprintf(stderr, "scribbled job: the other ranks do not come; they hang, or have ended\n");
          ::_exit(3);
        }
        looks < 50 ? static_cast<void>(::sched_yield()) : static_cast<void>(::usleep(50));
      }
      return count.load() == 0;
    }
  };

  // Returns the text of the Error that ended the round.
  std::string round(Rank& r, std::uint64_t number, Meeting& meeting, KeptBuffers& buffers, const Begin& begin,
                    int& steps) const {
    static constexpr std::array kSingleCopy{"off", "pull"};
    ::setenv("WEFT_SINGLE_COPY", kSingleCopy[number % kSingleCopy.size()], 1);
    Membership m = r.membership(fmt::format("round{}", number));
    m.deadline = deadline;
    std::mt19937_64 random(number);
    std::string why;
    const auto show = [&](const Error& e) {
      why = e.what();
      if (std::getenv("WEFT_TEST_SHOW") != nullptr)
        std::fprintf(stderr, "round %d, rank %d: %.300s\n", static_cast<int>(number), r.rank, e.what());
    };
    ProcessGroup group;
    std::unique_ptr<Calls> calls;
    try {
      group = ProcessGroup::create(r.context, "shm", m);
      calls = begin(r, buffers, group);
    } catch (const Error& e) {
      show(e);
    }
    if (!meeting.meet(why.empty())) return why;
    std::optional<Scribbler> scribbler;
    if (r.rank == kScribbles) {
      std::vector<SharedMapping> mappings;
      for (const std::string& kind : kinds)
        for (const SharedMapping& s : shared_mappings(kind))
          mappings.push_back({s.data, std::min(s.bytes, most_bytes)});
      scribbler.emplace(number, mappings);
    }
    for (int step = 0; step < kSteps; ++step) {
      const bool early = (random() >> r.rank & 1) != 0;
      const std::uint64_t damages = random() % 3;
      if (scribbler) scribbler->look();
      meeting.meet(true);
      std::function<void()> wait;
      const auto guarded = [&](const auto& act) {
        try {
          if (why.empty()) act();
        } catch (const Error& e) {
          show(e);
        }
      };
      std::mt19937_64 same = random;
      if (early) guarded([&] { wait = calls->make(same); });
      meeting.meet(true);
      if (scribbler && scribbler->find() > 0)
        for (std::uint64_t i = 0; i < damages; ++i) scribbler->scribble();
      meeting.meet(true);
      if (!early) guarded([&] { wait = calls->make(same); });
      if (wait) guarded(wait);
      wait = nullptr;
      random.discard(100);
      ++steps;
      if (!meeting.meet(why.empty())) break;
    }
    return why;
  }
};

}  // namespace weft::test
