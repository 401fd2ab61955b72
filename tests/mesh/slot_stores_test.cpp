// How large packed bytes are written into a slot: by what either kind of stores took before.
#include "mesh/window/links/slot_stores.hpp"

#include <gtest/gtest.h>

namespace weft::windows {
namespace {

constexpr std::int64_t kBlock = 32 << 10;

// Writes blocks that take so long a KiB; how many of them around the caches.
int write(SlotStores& stores, int blocks, double cached_ns, double around_ns) {
  int around = 0;
  for (int i = 0; i < blocks; ++i) {
    const bool is_around = stores.around_caches(kBlock);
    around += is_around;
    const double ns = (is_around ? around_ns : cached_ns) * kBlock / 1024;
    stores.took(std::chrono::nanoseconds(static_cast<std::int64_t>(ns)));
  }
  return around;
}

TEST(SlotStores, CachedWhereTheCacheIsShared) {
  SlotStores stores;
  EXPECT_EQ(write(stores, 320, 40, 34), 10);  // those that are tried
}

TEST(SlotStores, AroundTheCachesWhereEachLineIsFetchedFromAnother) {
  SlotStores stores;
  EXPECT_GT(write(stores, 320, 155, 25), 290);
}

TEST(SlotStores, FollowsThreadsThatMoveToOtherCores) {
  SlotStores stores;
  write(stores, 100, 40, 34);
  write(stores, 100, 155, 25);  // learns
  EXPECT_GT(write(stores, 320, 155, 25), 300);
  write(stores, 400, 40, 34);
  EXPECT_LT(write(stores, 320, 40, 34), 20);
}

TEST(SlotStores, OneBlockThatTookLongDecidesNothing) {
  SlotStores stores;
  write(stores, 100, 40, 34);
  static_cast<void>(stores.around_caches(kBlock));
  stores.took(std::chrono::milliseconds(4));  // its core was taken away
  EXPECT_LT(write(stores, 100, 40, 34), 8);
}

TEST(SlotStores, FewBytesGoThroughTheCaches) {
  SlotStores stores;
  write(stores, 200, 155, 25);
  EXPECT_FALSE(stores.around_caches(SlotStores::kLeast - 1));
  stores.wrote();  // not measured
  EXPECT_GT(write(stores, 32, 155, 25), 29);
}

}  // namespace
}  // namespace weft::windows
