// The kernel of a thread waits for a page of a neighbour's memory, in the middle of an exchange of windows.
// Other threads of its rank do not wait for it, and it makes its own checks between one slow page and the
// next.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <vector>

#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/slow_memory.hpp"
#include "weft/mesh/window.hpp"

namespace weft::window_stuck_test {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::error_text;
using test::Rank;
using test::Ranks;
using test::run_ranks;
using test::SlowMemory;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

// Rank 0 requests the elements of rank 1.
class ToRank0 {
 public:
  ToRank0(const DeviceMesh& mesh, std::int64_t n)
      : n_(n),
        window_(Partition(make_layout(mesh, {Shard{0}}, {2 * n})),
                {WindowDim::ranges(0, {{n, 2 * n}, {2 * n, 2 * n}})}),
        plain_(static_cast<std::size_t>(n), static_cast<float>(mesh.rank() + 1)),
        out_(mesh.rank() == 0 ? plain_.size() : 0) {}
  WindowTransfer start(const float* in) {
    return window_.start(view(in, n_), view(out_.data(), static_cast<std::int64_t>(out_.size())));
  }
  WindowTransfer start() { return start(plain_.data()); }
  const std::vector<float>& out() const { return out_; }

 private:
  std::int64_t n_;
  Window window_;
  std::vector<float> plain_, out_;
};

// Rank 1 gives memory whose pages do not arrive. Rank 0 copies them through the kernel by this time. `rank_0`
// is called with that exchange in flight. `pages` is called on a thread of rank 1, once a thread waits for
// one of them.
void exchange_slowly(std::size_t bytes, Progress progress,
                     const std::function<void(Rank&, ProcessGroup&, ToRank0&, WindowTransfer)>& rank_0,
                     const std::function<void(Rank&, SlowMemory&)>& pages) {
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    Membership m = r.membership("g");
    m.progress = progress;
    m.deadline = r.rank == 0 ? 1s : 20s;  // so that it is rank 0 that is late
    std::optional<ToRank0> exchange;      // outlives the group, whose helper thread writes to it
    ProcessGroup group = ProcessGroup::create(r.context, "shm", m);
    const DeviceMesh mesh(group, {{"y", 2}});
    exchange.emplace(mesh, static_cast<std::int64_t>(bytes / sizeof(float)));
    for (int i = 0; i < 12; ++i) exchange->start().finish();  // the first ones are packed
    r.meet("exchanged");
    if (r.rank == 0) {
      rank_0(r, group, *exchange, exchange->start());
    } else {
      SlowMemory slow(bytes);
      ASSERT_TRUE(slow.there());
      std::jthread server([&] {
        EXPECT_TRUE(slow.somebody_waits(20s));
        r.store->set("stuck", "1");
        pages(r, slow);
      });
      error_text([&] { exchange->start(static_cast<const float*>(slow.data())).finish(); });
      server.join();
    }
    r.meet("over");
  });
}

class WindowStuck : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_SINGLE_COPY", "pull", 1);
    if (!test::kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
    if (!SlowMemory::possible()) GTEST_SKIP() << "no userfaultfd here";
  }
  void TearDown() override { ::unsetenv("WEFT_SINGLE_COPY"); }
};

constexpr std::size_t kBytes = 1 << 20;
void resolve_later(Rank& r, SlowMemory& slow) {
  r.store->get("resolve", Deadline::after(20s));
  slow.let_come();
}

// The helper thread is stuck: done() says no, finish() throws at the deadline, and the transfer can be
// destroyed.
TEST_F(WindowStuck, TheHelperThreadHoldsUpNobody) {
  exchange_slowly(
      kBytes, Progress::thread,
      [](Rank& r, ProcessGroup& group, ToRank0& exchange, WindowTransfer transfer) {
        r.store->get("stuck", Deadline::after(20s));
        auto since = Clock::now();
        EXPECT_FALSE(transfer.done());
        EXPECT_LT(Clock::now() - since, 500ms);
        since = Clock::now();
        const Error e = error_of([&] { transfer.finish(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(e.ranks(), ElementsAre(0));
        EXPECT_FALSE(e.quiesced()) << "the stuck thread still writes to its memory";
        EXPECT_FALSE(group.quiesce(50ms));
        EXPECT_THAT(e.what(),
                    StartsWith("window: not finished within 1 s: all the time another thread of rank 0 was "
                               "in the middle of a step; if the kernel copies for it, and waits for memory "
                               "of a peer, WEFT_SINGLE_COPY=off avoids this"));
        EXPECT_THAT(error_text([&] { static_cast<void>(exchange.start()); }),
                    HasSubstr("waits for memory of a peer"));
        EXPECT_THAT(error_text([&] { group.barrier().wait(); }), HasSubstr("waits for memory of a peer"));
        transfer = {};
        EXPECT_LT(Clock::now() - since, 8s);
        r.store->set("resolve", "1");
        EXPECT_TRUE(group.quiesce(10s));
      },
      resolve_later);
}

// Its block of memory and the group of its mesh end with the Context: with the rank.
TEST_F(WindowStuck, WhatIsDestroyedMeanwhileDoesNotOutliveTheContext) {
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    constexpr std::int64_t kCount = kBytes / sizeof(float);
    std::vector<float> in(kCount), out(kCount);  // outlive the group, whose helper thread writes to them
    Membership m = r.membership("g");
    m.progress = Progress::thread;
    m.deadline = r.rank == 0 ? 1s : 20s;
    const DeviceMesh mesh(ProcessGroup::create(r.context, "shm", m), {{"y", 2}});
    const Window window(Partition(make_layout(mesh, {Shard{0}}, {2 * kCount})),
                        {WindowDim::ranges(0, {{0, 0}, {0, kCount}})});
    const auto start = [&](const void* gradient) {
      return window.start_adjoint(view(static_cast<const float*>(gradient), r.rank * kCount), view(out));
    };
    for (int i = 0; i < 12; ++i) start(in.data()).finish();  // the first ones are packed
    if (r.rank == 0) {
      WindowTransfer transfer = start(in.data());
      r.store->get("stuck", Deadline::after(20s));
      EXPECT_THAT(error_text([&] { transfer.finish(); }), HasSubstr("waits for memory of a peer"));
      transfer = {};
      r.store->set("resolve", "1");
      EXPECT_TRUE(mesh.group().quiesce(10s));
    } else {
      SlowMemory slow(kBytes);
      ASSERT_TRUE(slow.there());
      std::jthread pages([&] {
        EXPECT_TRUE(slow.somebody_waits(20s));
        r.store->set("stuck", "1");
        resolve_later(r, slow);
      });
      error_text([&] { start(slow.data()).finish(); });
    }
  });
}

// The thread is stuck in another call of the group.
TEST_F(WindowStuck, AStartEndsAtItsDeadline) {
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    Membership m = r.membership("g");
    m.deadline = r.rank == 0 ? 1s : 20s;
    ProcessGroup group = ProcessGroup::create(r.context, "shm", m);
    ToRank0 exchange(DeviceMesh(group, {{"y", 2}}), 16);
    exchange.start().finish();
    constexpr std::int64_t kCount = kBytes / sizeof(float);
    if (r.rank == 0) {
      std::vector<float> in(kCount);
      Work received = group.recv(view(in), 1, {.deadline = 20s});
      std::jthread receiver([&] { error_text([&] { received.wait(); }); });
      r.store->get("stuck", Deadline::after(20s));
      const auto since = Clock::now();
      EXPECT_THAT(error_text(ErrorCode::timeout, [&] { static_cast<void>(exchange.start()); }),
                  StartsWith("window: not begun within 1 s: all the time another thread of this rank"));
      EXPECT_LT(Clock::now() - since, 3s);
      r.store->set("resolve", "1");
    } else {
      SlowMemory slow(kBytes);
      ASSERT_TRUE(slow.there());
      Work sent = group.send(view(static_cast<const float*>(slow.data()), kCount), 0);
      EXPECT_TRUE(slow.somebody_waits(20s));
      r.store->set("stuck", "1");
      resolve_later(r, slow);
      error_text([&] { sent.wait(); });
    }
  });
}

TEST_F(WindowStuck, DoneThrowsAtTheDeadline) {
  exchange_slowly(
      kBytes, Progress::thread,
      [](Rank& r, ProcessGroup&, ToRank0&, WindowTransfer transfer) {
        r.store->get("stuck", Deadline::after(20s));
        const auto since = Clock::now();
        const Error e = error_of([&] {
          while (!transfer.done()) std::this_thread::sleep_for(100us);
        });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("waits for memory of a peer"));
        EXPECT_LT(Clock::now() - since, 5s);
        r.store->set("resolve", "1");
      },
      resolve_later);
}

// A thread of the program is stuck in finish(): another one aborts.
TEST_F(WindowStuck, AThreadOfTheProgramHoldsUpNoAbort) {
  exchange_slowly(
      kBytes, Progress::caller,
      [](Rank& r, ProcessGroup& group, ToRank0& exchange, WindowTransfer transfer) {
        std::jthread finisher([&] { error_text([&] { transfer.finish(); }); });
        r.store->get("stuck", Deadline::after(20s));
        const auto since = Clock::now();
        group.abort("enough");
        EXPECT_THAT(error_text([&] { static_cast<void>(exchange.start()); }),
                    HasSubstr("aborted by rank 0: enough"));
        EXPECT_LT(Clock::now() - since, 2s);
        r.store->set("resolve", "1");
        finisher.join();
      },
      resolve_later);
}

// Once pages are slow, the thread copies them one by one, and detects between two pages that the group has
// failed.
TEST_F(WindowStuck, SlowPagesAreCopiedOneByOne) {
  constexpr std::size_t kFirst = 4 << 20;
  exchange_slowly(
      3 * kFirst, Progress::caller,
      [](Rank& r, ProcessGroup& group, ToRank0&, WindowTransfer transfer) {
        std::jthread aborter([&] {
          r.store->get("slow", Deadline::after(20s));
          group.abort("enough");
        });
        EXPECT_THAT(error_text([&] { transfer.finish(); }), HasSubstr("aborted by rank 0: enough"));
        r.store->set("told", "1");
        aborter.join();
      },
      [](Rank& r, SlowMemory& slow) {
        std::this_thread::sleep_for(100ms);
        slow.awaited(0s);
        slow.let_come(static_cast<char*>(slow.data()) + SlowMemory::kPage, kFirst);
        const auto told = [&](Duration limit) {
          try {
            r.store->get("told", Deadline::after(limit));
            return true;
          } catch (const Error&) {
            return false;
          }
        };
        bool seen = false;
        for (int page = 0; page < 60 && !(seen = told(page < 2 ? 80ms : 60ms)); ++page) {
          if (page == 3) r.store->set("slow", "1");
          if (char* const at = slow.awaited(0s)) slow.let_come(at, SlowMemory::kPage);
        }
        EXPECT_TRUE(seen) << "pages came for seconds, and it did not look";
      });
}

}  // namespace
}  // namespace weft::window_stuck_test
