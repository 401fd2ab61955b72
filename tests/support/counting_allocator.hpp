// An Allocator for tests: the C library's memory, counted and checked as it comes back, which fails on
// request. Any thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "weft/host/allocator.hpp"

namespace weft::test {

class CountingAllocator {
 public:
  /// How a request fails.
  enum class Fault { gives_none, throws, throws_a_number, misaligned };

  CountingAllocator() = default;
  ~CountingAllocator() {
    for (const auto& [at, block] : blocks_) std::free(block.memory);  // a failed test's
  }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  Allocator functions() { return {&allocate, &deallocate, this}; }

  /// `more` requests are granted, and all after these fail.
  void fail_after(std::int64_t more, Fault fault) {
    const std::lock_guard lock(mutex_);
    granted_ = more;
    fault_ = fault;
  }
  void give_again() { fail_after(std::numeric_limits<std::int64_t>::max(), Fault::gives_none); }
  /// Takes each block that is given back, and then throws.
  void throw_on_return() {
    const std::lock_guard lock(mutex_);
    throws_on_return_ = true;
  }

  /// Blocks that are not given back, and their bytes.
  std::size_t blocks() const {
    const std::lock_guard lock(mutex_);
    return blocks_.size();
  }
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [at, block] : blocks_) sum += block.bytes;
    return sum;
  }
  /// The largest number of such bytes since it was asked for last.
  std::size_t take_peak() {
    const std::lock_guard lock(mutex_);
    return std::exchange(peak_, held_);
  }
  /// All requests so far.
  std::int64_t asked() const {
    const std::lock_guard lock(mutex_);
    return asked_;
  }

 private:
  struct Block {
    void* memory;
    std::size_t bytes, alignment;
  };

  static void* allocate(void* self, std::size_t bytes, std::size_t alignment) {
    return static_cast<CountingAllocator*>(self)->give(bytes, alignment);
  }
  static void deallocate(void* self, void* memory, std::size_t bytes, std::size_t alignment) {
    static_cast<CountingAllocator*>(self)->take(memory, bytes, alignment);
  }
  void* give(std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock(mutex_);
    ++asked_;
    EXPECT_GT(bytes, 0u);
    EXPECT_EQ(alignment, 64u);
    EXPECT_EQ(bytes % alignment, 0u);
    std::size_t shift = 0;
    if (granted_-- <= 0) {
      switch (fault_) {
        case Fault::gives_none: return nullptr;
        case Fault::throws: throw std::runtime_error("the pool is closed");
        case Fault::throws_a_number: throw 7;
        case Fault::misaligned: shift = 8; break;
      }
    }
    void* const memory = std::aligned_alloc(alignment, bytes + alignment);
    if (memory == nullptr) return nullptr;
    void* const at = static_cast<char*>(memory) + shift;
    blocks_[at] = {memory, bytes, alignment};
    held_ += bytes;
    peak_ = std::max(peak_, held_);
    return at;
  }
  void take(void* at, std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(at);
    ASSERT_NE(found, blocks_.end()) << "not given, or given back already";
    EXPECT_EQ(found->second.bytes, bytes);
    EXPECT_EQ(found->second.alignment, alignment);
    std::free(found->second.memory);
    held_ -= found->second.bytes;
    blocks_.erase(found);
    if (throws_on_return_) throw std::runtime_error("the pool is full");
  }

  mutable std::mutex mutex_;
  std::map<void*, Block> blocks_;  // by the address that was given
  std::size_t held_ = 0, peak_ = 0;
  std::int64_t asked_ = 0, granted_ = std::numeric_limits<std::int64_t>::max();
  Fault fault_ = Fault::gives_none;
  bool throws_on_return_ = false;
};

}  // namespace weft::test
