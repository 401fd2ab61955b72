#include "host/arena.hpp"

#include <gtest/gtest.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "host/peers.hpp"
#include "support/processes.hpp"
#include "weft/base/error.hpp"
#include "weft/base/storage.hpp"
#include "weft/host/context.hpp"

namespace weft::arena_test {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

// The view of peers: the memfd of a segment, mapped a second time.
class PeerView {
 public:
  PeerView(const Arena& arena, std::uint32_t segment) : bytes_(arena.segment_bytes(segment)) {
    void* got =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, arena.segment_descriptor(segment), 0);
    EXPECT_NE(got, MAP_FAILED);
    data_ = static_cast<std::byte*>(got);
  }
  ~PeerView() { ::munmap(data_, bytes_); }
  std::byte* at(const SegmentPlace& place) const { return data_ + place.offset; }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

std::size_t resident_bytes(const Arena& arena, std::uint32_t segment) {
  struct stat file {};
  EXPECT_EQ(::fstat(arena.segment_descriptor(segment), &file), 0);
  return static_cast<std::size_t>(file.st_blocks) * 512;
}

struct ArenaTest : testing::Test {
  Logger log;
  Arena arena{log, 4 * kMiB};
};

TEST_F(ArenaTest, ReservesNothingUntilAsked) {
  EXPECT_EQ(arena.segment_count(), 0u);
  EXPECT_EQ(arena.segment_base(0), nullptr);
  EXPECT_EQ(arena.segment_bytes(0), 0u);
  EXPECT_EQ(arena.segment_descriptor(0), -1);
  EXPECT_TRUE(arena.ensure_segment());
  EXPECT_TRUE(arena.ensure_segment());
  EXPECT_EQ(arena.segment_count(), 1u);
  EXPECT_EQ(arena.segment_bytes(0), 4 * kMiB);
}

TEST_F(ArenaTest, BlocksAreWholePagesAndPeersSeeThem) {
  auto* a = static_cast<std::byte*>(arena.allocate(1));
  auto* b = static_cast<std::byte*>(arena.allocate(5000));
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 4096, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % 4096, 0u);
  EXPECT_EQ(arena.counters().in_use_bytes, 4096u + 8192u);
  std::memset(b, 42, 5000);
  const auto place = arena.find(b, 5000);
  ASSERT_TRUE(place.has_value());
  const PeerView peer(arena, place->segment);
  EXPECT_EQ(peer.at(*place)[4999], std::byte{42});
  arena.release(a);
  arena.release(b);
  EXPECT_EQ(arena.counters().in_use_bytes, 0u);
  EXPECT_EQ(arena.counters().cached_bytes, 4096u + 8192u);
}

TEST_F(ArenaTest, FirstTouchIsDoneInBulk) {
  arena.allocate(kMiB);
  EXPECT_GE(resident_bytes(arena, 0), kMiB);
  EXPECT_LT(resident_bytes(arena, 0), 4 * kMiB);
}

// Blocks whose pages are taken at their first use. A later caller that wants all pages of such memory gets
// them.
TEST_F(ArenaTest, PagesAreTakenAtFirstUseIfTheCallerWantsThat) {
  auto* const a = static_cast<std::byte*>(arena.allocate(kMiB, Arena::Pages::at_first_use));
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(resident_bytes(arena, 0), 0u);
  a[5000] = std::byte{1};
  EXPECT_EQ(resident_bytes(arena, 0), 4096u);
  arena.release(a);
  EXPECT_EQ(arena.allocate(64 * kKiB, Arena::Pages::at_first_use), a);  // a part of it
  EXPECT_EQ(resident_bytes(arena, 0), 4096u);
  arena.release(a);
  void* const all = arena.allocate(64 * kKiB);
  EXPECT_EQ(all, a);
  EXPECT_EQ(resident_bytes(arena, 0), 64 * kKiB);
  // A block with pages beside one without: they stay two.
  void* const b = arena.allocate(64 * kKiB, Arena::Pages::at_first_use);
  EXPECT_EQ(b, a + 64 * kKiB);
  arena.release(all);
  arena.release(b);
  EXPECT_EQ(arena.allocate(64 * kKiB), a);
  EXPECT_EQ(resident_bytes(arena, 0), 64 * kKiB);
}

TEST_F(ArenaTest, FreedBlocksAreUsedAgainSplitAndMerged) {
  void* a = arena.allocate(64 * kKiB);
  void* b = arena.allocate(64 * kKiB);
  void* c = arena.allocate(64 * kKiB);
  arena.release(a);
  EXPECT_EQ(arena.allocate(64 * kKiB), a);
  arena.release(a);
  arena.release(c);
  arena.release(b);  // all three become one
  EXPECT_EQ(arena.allocate(192 * kKiB), a);
  arena.release(a);
  EXPECT_EQ(arena.allocate(16 * kKiB), a);
  EXPECT_EQ(arena.allocate(16 * kKiB), static_cast<std::byte*>(a) + 16 * kKiB);
  EXPECT_EQ(arena.segment_count(), 1u);
}

TEST_F(ArenaTest, SegmentsAreAddedAndFindTellsThemApart) {
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(static_cast<std::byte*>(arena.allocate(3 * kMiB)));
  EXPECT_EQ(arena.segment_count(), 6u);
  std::set<std::uint32_t> segments;
  for (std::byte* b : blocks) {
    const auto place = arena.find(b + 100, 3 * kMiB - 100);
    ASSERT_TRUE(place.has_value());
    EXPECT_EQ(arena.segment_base(place->segment) + place->offset, b + 100);
    segments.insert(place->segment);
  }
  EXPECT_EQ(segments.size(), 6u);
  // Segments that are not shared memory, torn, or beyond the address space.
  int local = 0;
  EXPECT_FALSE(arena.find(&local, sizeof local));
  EXPECT_FALSE(arena.find(nullptr, 0));
  EXPECT_FALSE(arena.find(blocks[0], 4 * kMiB + 1));
  EXPECT_FALSE(arena.find(blocks[0], SIZE_MAX));
  EXPECT_TRUE(arena.find(blocks[0], 0));
}

TEST_F(ArenaTest, ALargeBlockGetsASegmentOfItsOwn) {
  auto* big = static_cast<std::byte*>(arena.allocate(9 * kMiB + 1));
  ASSERT_NE(big, nullptr);
  EXPECT_EQ(arena.segment_bytes(0), 9 * kMiB + 4096);
  EXPECT_TRUE(arena.find(big, 9 * kMiB + 1));
  ASSERT_NE(arena.allocate(1), nullptr);
  EXPECT_EQ(arena.segment_bytes(1), 4 * kMiB);
  EXPECT_EQ(arena.allocate(SIZE_MAX), nullptr);
}

// A refused allocation takes no memory from other programs.
TEST_F(ArenaTest, MoreThanTheHostHasIsRefusedAtOnce) {
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  EXPECT_EQ(arena.allocate((pages + 1) * 4096), nullptr);
  EXPECT_EQ(arena.segment_count(), 0u);
}

TEST(Arena, EndsWithItsSegments) {
  Logger log;
  Arena arena(log, 4096);
  for (std::uint32_t i = 0; i < Arena::kMaxSegments; ++i) ASSERT_NE(arena.allocate(4096), nullptr);
  EXPECT_EQ(arena.segment_count(), Arena::kMaxSegments);
  EXPECT_EQ(arena.allocate(4096), nullptr);
}

// A group that still uses one block.
struct Holder : BlockHolder {
  std::atomic<const void*> block{nullptr};
  bool holds(const void* b, std::size_t) const noexcept override { return b == block; }
};

TEST_F(ArenaTest, AHeldBlockIsNotUsedAgain) {
  Holder holder;
  arena.add_holder(&holder);
  void* a = arena.allocate(8192);
  holder.block = a;
  arena.release(a);
  EXPECT_EQ(arena.counters().quarantined_bytes, 8192u);
  EXPECT_EQ(arena.counters().in_use_bytes, 0u);
  void* b = arena.allocate(8192);
  EXPECT_NE(b, a);
  holder.block = nullptr;
  EXPECT_EQ(arena.allocate(8192), a);
  EXPECT_EQ(arena.counters().quarantined_bytes, 0u);
  arena.release(b);
  holder.block = b;  // too late to hold: it is in the cache; and removed holders are not asked
  arena.remove_holder(&holder);
  EXPECT_EQ(arena.allocate(8192), b);
}

TEST_F(ArenaTest, EvacuationKeepsContentsAndOrphansTheOldPages) {
  auto* before = static_cast<std::byte*>(arena.allocate(4096));
  auto* block = static_cast<std::byte*>(arena.allocate(64 * kKiB));
  auto* after = static_cast<std::byte*>(arena.allocate(4096));
  for (std::size_t i = 0; i < 64 * kKiB; ++i) block[i] = static_cast<std::byte>(i * 7);
  std::memset(before, 1, 4096);
  std::memset(after, 2, 4096);
  const SegmentPlace old_place = *arena.find(block, 64 * kKiB);
  const PeerView late(arena, old_place.segment);

  ASSERT_TRUE(arena.evacuate(block + 5000, 100));  // the whole block moves
  const auto place = arena.find(block, 64 * kKiB);
  ASSERT_TRUE(place.has_value());
  EXPECT_NE(place->offset, old_place.offset);
  for (std::size_t i = 0; i < 64 * kKiB; ++i) ASSERT_EQ(block[i], static_cast<std::byte>(i * 7)) << i;
  EXPECT_EQ(before[4095], std::byte{1});
  EXPECT_EQ(after[0], std::byte{2});
  EXPECT_EQ(arena.counters().retired_bytes, 64 * kKiB);

  std::memset(late.at(old_place), 99, 64 * kKiB);  // the late writer
  EXPECT_EQ(block[0], std::byte{0});
  EXPECT_EQ(block[64 * kKiB - 1], std::byte{0xf9});  // 65535 * 7 mod 256
  const PeerView now(arena, place->segment);         // peers that ask again see what we write
  block[17] = std::byte{123};
  EXPECT_EQ(now.at(*place)[17], std::byte{123});

  // A range that is only partly inside the moved block has no single new address.
  EXPECT_FALSE(arena.find(before, 8192));
  EXPECT_FALSE(arena.find(block + 64 * kKiB - 10, 20));
  EXPECT_TRUE(arena.find(before, 4096));
  EXPECT_TRUE(arena.find(after, 4096));
}

// A group with a call in flight in one block, which may be at work.
struct User : BlockHolder {
  const std::byte* block = nullptr;
  std::atomic<bool> at_work{false};
  std::atomic<int> stood_still{0}, went_on{0};
  bool holds(const void*, std::size_t) const noexcept override { return false; }
  bool stand_still() noexcept override {
    if (at_work) return false;
    ++stood_still;
    return true;
  }
  void go_on() noexcept override { ++went_on; }
  bool uses(const void* b, std::size_t bytes) const noexcept override {
    return block >= b && block < static_cast<const std::byte*>(b) + bytes;
  }
};

TEST_F(ArenaTest, ABlockInUseStaysWhereItIs) {
  User first, second;
  arena.add_holder(&first);
  arena.add_holder(&second);
  auto* block = static_cast<std::byte*>(arena.allocate(64 * kKiB));
  const SegmentPlace place = *arena.find(block, 1);
  second.block = block + 60 * kKiB;
  EXPECT_FALSE(arena.evacuate(block, 10));  // another part of the block
  second.block = nullptr;
  second.at_work = true;
  EXPECT_FALSE(arena.evacuate(block, 10));
  EXPECT_EQ(arena.find(block, 1)->offset, place.offset);
  std::thread idle([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    second.at_work = false;
  });
  EXPECT_TRUE(arena.evacuate(block, 10));  // waits a moment
  idle.join();
  EXPECT_NE(arena.find(block, 1)->offset, place.offset);
  for (const User* u : {&first, &second}) EXPECT_EQ(u->stood_still, u->went_on);
  arena.remove_holder(&first);
  arena.remove_holder(&second);
}

TEST_F(ArenaTest, PinnedPagesStayWhereTheyAre) {
  auto* a = static_cast<std::byte*>(arena.allocate(8192));
  auto* b = static_cast<std::byte*>(arena.allocate(8192));
  ASSERT_EQ(b, a + 8192);
  const SegmentPlace place = *arena.find(a, 1);
  EXPECT_TRUE(arena.pin(a + 100, 1));
  EXPECT_TRUE(arena.pin(a + 200, 8192));  // and of b
  EXPECT_FALSE(arena.evacuate(a, 1));
  EXPECT_FALSE(arena.evacuate(b, 1));
  arena.unpin(a + 200, 8192);
  EXPECT_FALSE(arena.evacuate(a, 1));
  EXPECT_TRUE(arena.evacuate(b, 1));
  arena.release(a);  // nobody is given what a driver still has
  auto* c = static_cast<std::byte*>(arena.allocate(8192));
  EXPECT_NE(c, a);
  EXPECT_EQ(arena.counters().quarantined_bytes, 8192u);
  arena.unpin(a + 100, 1);
  EXPECT_EQ(arena.allocate(8192), a);
  EXPECT_EQ(arena.find(a, 1)->offset, place.offset);
  EXPECT_TRUE(arena.evacuate(a, 1));
  int local = 0;
  EXPECT_FALSE(arena.pin(&local, sizeof local));
}

// The kernel counts pages that io_uring has registered. io_uring would continue to use the old pages.
TEST_F(ArenaTest, PagesThatTheKernelCountsAsPinnedStayWhereTheyAre) {
  auto* block = static_cast<std::byte*>(arena.allocate(64 * kKiB));
  io_uring_params parameters{};
  const int ring = static_cast<int>(::syscall(SYS_io_uring_setup, 1, &parameters));
  if (ring < 0) GTEST_SKIP() << "no io_uring here: " << std::strerror(errno);
  const iovec buffer{block, 64 * kKiB};
  if (::syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1) != 0) {
    ::close(ring);
    GTEST_SKIP() << "io_uring registers nothing here: " << std::strerror(errno);
  }
  EXPECT_FALSE(arena.evacuate(block, 1));
  EXPECT_EQ(::syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, nullptr, 0), 0);
  ::close(ring);
  // Its pages are given back a moment later.
  bool moved = false;
  for (int i = 0; i < 5000 && !moved; ++i) {
    moved = arena.evacuate(block, 1);
    if (!moved) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(moved);
}

TEST_F(ArenaTest, EvacuatesAgainAndSeveralBlocks) {
  auto* a = static_cast<std::byte*>(arena.allocate(8192));
  auto* b = static_cast<std::byte*>(arena.allocate(8192));
  ASSERT_EQ(b, a + 8192);
  std::memset(a, 1, 8192);
  std::memset(b, 2, 8192);
  std::set<std::uint64_t> places = {arena.find(a, 1)->offset, arena.find(b, 1)->offset};
  for (int round = 1; round <= 5; ++round) {
    ASSERT_TRUE(arena.evacuate(a + 1, 8192));  // touches both
    for (std::byte* p : {a, b}) EXPECT_TRUE(places.insert(arena.find(p, 8192)->offset).second);
    EXPECT_EQ(a[8191], std::byte{1});
    EXPECT_EQ(b[0], std::byte{2});
  }
  EXPECT_EQ(arena.counters().retired_bytes, 5u * 16384u);
  EXPECT_EQ(arena.counters().in_use_bytes, 16384u);
}

TEST_F(ArenaTest, AMovedBlockIsRecycledWithinItsOwnRange) {
  auto* a = static_cast<std::byte*>(arena.allocate(8192));
  auto* b = static_cast<std::byte*>(arena.allocate(32 * kKiB));
  auto* c = static_cast<std::byte*>(arena.allocate(8192));
  ASSERT_TRUE(arena.evacuate(b, 1));
  arena.release(a);
  arena.release(b);
  arena.release(c);
  // a, b and c touch in address but not in place: no block may span them.
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 40; ++i) {
    auto* block = static_cast<std::byte*>(arena.allocate(12 * kKiB));
    ASSERT_NE(block, nullptr);
    EXPECT_TRUE(arena.find(block, 12 * kKiB));
    blocks.push_back(block);
  }
  EXPECT_NE(std::find(blocks.begin(), blocks.end(), b), blocks.end());  // b's pages are used again
}

TEST_F(ArenaTest, RefusesToEvacuateWhatIsNotItsOwn) {
  int local = 0;
  EXPECT_FALSE(arena.evacuate(&local, sizeof local));
  auto* a = static_cast<std::byte*>(arena.allocate(4096));
  EXPECT_FALSE(arena.evacuate(a + kMiB, 10));  // in the segment, but no block
  arena.release(a);
  EXPECT_FALSE(arena.evacuate(a, 10));
}

// Compares blocks with a model: contents stay, no two blocks overlap, and peers find every block at its
// address with its contents.
TEST_F(ArenaTest, RandomLife) {
  struct Block {
    std::byte* data;
    std::size_t bytes;
    unsigned char mark;
  };
  std::mt19937 random(1);
  std::vector<Block> blocks;
  const auto check = [&](const Block& b) {
    ASSERT_EQ(b.data[0], std::byte{b.mark});
    ASSERT_EQ(b.data[b.bytes - 1], std::byte{b.mark});
    ASSERT_EQ(b.data[b.bytes / 2], std::byte{b.mark});
  };
  for (int step = 0; step < 3000; ++step) {
    const auto what = random() % 100;
    if (blocks.empty() || what < 48) {
      const std::size_t bytes = 1 + random() % (random() % 8 == 0 ? 200'000 : 10'000);
      auto* data = static_cast<std::byte*>(arena.allocate(bytes));
      ASSERT_NE(data, nullptr);
      blocks.push_back({data, bytes, static_cast<unsigned char>(random())});
      std::memset(data, blocks.back().mark, bytes);
    } else {
      const std::size_t i = random() % blocks.size();
      check(blocks[i]);
      if (what < 95) {
        arena.release(blocks[i].data);
        blocks[i] = blocks.back();
        blocks.pop_back();
      } else {
        ASSERT_TRUE(arena.evacuate(blocks[i].data, blocks[i].bytes));
        check(blocks[i]);
      }
    }
  }
  std::vector<std::unique_ptr<PeerView>> views;
  for (std::uint32_t s = 0; s < arena.segment_count(); ++s)
    views.push_back(std::make_unique<PeerView>(arena, s));
  std::size_t in_use = 0;
  for (const Block& b : blocks) {
    check(b);
    const auto place = arena.find(b.data, b.bytes);
    ASSERT_TRUE(place.has_value());
    EXPECT_EQ(views[place->segment]->at(*place)[b.bytes - 1], std::byte{b.mark});
    in_use += (b.bytes + 4095) / 4096 * 4096;
  }
  EXPECT_EQ(arena.counters().in_use_bytes, in_use);
}

TEST_F(ArenaTest, ReadersNeedNoLock) {
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(static_cast<std::byte*>(arena.allocate(kMiB)));
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r)
    readers.emplace_back([&] {
      while (!stop)
        for (std::byte* b : blocks) EXPECT_TRUE(arena.find(b, kMiB));
    });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(arena.evacuate(blocks[static_cast<std::size_t>(i % 8)], 1));
    void* more = arena.allocate(3 * kMiB);
    if (i % 2) arena.release(more);
  }
  stop = true;
  for (std::thread& t : readers) t.join();
}

// With little address space left segments shrink. With none, local memory is used instead.
TEST(ArenaLimits, SegmentsAreHalvedWhereTheSystemRefuses) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space that this test takes away";
#endif
  const auto result = test::run_in_child([] {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 700 * kMiB;
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    Context context;  // segments of 1 GiB
    const Storage s = Storage::allocate(context, Memory::shared, kMiB);
    EXPECT_EQ(s.memory(), Memory::shared);
    EXPECT_LE(arena_of(context).segment_bytes(0), 256 * kMiB);
    EXPECT_GE(arena_of(context).segment_bytes(0), 64 * kMiB);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

// Else a small allocation would leave the program nothing.
TEST(ArenaLimits, SegmentsTakeASmallPartOfALimitOfAddresses) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space that this test takes away";
#endif
  const auto result = test::run_in_child([] {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 1280 * kMiB;
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    Context context;  // segments of 1 GiB, which this limit would just permit
    std::vector<Storage> kept;
    for (int i = 0; i < 8; ++i) kept.push_back(Storage::allocate(context, Memory::shared, 16 * kMiB));
    EXPECT_LE(arena_of(context).segment_bytes(0), 160 * kMiB);
    EXPECT_GE(arena_of(context).segment_bytes(0), 64 * kMiB);
    EXPECT_EQ(kept.front().memory(), Memory::shared);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

TEST(ArenaLimits, WithoutRoomLocalMemoryIsGivenAndOneLineSaysSo) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space that this test takes away";
#endif
  const auto result = test::run_in_child([] {
    std::vector<std::string> lines;
    Context context({.log_level = LogLevel::info,
                     .log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); }});
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 4096;  // less than is mapped: nothing more can be
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    EXPECT_FALSE(arena_of(context).ensure_segment());
    const Storage s = Storage::allocate(context, Memory::shared, 8192);
    EXPECT_EQ(s.memory(), Memory::local);
    std::memset(s.data(), 1, 8192);
    EXPECT_EQ(arena_of(context).allocate(8192), nullptr);
    try {
      Storage::allocate(context, Memory::local, 64 * kMiB);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::system);
      EXPECT_EQ(std::string(e.what()),
                "storage: 67108864 bytes of local memory cannot be allocated: Cannot allocate memory (ulimit "
                "-v is 4)");
    }
    EXPECT_EQ(lines.size(), 1u);
    EXPECT_EQ(lines.at(0),
              "[host] shared memory of 4096 bytes cannot be allocated (Cannot allocate memory (ulimit -v is "
              "4)); local "
              "memory is used instead, and collectives on it copy");
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

// The kernel would promise them, and look for a process to end when they are touched.
TEST(ArenaLimits, MoreThanTheMachineHasIsRefused) {
  constexpr std::size_t kTib = std::size_t{1} << 40;
  std::vector<std::string> lines;
  Context context({.log_level = LogLevel::info,
                   .log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); }});
  EXPECT_EQ(arena_of(context).allocate(64 * kTib), nullptr);  // 64 TiB, half of the address space
  EXPECT_THAT(lines, testing::ElementsAre(testing::HasSubstr("cannot be allocated (Cannot allocate memory")));
  EXPECT_EQ(Storage::allocate(context, Memory::shared, kMiB).memory(), Memory::shared);
}

TEST(ArenaLimits, AFileSizeLimitDoesNotKill) {
  const auto result = test::run_in_child([] {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 16 * kMiB;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    Context context;
    const Storage s = Storage::allocate(context, Memory::shared, kMiB);
    EXPECT_EQ(s.memory(), Memory::shared);
    EXPECT_LE(arena_of(context).segment_bytes(0), 16 * kMiB);
    EXPECT_EQ(Storage::allocate(context, Memory::shared, 32 * kMiB).memory(), Memory::local);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

// If no memory can be made that others map (a file-size limit of 0 stands for a refused memfd_create),
// threads of one process continue as before.
TEST(ArenaLimits, WithoutMemfdThreadsGoOn) {
  const auto result = test::run_in_child([] {
    rlimit limit{};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    Context context;
    EXPECT_EQ(Storage::allocate(context, Memory::shared, 100).memory(), Memory::local);
    HostPeers& here = host_peers_of(context);
    const RegionRef region = here.offer("group", 4096);
    const Deadline soon = Deadline::after(std::chrono::seconds(5));
    EXPECT_EQ(here.open(*here.meet(here.self(), soon), "group", soon)->data, region->data);
    here.own_doorbell(0).ring();
    EXPECT_EQ(here.own_doorbell(0).read(), 1u);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

}  // namespace
}  // namespace weft::arena_test
