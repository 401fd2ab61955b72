// A job in which one rank scribbles on the memory that the ranks share, while all of them make calls, in round after round with a group of its own.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/run_ranks.hpp"
#include "support/shared_memory.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {

/// Buffers of a rank that stay from round to round: what a failed call leaves to a peer is no other call's. They are zeros, so that the scribbler prefers
/// other words.
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
  struct Round {
    Rank& rank;
    KeptBuffers& buffers;
    std::uint64_t seed;             ///< the same on all ranks
    ProcessGroup group{}, other{};  ///< `other`: the calls may make it
    std::function<void()>
        scribble{};  ///< the calls call it when all memory that they will use is shared: it stays until the round is over
  };
  using Calls = std::function<void(Round&)>;
  static constexpr int kRanks = 3, kScribbles = 1;  ///< kScribbles: the rank that does
  std::uint64_t seed = 1;
  Duration time = std::chrono::seconds(4);  ///< of all rounds
  Duration deadline =
      std::chrono::seconds(2);  ///< of making a group, and of calls that have none of their own
  int rounds_most = 1000;
  bool processes_too =
      false;  ///< also on what says whether processes live: then it is the last round for most jobs

  /// Runs `calls(rank, group, seed of the round)` until it throws, or returns. Each rank that does not scribble ends by itself, without a signal, and
  /// gets nothing but an Error of weft.
  void run(const Calls& calls) const {
    const auto body = [&](Rank& r) {
      KeptBuffers buffers;
      int errors = 0, rounds = 0;
      const Deadline end = Deadline::after(time);
      for (;; ++rounds) {
        // Rank 0 says whether there is another round.
        const std::string key = fmt::format("test/round{}", rounds);
        if (r.rank == 0) r.store->set(key, end.passed() || rounds == rounds_most ? "0" : "1");
        if (r.store->get(key, Deadline::after(r.options.limit)) == "0") break;
        errors += one_round(r, seed * 1000 + static_cast<std::uint64_t>(rounds), buffers, calls) ? 1 : 0;
        r.meet(fmt::format("round{}", rounds));
      }
      if (r.rank == 0)
        std::fprintf(stderr, "seed %d: %d rounds, %d of them failed\n", static_cast<int>(seed), rounds,
                     errors);
      std::fflush(nullptr);
    };
    RankOptions options;
    options.context.log_level = LogLevel::error;  // not one warning a round
    options.limit = time + std::chrono::seconds(40);
    RankProcesses ranks(kRanks, body, options);
    ranks.finish({});
  }

 private:
  // True: it ended with an Error.
  bool one_round(Rank& r, std::uint64_t round, KeptBuffers& buffers, const Calls& calls) const {
    static constexpr std::array kSingleCopy{"off", "pull", "auto"};
    ::setenv("WEFT_SINGLE_COPY", kSingleCopy[round % kSingleCopy.size()], 1);
    Membership m = r.membership(fmt::format("round{}", round));
    const auto began = Clock::now();
    const auto check_time = [&](const char* what) {
      const auto took = Clock::now() - began;
      EXPECT_LT(took, std::chrono::seconds(15)) << "round " << round << " with " << what;
    };
    Round now{r, buffers, round};
    std::optional<Scribbler> scribbler;  // ends before that memory does
    now.scribble = [&] {
      if (r.rank != kScribbles) return;
      std::vector<SharedMapping> mappings = shared_mappings("region");
      for (const SharedMapping& s : shared_mappings("segment"))
        mappings.push_back({s.data, std::min<std::size_t>(s.bytes, 1 << 20)});
      if (processes_too)
        for (const SharedMapping& s : shared_mappings("process")) mappings.push_back(s);
      scribbler.emplace(round, mappings, 8000, std::chrono::microseconds(20 << (round % 4)));
    };
    try {
      m.deadline = deadline;
      now.group = ProcessGroup::create(r.context, "shm", m);
      calls(now);
      scribbler.reset();
    } catch (const Error& e) {
      check_time(e.what());
      if (std::getenv("WEFT_TEST_SHOW") != nullptr)
        std::fprintf(stderr, "round %d, rank %d: %.300s\n", static_cast<int>(round), r.rank, e.what());
      return true;
    }
    check_time("no error");
    return false;
  }
};

}  // namespace weft::test
