// A rank that waits for an exchange of windows answers its peers' roll-call, however it waits. So the error
// names the rank that is late, and how long the others waited for it. done() does not wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/mesh/window.hpp"

namespace weft::window_blame_test {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::Rank;
using test::RankOptions;
using test::Ranks;
using test::run_ranks;
using testing::ElementsAre;
using testing::HasSubstr;

// A row of each rank, and the rows beside it.
class Rows {
 public:
  Rows(const DeviceMesh& mesh, std::int64_t columns, Edge edge)
      : x_(make_layout(mesh, {Shard{0}}, {mesh.size(), columns})),
        window_(x_, {WindowDim::halo(x_, 0, 1, 1, edge)}),
        columns_(columns),
        part_(static_cast<std::size_t>(columns)),
        wide_(static_cast<std::size_t>(3 * columns)) {}
  WindowTransfer start() {
    return window_.start(view(static_cast<const double*>(part_.data()), {1, columns_}),
                         view(wide_.data(), {3, columns_}));
  }

 private:
  Partition x_;
  Window window_;
  std::int64_t columns_;
  std::vector<double> part_, wide_;
};

enum class Waits { in_finish, by_asking, for_the_newer };
void wait(Waits how, WindowTransfer& older, WindowTransfer& newer) {
  if (how == Waits::by_asking)
    while (!older.done()) std::this_thread::sleep_for(50us);
  if (how == Waits::for_the_newer) newer.finish();
  older.finish();
  newer.finish();
}

// A chain 0 - 1 - 2, in which rank 2 does not arrive. Rank 1 waits for rank 2, and rank 0 waits for rank 1.
void the_third_is_named(Ranks kind, Waits rank_0, Waits rank_1, std::int64_t columns) {
  RankOptions options;
  options.deadline = 600ms;
  run_ranks(
      kind, 3,
      [&](Rank& r) {
        const DeviceMesh mesh(r.group(), {{"y", 3}});
        Rows rows(mesh, columns, Edge::zero()), others(mesh, columns, Edge::zero());
        rows.start().finish();
        others.start().finish();
        r.meet("exchanged");
        if (r.rank < 2) {
          const Waits how = r.rank == 0 ? rank_0 : rank_1;
          const Error e = error_of([&] {
            for (int i = 0; i < 2; ++i) {  // rank 0 gets the first of rank 1
              WindowTransfer older = rows.start(), newer = others.start();
              if (r.rank == 1) std::this_thread::sleep_for(300ms);
              wait(how, older, newer);
            }
          });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.ranks(), ElementsAre(2)) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("not finished within 0.6 s: "));
        }
        r.meet("over");
      },
      options);
}
TEST(WindowBlame, WhoIsWaitedForInFinish) {
  the_third_is_named(Ranks::threads, Waits::in_finish, Waits::in_finish, 3);
}
TEST(WindowBlame, WhoIsWaitedForByAsking) {
  the_third_is_named(Ranks::threads, Waits::in_finish, Waits::by_asking, 3);
  the_third_is_named(Ranks::processes, Waits::by_asking, Waits::by_asking, 40'000);
}
TEST(WindowBlame, WhoIsWaitedForInTheNewerOfTwo) {
  the_third_is_named(Ranks::threads, Waits::in_finish, Waits::for_the_newer, 3);
  the_third_is_named(Ranks::processes, Waits::for_the_newer, Waits::for_the_newer, 3);
}
TEST(WindowBlame, WhoIsWaitedForByAskingOnOneSideOnly) {
  the_third_is_named(Ranks::processes, Waits::by_asking, Waits::in_finish, 3);
}

// A thread that was interrupted goes on asking, to take in what is in flight.
TEST(WindowBlame, AnInterruptEndsNoDone) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    run_ranks(kind, 2, [](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"y", 2}});
      Rows rows(mesh, 4, Edge::periodic());
      rows.start().finish();
      r.meet("exchanged");
      if (r.rank == 0) {
        Interrupt interrupt;
        WindowTransfer transfer = rows.start();
        const auto asked = [&](int times) {
          const Interruptible here(interrupt);
          bool done = transfer.done();
          interrupt.raise();
          for (int i = 0; i < times && !(done = transfer.done()); ++i) std::this_thread::sleep_for(1ms);
          return done;
        };
        EXPECT_FALSE(asked(20));
        r.store->set("asked", "1");
        const bool done = asked(10'000);
        EXPECT_TRUE(done);
        EXPECT_FALSE(r.group().failed());
      } else {
        r.store->get("asked", Deadline::after(10s));
        rows.start().finish();
      }
    });
}

// The interrupt ends a wait on all ranks.
TEST(WindowBlame, AnInterruptEndsFinish) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    Rows rows(mesh, 4, Edge::periodic());
    rows.start().finish();
    r.meet("exchanged");
    if (r.rank == 0) {
      Interrupt interrupt;
      const Interruptible here(interrupt);
      WindowTransfer transfer = rows.start();
      const std::jthread raiser([&] {
        std::this_thread::sleep_for(50ms);
        interrupt.raise();
      });
      const Error e = error_of([&] { transfer.finish(); });
      EXPECT_EQ(e.code(), ErrorCode::aborted);
      EXPECT_THAT(e.what(), HasSubstr("rank 0 was interrupted while it waited"));
    }
    r.meet("over");
  });
}

}  // namespace
}  // namespace weft::window_blame_test
