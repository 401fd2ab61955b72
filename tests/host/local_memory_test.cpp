#include "host/local_memory.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.hpp"

namespace weft::local_memory_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(LocalMemory, GivesAlignedMemoryOfAnySize) {
  LocalMemory memory;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{65}, kMiB - 1, kMiB, 5 * kMiB + 3}) {
    void* block = memory.allocate("test", bytes);
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % LocalMemory::kAlignment, 0u);
    std::memset(block, 1, bytes);
    memory.release(block, bytes);
  }
}

TEST(LocalMemory, KeepsLargeBlocksForTheirSize) {
  LocalMemory memory;
  void* a = memory.allocate("test", 4 * kMiB);
  void* b = memory.allocate("test", 4 * kMiB);
  EXPECT_NE(a, b);
  EXPECT_EQ(memory.counters().in_use_bytes, 8 * kMiB);
  memory.release(a, 4 * kMiB);
  EXPECT_EQ(memory.counters().cached_bytes, 4 * kMiB);
  EXPECT_EQ(memory.allocate("test", 4 * kMiB - 100), a);  // nearly the same size shares
  memory.release(a, 4 * kMiB - 100);
  EXPECT_NE(memory.allocate("test", 6 * kMiB), a);
  EXPECT_EQ(memory.allocate("test", 4 * kMiB), a);
  memory.release(b, 4 * kMiB);
}

TEST(LocalMemory, KeepsBlocksOfMoreThanFourKibibytes) {
  LocalMemory memory;
  for (const std::size_t bytes : {4 * std::size_t{1024} + 1, std::size_t{100000}, kMiB - 1, kMiB}) {
    void* const a = memory.allocate("test", bytes);
    ASSERT_NE(a, nullptr);
    memory.release(a, bytes);
    EXPECT_EQ(memory.allocate("test", bytes), a) << bytes;
    memory.release(a, bytes);
  }
  EXPECT_EQ(memory.counters().in_use_bytes, 0u);
  const std::size_t before = memory.counters().cached_bytes;
  memory.release(memory.allocate("test", 4096), 4096);
  EXPECT_EQ(memory.counters().cached_bytes, before) << "small ones are malloc's";
}

TEST(LocalMemory, CachesNoMoreThanWasEverInUse) {
  LocalMemory memory;
  for (std::size_t n = 1; n <= 30; ++n) {  // sizes that never come back
    void* block = memory.allocate("test", n * kMiB);
    memory.release(block, n * kMiB);
    const auto c = memory.counters();
    EXPECT_EQ(c.in_use_bytes, 0u);
    EXPECT_LE(c.cached_bytes, 32 * kMiB);
  }
}

TEST(LocalMemory, RefusesWhatTheSystemRefuses) {
  LocalMemory memory;
  for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX / 2, std::size_t{1} << 60})
    EXPECT_EQ(test::error_text(ErrorCode::system, [&] { memory.allocate("test", bytes); }),
              "test: " + std::to_string(bytes) +
                  " bytes of local memory cannot be allocated: Cannot allocate memory");
  EXPECT_EQ(memory.counters().in_use_bytes, 0u);
}

TEST(LocalMemory, ThreadsDoNotShareBlocks) {
  LocalMemory memory;
  std::vector<std::thread> threads;
  for (unsigned char t = 1; t <= 4; ++t)
    threads.emplace_back([&memory, t] {
      for (int i = 0; i < 200; ++i) {
        const std::size_t bytes = kMiB + static_cast<std::size_t>(i % 3) * kMiB;
        auto* block = static_cast<unsigned char*>(memory.allocate("test", bytes));
        block[0] = block[bytes - 1] = t;
        std::this_thread::yield();
        EXPECT_EQ(block[0], t);
        EXPECT_EQ(block[bytes - 1], t);
        memory.release(block, bytes);
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(memory.counters().in_use_bytes, 0u);
}

}  // namespace
}  // namespace weft::local_memory_test
