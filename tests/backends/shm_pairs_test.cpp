// The memory of pairs of ranks (PairMemory), for their messages and exchanges: when it is made, where it
// lies, when it is used again, and what happens if it cannot be allocated.
#include "backends/shm/pair_memory.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "host/arena.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/shm_settings.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::shm_pairs_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr bool kLimitsAddresses =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    false;  // sanitizers need the address space
#else
    true;
#endif

// From now on this process gets `more` bytes of addresses beyond those that it has.
void limit_addresses(std::size_t more) {
  std::size_t pages = 0;
  FileIn("/proc/self/statm") >> pages;
  const rlim_t bytes = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + more;
  const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
  EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
}

// Each of two ranks sends to the other `count` messages of each of these sizes.
void talk(ProcessGroup& group, Context& context, int count, std::int32_t first) {
  const int other = 1 - group.rank();
  std::int32_t value = first;
  for (const std::int64_t elements : {std::int64_t{3}, std::int64_t{1500}, std::int64_t{100'000}})
    for (int i = 0; i < count; ++i, ++value) {
      const Tensor out(context, Shape{elements}, DType::i32), in(context, Shape{elements}, DType::i32);
      std::ranges::fill(out.as<std::int32_t>(), 1000 * group.rank() + value);
      Work sent = group.send(out, other);
      group.recv(in, other).wait();
      sent.wait();
      ASSERT_TRUE(std::ranges::all_of(in.as<std::int32_t>(),
                                      [&](std::int32_t x) { return x == 1000 * other + value; }))
          << elements << " elements, message " << i;
    }
}

// Both send more messages than a ring holds before either receives one.
void flood(Rank& r, ProcessGroup& group, const std::string& name) {
  const int other = 1 - r.rank;
  std::array<std::int32_t, 40> out{}, in{};
  std::array<Work, 40> sends;
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<std::int32_t>(i) + 1;
    sends[i] = group.send(view<const std::int32_t>(&out[i], 1), other);
  }
  r.meet(name);
  for (std::int32_t& x : in) group.recv(view(&x, 1), other).wait();
  for (Work& w : sends) w.wait();
  EXPECT_EQ(in, out);
}

// Successive groups get the same memory, which still holds the words of the group before.
TEST(ShmPairs, MemoryOfGroupsThatHaveEndedIsUsedAgain) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const auto in_use = [&] { return arena_of(r.context).counters().in_use_bytes; };
    ::setenv("WEFT_SINGLE_COPY", "off", 1);  // large messages go through chunks
    constexpr std::array kCounts{20, 7, 1,
                                 12, 2, 20};  // of each size: envelopes of a ring and more, and less
    for (int round = 0; round < 6; ++round) {
      ProcessGroup group = ProcessGroup::create(r.context, "shm", r.membership(fmt::format("g{}", round)));
      EXPECT_EQ(in_use(), 0u) << "that of the round before was not given back";
      flood(r, group, fmt::format("flood {}", round));
      talk(group, r.context, kCounts[static_cast<std::size_t>(round)], round);
      EXPECT_GE(in_use(), sizeof(shm::Pair));
      EXPECT_LT(in_use(), 2 * sizeof(shm::Pair));
      r.meet(fmt::format("talked {}", round));
      if (round % 2 == r.rank) group = ProcessGroup();
      r.meet(fmt::format("one has left {}", round));
    }
  });
}

// A rank has sent, and died: the memory for messages to it is given back.
TEST(ShmPairs, MemoryForARankThatDiedIsGivenBack) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  RankProcesses ranks(2, [](Rank& r) {
    talk(r.group(), r.context, 1, 0);
    r.meet("talked");
    if (r.rank == 1) ::_exit(7);
    const Tensor t(r.context, Shape{1}, DType::u8);
    EXPECT_EQ(error_of([&] { r.group().recv(t, 1).wait(); }).code(), ErrorCode::peer_lost);
    r.group() = ProcessGroup();
    Membership alone = r.membership("alone");
    alone.rank = 0;
    alone.size = 1;
    const ProcessGroup next = ProcessGroup::create(r.context, "shm", alone);
    EXPECT_EQ(arena_of(r.context).counters().in_use_bytes, 0u);
  });
  ranks.finish({1});
}

// Takes the remaining part of the arena's first segment, so that the memory of a pair lies in a segment that
// the other rank has not mapped yet.
RankOptions small_segments() {
  RankOptions options;
  options.context.segment_bytes = std::size_t{1} << 20;
  options.deadline = 5s;
  return options;
}
Tensor fill_segment(Rank& r) {
  return {r.context, Shape{std::int64_t{900} << 10}, DType::u8, Memory::shared};
}

TEST(ShmPairs, MemoryMayLieInASegmentThatWasMadeLater) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        const Tensor fill = fill_segment(r);
        talk(r.group(), r.context, 20, 0);
        EXPECT_EQ(arena_of(r.context).segment_count(), 2u);
        r.meet("talked");
      },
      small_segments());
}

// A message that one rank has sent reaches the other rank, even if the process of the sender has ended.
TEST(ShmPairs, WhatIsSentArrivesAfterTheSenderHasEnded) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  RankProcesses ranks(
      2,
      [](Rank& r) {
        ProcessGroup& group = r.group();
        const Tensor t = Tensor::zeros(r.context, Shape{100}, DType::f32);
        if (r.rank == 1) {
          const Tensor fill = fill_segment(r);
          std::ranges::fill(t.as<float>(), 2.5f);
          group.send(t, 0).wait();
          return;
        }
        r.store->get("late", Deadline::after(10s));
        group.recv(t, 1).wait();
        EXPECT_EQ(t.as<float>()[99], 2.5f);
      },
      small_segments());
  std::this_thread::sleep_for(500ms);
  ranks.store().set("late", "");
  ranks.finish();
}

// The receiver maps the memory while it waits in another call, and the sender goes on.
TEST(ShmPairs, ARankThatWaitsElsewhereMapsTheMemory) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        const Tensor t = Tensor::zeros(r.context, Shape{100}, DType::f32);
        r.group().barrier().wait();
        const Tensor fill = fill_segment(r);
        if (r.rank == 1) r.group().send(t, 0).wait();
        r.group().barrier().wait();
        if (r.rank == 0) r.group().recv(t, 1).wait();
        r.meet("over");
      },
      small_segments());
}

// Rank 1 has no addresses for a segment that rank 0 makes later. Nobody waits for that message without end.
TEST(ShmPairs, MemoryThatCannotBeMappedFailsTheGroup) {
  if (!kThreadsInForks || !kLimitsAddresses) GTEST_SKIP() << "limits of addresses";
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        const Tensor fill = fill_segment(r);
        if (r.rank == 1) {  // no segment is mapped into the last quarter
          std::size_t pages = 0;
          FileIn("/proc/self/statm") >> pages;
          limit_addresses(pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) / 5);
        }
        r.meet("ready");
        const Tensor t = Tensor::zeros(r.context, Shape{100}, DType::f32);
        const Error e = error_of([&] {
          if (r.rank == 0) r.group().send(t, 1).wait();
          if (r.rank == 1) r.group().recv(t, 0).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("message from rank 0 to rank 1: rank 1 cannot map the segment of "
                                        "rank 0 that holds the data sent to it; the log says why [group"));
        r.meet("told");
      },
      small_segments());
}

TEST(ShmPairs, ARankWithoutDescriptorsSaysWhatItWaitsFor) {
  if (!kTypesWithoutDescriptors) GTEST_SKIP() << kNoTypesWithoutDescriptors;
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        const Tensor fill = fill_segment(r);
        const Tensor t = Tensor::zeros(r.context, Shape{100}, DType::f32);
        std::vector<int> taken;
        if (r.rank == 1) {
          const rlimit few{256, 256};
          ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
          for (int fd = 0; (fd = ::dup(0)) >= 0;) taken.push_back(fd);
        }
        const Error e = error_of([&] {
          if (r.rank == 0) r.group().send(t, 1).wait();
          if (r.rank == 1) r.group().recv(t, 0, {.deadline = 1200ms}).wait();
        });
        for (const int fd : taken) ::close(fd);
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        if (r.rank == 1) {
          EXPECT_THAT(e.what(), HasSubstr("; rank 1 cannot map the memory of rank 0 now"));
        }
        r.meet("over");
      },
      small_segments());
}

TEST(ShmPairs, MemoryThatCannotBeHadFailsTheGroup) {
  if (!kProcesses || !kLimitsAddresses) GTEST_SKIP() << "limits of addresses";
  const ProcessResult result = run_in_child([] {
    run_ranks(Ranks::threads, 2, [](Rank& r) {
      const Tensor t = Tensor::zeros(r.context, Shape{3}, DType::f32);
      r.group().barrier().wait();
      if (r.rank == 0) limit_addresses(128 << 10);
      r.meet("ready");
      const Error e = error_of([&] {
        if (r.rank == 0) r.group().send(t, 1).wait();
        if (r.rank == 1) r.group().recv(t, 0).wait();
      });
      EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(fmt::format("message from rank 0 to rank 1: rank 0 has no {} bytes of "
                                                  "shared memory for the data that it sends to rank 1 [group",
                                                  sizeof(shm::Pair))));
      r.meet("told");
    });
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

// Without it, messages have memory that rank 0 makes for all pairs, and exchanges go by messages.
TEST(ShmPairs, AreNotNeeded) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes}) {
    if (kind == Ranks::processes && !kThreadsInForks) continue;
    RankOptions options;
    options.hooks.no_pair_memory = true;
    run_ranks(
        kind, 2,
        [](Rank& r) {
          const std::size_t before = arena_of(r.context).counters().in_use_bytes;
          talk(r.group(), r.context, 20, 0);
          ExchangePlan plan;
          plan.fields = {DType::f64};
          plan.sends = plan.receives = {{1 - r.rank, {{0, 0, {3000}, {1}}}}};
          const std::vector<double> in(3000, 1.5 + r.rank);
          std::vector<double> out(3000);
          const ExchangeField field{in.data(), out.data()};
          for (int i = 0; i < 3; ++i) r.group().exchange(plan, {&field, 1}).wait();
          EXPECT_TRUE(std::ranges::all_of(out, [&](double x) { return x == 2.5 - r.rank; }));
          EXPECT_LT(arena_of(r.context).counters().in_use_bytes, before + sizeof(shm::Pair));
          r.meet("exchanged");
        },
        options);
  }
}

}  // namespace
}  // namespace weft::test::shm_pairs_test
