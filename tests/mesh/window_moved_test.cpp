// Blocks of shared memory that get other pages, because a rank was stopped inside of them, while windows are
// exchanged in them. No exchanged byte is lost, in any group.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "host/arena.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "weft/base/tensor.hpp"
#include "weft/mesh/window.hpp"

namespace weft::window_moved_test {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::Rank;
using test::RankProcesses;
using test::Ranks;

constexpr std::int64_t kSummed = 100'000;

// One block of memory: the elements of the sum, followed by this rank's part of a tensor and a window on the
// tensor.
struct Block {
  Block(Rank& r, std::int64_t columns_in)
      : columns(columns_in), all(r.context, Shape{2 * kSummed + 4 * columns}, DType::f32, Memory::shared) {
    std::fill_n(all.data_ptr<float>(), all.count(), 0.0f);
    std::fill_n(part(), columns, static_cast<float>(r.rank + 1));
  }
  Work sum(ProcessGroup& group, const CallOptions& options = {}) const {
    return group.all_reduce(all.slice_flat(0, Shape{kSummed}), all.slice_flat(kSummed, Shape{kSummed}),
                            options);
  }
  float* part() const { return all.data_ptr<float>() + 2 * kSummed; }
  float* wide() const { return part() + columns; }
  // Elements of the window's row that are not `value`.
  std::int64_t wrong(int row, float value) const {
    const float* const begin = wide() + row * columns;
    return columns - std::count(begin, begin + columns, value);
  }
  const std::int64_t columns;
  const Tensor all;
};

// The rows of all ranks around this one's.
struct Ring {
  explicit Ring(ProcessGroup& group, std::int64_t columns)
      : mesh(group, {{"y", -1}}),
        x(make_layout(mesh, {Shard{0}}, {group.size(), columns})),
        window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())}) {}
  WindowTransfer start(const Block& b) const {
    return window.start(view(static_cast<const float*>(b.part()), {1, b.columns}),
                        view(b.wide(), {3, b.columns}));
  }
  const DeviceMesh mesh;
  const Partition x;
  const Window window;
};

// Rank 1 stops in its first call after `armed`, while it accesses memory of its peers.
std::atomic<bool> armed{false};
TestHooks stops(int rank) {
  TestHooks hooks;
  if (rank == 1)
    hooks.in_chunk = [](std::uint64_t) {
      if (armed) ::raise(SIGSTOP);
    };
  return hooks;
}

ProcessGroup pair_of(Rank& r, const std::string& name, int rank, Duration deadline = 20s,
                     Progress progress = Progress::caller) {
  Membership m = r.membership(name);
  m.rank = rank;
  m.size = 2;
  m.deadline = deadline;
  m.progress = progress;
  const ScopedTestHooks scope(r.context, rank, name == "a" ? stops(rank) : TestHooks{});
  return ProcessGroup::create(r.context, "shm", m);
}

// Group a of ranks 0 and 1, group b of ranks 0 and 2. `rank_0` is called with group a, after rank 1 was
// stopped inside rank 0's memory in a call that is in flight. Rank 2 calls `rank_2`. The block's memory is
// known to both neighbours.
void with_two_groups(std::int64_t columns, Progress progress,
                     const std::function<void(Rank&, ProcessGroup& a, const Block&, const Ring&)>& rank_0,
                     const std::function<void(Rank&, const Block&, const Ring&)>& rank_2) {
  RankProcesses ranks(3, [&](Rank& r) {
    const Block block(r, columns);
    if (r.rank == 1) {
      ProcessGroup a = pair_of(r, "a", 1);
      for (int i = 0; i < 2; ++i) {
        armed = i == 1;
        block.sum(a).wait();
      }
      return;
    }
    ProcessGroup a, b;
    if (r.rank == 0) {
      a = pair_of(r, "a", 0, 300ms);
      block.sum(a).wait();
    }
    b = pair_of(r, "b", r.rank / 2, 20s, progress);
    const Ring ring(b, columns);
    for (int i = 0; i < 4; ++i) {
      ring.start(block).finish();
      b.barrier().wait();
    }
    std::fill_n(block.wide(), 3 * columns, -1.0f);
    b.barrier().wait();
    if (r.rank == 2) return rank_2(r, block, ring);
    rank_0(r, a, block, ring);
    r.store->set("done", "1");
  });
  ranks.store().get("done", Deadline::after(40s));
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

class WindowMoved : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
  }
};

void another_group_fails(bool ends) {
  with_two_groups(
      1 << 16, Progress::caller,
      [&](Rank& r, ProcessGroup& a, const Block& block, const Ring& ring) {
        WindowTransfer transfer = ring.start(block);  // names the block to rank 2, which comes later
        const Error e = error_of([&] { block.sum(a).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        if (ends) {
          a = {};
        } else {
          EXPECT_FALSE(a.quiesce(50ms)) << "an exchange of group b is in flight in that memory";
          EXPECT_FALSE(a.quiesce(0s));
        }
        r.store->set("go", "1");
        transfer.finish();
        EXPECT_EQ(block.wrong(0, 3), 0);
        EXPECT_EQ(block.wrong(1, 1), 0);
        if (!ends) {
          EXPECT_TRUE(a.quiesce(0s));
        }
        ring.start(block).finish();  // in its new place
        EXPECT_EQ(block.wrong(2, 3), 0);
      },
      [&](Rank& r, const Block& block, const Ring& ring) {
        r.store->get("go", Deadline::after(20s));
        for (int i = 0; i < 2; ++i) {
          ring.start(block).finish();
          EXPECT_EQ(block.wrong(0, 1), 0) << "exchange " << i;
          EXPECT_EQ(block.wrong(2, 1), 0) << "exchange " << i;
          std::fill_n(block.wide(), 3 * block.columns, -1.0f);
        }
      });
}
TEST_F(WindowMoved, NotWhileAnotherGroupFails) { another_group_fails(false); }
TEST_F(WindowMoved, NotWhileAnotherGroupEnds) { another_group_fails(true); }

// The helper thread unpacks what rank 2 sends, slot after slot, while rank 0 wants the block moved.
TEST_F(WindowMoved, NotWhileTheHelperThreadUnpacks) {
  ::setenv("WEFT_SINGLE_COPY", "off", 1);
  with_two_groups(
      4 << 20, Progress::thread,
      [](Rank& r, ProcessGroup& a, const Block& block, const Ring& ring) {
        WindowTransfer transfer = ring.start(block);
        EXPECT_EQ(error_of([&] { block.sum(a).wait(); }).code(), ErrorCode::timeout);
        r.store->set("go", "1");
        const Deadline limit = Deadline::after(20s);
        while (!a.quiesce(0s) && !limit.passed()) std::this_thread::yield();
        transfer.finish();
        EXPECT_EQ(block.wrong(0, 3), 0);
        EXPECT_EQ(block.wrong(1, 1), 0);
        EXPECT_EQ(block.wrong(2, 3), 0);
        EXPECT_TRUE(a.quiesce(1s));
      },
      [](Rank& r, const Block& block, const Ring& ring) {
        const std::vector<float> part(static_cast<std::size_t>(block.columns),
                                      3.0f);  // not shared: it is packed
        r.store->get("go", Deadline::after(20s));
        ring.window.fetch(view(part.data(), {1, block.columns}), view(block.wide(), {3, block.columns}));
        EXPECT_EQ(block.wrong(2, 1), 0);
      });
  ::unsetenv("WEFT_SINGLE_COPY");
}

// Rank 1 is stopped inside of rank 0's memory, and rank 0 gives it other pages. Meanwhile rank 2 has not yet
// copied bytes from there that belong to an exchange of the same group.
TEST_F(WindowMoved, InItsOwnGroupTheNeighbourIsTold) {
  constexpr std::int64_t kColumns = 1 << 16;
  RankProcesses ranks(3, [&](Rank& r) {
    const Block block(r, kColumns);
    const ScopedTestHooks scope(r.context, r.rank, stops(r.rank));
    ProcessGroup group = ProcessGroup::create(r.context, "shm", r.membership("own"));
    const Ring ring(group, kColumns);
    for (int i = 0; i < 4; ++i) {
      ring.start(block).finish();
      r.meet("exchanged " + std::to_string(i));
    }
    const auto calls = [&] { return block.sum(group, {.deadline = r.rank == 0 ? Duration(300ms) : 20s}); };
    WindowTransfer transfer = ring.start(block);
    r.meet("started");
    if (r.rank != 2)  // they take what rank 2 sends
      for (int i = 0; i < 50; ++i) {
        EXPECT_FALSE(transfer.done());
        std::this_thread::sleep_for(1ms);
      }
    r.meet("taken");
    armed = true;
    Work sum = calls();
    if (r.rank == 1) return sum.wait();
    if (r.rank == 0) {
      EXPECT_EQ(error_of([&] { sum.wait(); }).code(), ErrorCode::timeout);
      EXPECT_TRUE(group.quiesce(1s)) << "nobody who reads that memory now will call it a success";
      r.store->set("moved", "1");
      r.store->get("told", Deadline::after(20s));
      EXPECT_THROW(transfer.finish(), Error);
      r.store->set("done", "1");
    } else {
      r.store->get("moved", Deadline::after(20s));
      EXPECT_EQ(error_of([&] { transfer.finish(); }).code(), ErrorCode::timeout);
      r.store->set("told", "1");
    }
  });
  ranks.store().get("done", Deadline::after(40s));
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

// One thread exchanges, while another thread moves the block all the time.
TEST_F(WindowMoved, BetweenTheExchangesOfAnotherThread) {
  constexpr int kExchanges = 15;
  constexpr std::int64_t kColumns = 20'000;
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    const Block block(r, kColumns);
    const Ring ring(r.group(), kColumns);
    std::atomic<bool> over{false};
    std::atomic<int> moves{0};
    std::jthread mover;
    if (r.rank == 0)
      mover = std::jthread([&] {
        while (!over) moves += arena_of(r.context).evacuate(block.part(), 1);
      });
    for (int k = 0; k < kExchanges; ++k) {
      if (r.rank == 1) std::fill_n(block.part(), kColumns, static_cast<float>(k));
      ring.start(block).finish();
      const float mine = r.rank == 0 ? 1.0f : static_cast<float>(k);
      const float theirs = r.rank == 1 ? 1.0f : static_cast<float>(k);
      ASSERT_EQ(block.wrong(0, theirs) + block.wrong(1, mine) + block.wrong(2, theirs), 0)
          << "exchange " << k << " of rank " << r.rank;
      if (r.rank == 0)  // so that it moves between any two exchanges
        for (const int seen = moves; moves == seen;) std::this_thread::yield();
    }
    over = true;
  });
}

}  // namespace
}  // namespace weft::window_moved_test
