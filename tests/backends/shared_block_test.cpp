// One allocation of shared memory that several groups use. When one group fails and reclaims its memory,
// calls of the other groups on it stay right.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "host/arena.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/base/tensor.hpp"
#include "weft/host/pin.hpp"

namespace weft::test::shared_block_test {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kCount = 100000;

// Parts of one block.
struct Parts {
  Tensor block;
  explicit Parts(Rank& r) : block(r.context, Shape{4 * kCount}, DType::f32, Memory::shared) {
    for (std::int64_t i = 0; i < 4 * kCount; ++i) store(block, i, value(r.rank, i % kCount));
  }
  Tensor part(int i) const { return block.slice_flat(i * kCount, Shape{kCount}); }
};

ProcessGroup pair_of(Rank& r, const std::string& name, int rank, TestHooks hooks = {},
                     Duration deadline = 20s) {
  Membership m = r.membership(name);
  m.rank = rank;
  m.size = 2;
  m.deadline = deadline;
  const ScopedTestHooks scope(r.context, rank, std::move(hooks));
  return ProcessGroup::create(r.context, "shm", m);
}

std::int64_t wrong_sums(const Tensor& t) {
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kCount; ++i) wrong += load(t, i) != value(0, i) + value(2, i);
  return wrong;
}

std::int64_t wrong_values(const Tensor& t, int rank) {
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kCount; ++i) wrong += load(t, i) != value(rank, i);
  return wrong;
}

// Group a of ranks 0 and 1, group b of ranks 0 and 2. Rank 1 is stopped while it accesses rank 0's memory,
// and group a fails. At that moment a call of group b is in flight, which rank 2 has not made.
void a_fails_while_b_is_in_flight(bool message) {
  RankProcesses ranks(3, [&](Rank& r) {
    TestHooks stops;
    stops.in_chunk = [](std::uint64_t call) {
      if (call == 1) raise(SIGSTOP);
    };
    const Parts mine(r);
    if (r.rank == 1) {
      ProcessGroup a = pair_of(r, "a", 1, stops);
      a.all_reduce(mine.part(0), mine.part(1)).wait();
      a.all_reduce(mine.part(0), mine.part(1)).wait();
      return;
    }
    ProcessGroup a, b;
    if (r.rank == 0) {
      a = pair_of(r, "a", 0, {}, 300ms);
      a.all_reduce(mine.part(0), mine.part(1)).wait();
    }
    b = pair_of(r, "b", r.rank / 2);
    b.all_reduce(mine.part(2), mine.part(3)).wait();
    const auto call = [&] {
      if (!message) return b.all_reduce(mine.part(2), mine.part(3));
      return r.rank == 0 ? b.send(mine.part(2), 1) : b.recv(mine.part(3), 0);
    };
    const auto check = [&] {
      if (!message) {
        EXPECT_EQ(wrong_sums(mine.part(3)), 0) << "rank " << r.rank;
      }
      if (message && r.rank == 2) {
        EXPECT_EQ(wrong_values(mine.part(3), 0), 0);
      }
    };
    if (r.rank == 2) {
      r.store->get("go", Deadline::after(20s));
      call().wait();
      check();
      b.all_reduce(mine.part(2), mine.part(3)).wait();
      EXPECT_EQ(wrong_sums(mine.part(3)), 0);
      return;
    }
    for (std::int64_t i = 0; i < kCount; ++i) store(mine.part(3), i, -1);
    Work in_flight = call();
    const Error e = error_of([&] { a.all_reduce(mine.part(0), mine.part(1)).wait(); });
    EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
    EXPECT_FALSE(e.quiesced());
    EXPECT_FALSE(a.quiesce(50ms)) << "a call of group b is in flight in that memory";
    EXPECT_FALSE(a.quiesce(0s));
    r.store->set("go", "1");
    in_flight.wait();
    check();
    {
      const PinnedPages pinned(r.context, mine.part(3).data(), 100);
      EXPECT_FALSE(a.quiesce(0s)) << "a driver has the pages";
    }
    EXPECT_TRUE(a.quiesce(0s));
    check();
    // In its new place.
    b.all_reduce(mine.part(2), mine.part(3)).wait();
    EXPECT_EQ(wrong_sums(mine.part(3)), 0);
    r.store->set("done", "1");
  });
  ranks.store().get("done", Deadline::after(30s));
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

TEST(SharedBlock, StaysWhereItIsWhileAnotherGroupSums) { a_fails_while_b_is_in_flight(false); }
TEST(SharedBlock, StaysWhereItIsWhileAnotherGroupSends) { a_fails_while_b_is_in_flight(true); }

// A thread makes calls while another one moves the block, as quiesce() does: each call finds the block at
// its present place.
TEST(SharedBlock, MovesBetweenTheCallsOfAnotherThread) {
  constexpr int kCalls = 60;
  constexpr std::int64_t kFew = 16384;
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    const Tensor block(r.context, Shape{2 * kFew}, DType::f32, Memory::shared);
    const Tensor in = block.slice_flat(0, Shape{kFew}), out = block.slice_flat(kFew, Shape{kFew});
    for (std::int64_t i = 0; i < kFew; ++i) store(in, i, value(r.rank, i));
    std::atomic<bool> over{false};
    std::atomic<int> moves{0};
    std::jthread mover;
    if (r.rank == 0)
      mover = std::jthread([&] {
        while (!over) moves += arena_of(r.context).evacuate(out.data(), 1);
      });
    for (int k = 0; k < kCalls; ++k) {
      if (r.rank == 1)
        for (std::int64_t i = 0; i < kFew; i += 16) store(in, i, static_cast<double>(k + i % 97));
      r.group().all_reduce(in, out).wait();
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < kFew; i += 16)
        wrong += load(out, i) != value(0, i) + static_cast<double>(k + i % 97);
      ASSERT_EQ(wrong, 0) << "call " << k << " of rank " << r.rank;
      if (r.rank == 0)  // so that it moves between any two calls
        for (const int seen = moves; moves == seen;) std::this_thread::yield();
    }
    over = true;
    if (r.rank == 0) {
      EXPECT_GE(moves, kCalls);
    }
  });
}

}  // namespace
}  // namespace weft::test::shared_block_test
