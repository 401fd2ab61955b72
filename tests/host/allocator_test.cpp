// Local memory from an allocator of the program: which memory comes from it, the effect of its failures, and
// that all memory is given back.
#include "weft/host/allocator.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "host/arena.hpp"
#include "support/counting_allocator.hpp"
#include "support/errors.hpp"
#include "support/processes.hpp"
#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft::allocator_test {
namespace {

using test::CountingAllocator;
using test::error_text;
using Fault = CountingAllocator::Fault;

constexpr std::size_t kMiB = std::size_t{1} << 20;

ContextOptions with(CountingAllocator& memory) {
  ContextOptions options;
  options.allocator = memory.functions();
  return options;
}

TEST(Allocator, GivesEachBlockOfLocalMemory) {
  CountingAllocator memory;
  Context context(with(memory));
  EXPECT_EQ(memory.asked(), 0) << "a Context needs none";
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{65}, std::size_t{5000}, 5 * kMiB + 3}) {
    const std::int64_t before = memory.asked();
    {
      const Storage s = Storage::allocate(context, Memory::local, bytes);
      ASSERT_NE(s.data(), nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(s.data()) % 64, 0u);
      EXPECT_EQ(s.bytes(), bytes);
      EXPECT_EQ(s.memory(), Memory::local);
      std::memset(s.data(), 1, bytes);
      EXPECT_EQ(memory.blocks(), 1u);
      EXPECT_EQ(memory.bytes(), bytes == 0 ? 64 : (bytes + 63) / 64 * 64);
    }
    EXPECT_EQ(memory.asked(), before + 1);
    EXPECT_EQ(memory.blocks(), 0u) << "nothing is kept for later";
  }
  {
    const Tensor t = Tensor::zeros(context, {1000});
    const Tensor same = t, part = t.slice_flat(10, {5}), copy = t.clone(context);
    EXPECT_EQ(memory.blocks(), 2u) << "one is shared, and one a copy";
  }
  DeviceRuntime& cpu = context.device({});
  void* const block = cpu.allocate(100, {});
  EXPECT_EQ(memory.bytes(), 128u);
  cpu.release(block, 100, {});
  EXPECT_EQ(memory.blocks(), 0u);
}

TEST(Allocator, IsNotAskedForSharedMemory) {
  CountingAllocator memory;
  Context context(with(memory));
  const Storage s = Storage::allocate(context, Memory::shared, 10000);
  ASSERT_EQ(s.memory(), Memory::shared);
  EXPECT_TRUE(arena_of(context).find(s.data(), 10000));
  EXPECT_EQ(memory.asked(), 0);
}

// Without shared memory, the allocator's local memory is used instead.
TEST(Allocator, GivesWhatTakesThePlaceOfSharedMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space that this test takes away";
#endif
  const auto result = test::run_in_child([] {
    CountingAllocator memory;
    Context context(with(memory));
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 4096;  // less than is mapped: no segment can be had
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    {
      const Storage s = Storage::allocate(context, Memory::shared, 8192);
      EXPECT_EQ(s.memory(), Memory::local);
      EXPECT_EQ(memory.bytes(), 8192u);
    }
    EXPECT_EQ(memory.blocks(), 0u);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

TEST(Allocator, ItsFailuresAreToldAndNothingIsLost) {
  CountingAllocator memory;
  Context context(with(memory));
  const auto text = [&](Fault fault, std::size_t bytes) {
    memory.fail_after(0, fault);
    const std::string words =
        error_text(ErrorCode::system, [&] { Storage::allocate(context, Memory::local, bytes); });
    EXPECT_EQ(memory.blocks(), 0u) << words;
    return words;
  };
  EXPECT_EQ(
      text(Fault::gives_none, 100),
      "storage: 100 bytes of local memory cannot be allocated: the host's allocator, asked for 128 bytes "
      "aligned to "
      "64, gave none");
  EXPECT_EQ(text(Fault::throws, 64),
            "storage: 64 bytes of local memory cannot be allocated: the host's allocator, asked for 64 bytes "
            "aligned to 64, "
            "threw: the pool is closed");
  EXPECT_EQ(text(Fault::throws_a_number, 64),
            "storage: 64 bytes of local memory cannot be allocated: the host's allocator, asked for 64 bytes "
            "aligned to 64, "
            "threw: an exception of type int");
  const std::string misaligned = text(Fault::misaligned, 64);
  const std::string head =
      "storage: 64 bytes of local memory cannot be allocated: the host's allocator, asked for 64 bytes "
      "aligned to "
      "64, gave "
      "0x";
  EXPECT_EQ(misaligned.substr(0, head.size()), head);
  EXPECT_EQ(misaligned.substr(misaligned.find(',', head.size())), ", which is not aligned in this way");
  // The device of the CPU says the same.
  memory.fail_after(0, Fault::gives_none);
  EXPECT_EQ(error_text(ErrorCode::system, [&] { context.device({}).allocate(0, {}); }),
            "storage: 0 bytes of local memory cannot be allocated: the host's allocator, asked for 64 bytes "
            "aligned to 64, "
            "gave none");
  memory.give_again();
  const std::int64_t before = memory.asked();
  EXPECT_EQ(
      error_text(ErrorCode::system, [&] { Storage::allocate(context, Memory::local, SIZE_MAX); }),
      "storage: 18446744073709551615 bytes of local memory cannot be allocated: Cannot allocate memory");
  EXPECT_EQ(memory.asked(), before) << "no allocator has so much";
  EXPECT_EQ(Storage::allocate(context, Memory::local, 8).bytes(), 8u) << "and the Context goes on";
  EXPECT_EQ(memory.blocks(), 0u);
}

TEST(Allocator, WhatItThrowsOnTheWayBackIsLogged) {
  CountingAllocator memory;
  std::vector<std::string> lines;
  ContextOptions options = with(memory);
  options.log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); };
  {
    Context context(options);
    memory.throw_on_return();
    { const Tensor t(context, {10}); }
    EXPECT_EQ(memory.blocks(), 0u);
  }
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "[host] local memory: the host's allocator, given 64 bytes back, threw: the pool is full");
}

TEST(Allocator, HasBothFunctionsOrNone) {
  CountingAllocator memory;
  ContextOptions options = with(memory);
  options.allocator.deallocate = nullptr;
  EXPECT_EQ(
      error_text([&] { Context{options}; }),
      "bad_argument: context: allocator.deallocate is null; expected a function, since allocator.allocate is "
      "one");
  options = with(memory);
  options.allocator.allocate = nullptr;
  EXPECT_EQ(
      error_text([&] { Context{options}; }),
      "bad_argument: context: allocator.allocate is null; expected a function, since allocator.deallocate is "
      "one");
}

TEST(Allocator, IsAskedBySeveralThreadsAtOnce) {
  CountingAllocator memory;
  {
    Context context(with(memory));
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&context, t] {
        std::vector<Tensor> kept;
        for (int i = 0; i < 200; ++i) {
          kept.emplace_back(context, Shape{(t + 1) * 100 + i});
          kept.back().f32()[0] = static_cast<float>(i);
          if (kept.size() > 5) kept.erase(kept.begin());
        }
      });
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(memory.asked(), 800);
    EXPECT_EQ(memory.blocks(), 0u);
  }
}

// A forked child's copies are the parent's memory.
TEST(Allocator, IsNotCalledInAForkedChild) {
  CountingAllocator memory;
  auto context = std::make_unique<Context>(with(memory));
  auto tensor = std::make_unique<Tensor>(*context, Shape{10});
  const auto result = test::run_in_child([&] {
    tensor.reset();
    EXPECT_EQ(memory.blocks(), 1u);
    context.reset();
    EXPECT_EQ(memory.blocks(), 1u);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
  tensor.reset();
  EXPECT_EQ(memory.blocks(), 0u);
}

TEST(Allocator, SegmentsHaveTheSizeThatIsAskedFor) {
  ContextOptions options;
  options.segment_bytes = kMiB + 1;
  Context context(options);
  const Storage s = Storage::allocate(context, Memory::shared, 100);
  ASSERT_EQ(s.memory(), Memory::shared);
  EXPECT_EQ(arena_of(context).segment_bytes(0), kMiB + 4096) << "whole pages";
  options.segment_bytes = (std::size_t{1} << 62) + 1;
  EXPECT_EQ(error_text([&] { Context{options}; }),
            "bad_argument: context: segment_bytes is 4611686018427387905; expected at most 2^62 = "
            "4611686018427387904");
}

}  // namespace
}  // namespace weft::allocator_test
