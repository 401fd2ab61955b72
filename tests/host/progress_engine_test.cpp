#include "host/progress_engine.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support/errors.hpp"
#include "weft/host/context.hpp"

namespace weft::progress_engine_test {
namespace {

using namespace std::chrono_literals;

struct Counting : Driven {
  std::atomic<int> drives{0}, asleep{0};
  std::atomic<bool> moves{false};
  bool drive() noexcept override {
    ++drives;
    return moves;
  }
  void announce_sleep(bool a) noexcept override { asleep += a ? 1 : -1; }
};

TEST(Progress, DrivesAllOfARank) {
  Context context;
  ProgressEngine& list = progress_of(context, 2);
  EXPECT_EQ(&list, &progress_of(context, 2));
  EXPECT_NE(&list, &progress_of(context, 3));
  Counting a, b;
  list.add(&a);
  list.add(&b);
  EXPECT_FALSE(list.drive_all());
  b.moves = true;
  EXPECT_TRUE(list.drive_all());
  list.remove(&b);
  EXPECT_FALSE(list.drive_all());
  EXPECT_EQ(a.drives, 3);
  EXPECT_EQ(b.drives, 2);
  list.remove(&a);
}

TEST(Progress, NapsWhereNobodyRings) {
  struct Silent : Counting {
    bool rings() const noexcept override { return false; }
  } silent;
  Context context;
  ProgressEngine& list = progress_of(context, 0);
  list.add(&silent);
  for (int i = 0; i < 3; ++i) list.sleep(std::chrono::hours(1), 0s, [] { return false; });
  EXPECT_EQ(silent.drives, 3);
  // The longer, the longer it has waited, up to 4 ms.
  for (const auto& [waited, least] : {std::pair<Duration, Duration>{50ms, 1ms}, {1s, 4ms}, {1h, 4ms}}) {
    const auto began = Clock::now();
    list.sleep(1h, waited, [] { return false; });
    EXPECT_GE(Clock::now() - began, least);
    EXPECT_LT(Clock::now() - began, 5s);
  }
  EXPECT_EQ(silent.asleep, 0);
  list.remove(&silent);
}

TEST(Progress, RefusesAProcessRankOutOfRange) {
  Context context;
  EXPECT_NE(&progress_of(context, 1'000'000), &progress_of(context, 1024));
  EXPECT_EQ(test::error_text([&] { return &progress_of(context, -1); }),
            "bad_argument: context: process_rank is -1; expected 0 or more");
}

TEST(Progress, SleepsUntilRungAndAnnouncesIt) {
  Context context;
  ProgressEngine& list = progress_of(context, 0);
  Counting a;
  list.add(&a);
  const auto never = [] { return false; };
  const auto start = Clock::now();
  std::thread peer([&] {
    while (a.asleep == 0) std::this_thread::yield();
    list.doorbell().ring();
  });
  list.sleep(20s, 0s, never);
  peer.join();
  EXPECT_EQ(a.asleep, 0);
  EXPECT_EQ(a.drives, 1);
  list.sleep(20s, 0s, [] { return true; });  // finished already
  a.moves = true;
  list.sleep(20s, 0s, never);  // something moved
  EXPECT_LT(Clock::now() - start, 10s);
  a.moves = false;
  list.sleep(2ms, 0s, never);  // ends by itself
  list.remove(&a);
}

// With two sleepers the announcement stays until the last is awake. A group that is added meanwhile makes it
// too.
TEST(Progress, TheLastSleeperTakesTheAnnouncementBack) {
  Context context;
  ProgressEngine& list = progress_of(context, 0);
  Counting a, b;
  list.add(&a);
  bool announced = false;
  list.announce_sleep(true, announced);
  list.announce_sleep(true, announced);
  EXPECT_EQ(a.asleep, 1);
  list.add(&b);
  EXPECT_EQ(b.asleep, 1);
  list.announce_sleep(false, announced);
  EXPECT_EQ(a.asleep, 1);
  list.announce_sleep(false, announced);
  EXPECT_EQ(a.asleep, 0);
  EXPECT_EQ(b.asleep, 0);
  list.remove(&a);
  list.remove(&b);
}

}  // namespace
}  // namespace weft::progress_engine_test
