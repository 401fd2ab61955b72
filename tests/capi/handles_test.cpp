// The table of live handles: many handles are added and removed, also by several threads at once.
#include "capi/handle/handle.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "weft/weft.h"

namespace weft::capi::handles_test {
namespace {

struct Apple : Handle<Apple> {
  static constexpr const char* kKind = "apple";
};
struct Pear : Handle<Pear> {
  static constexpr const char* kKind = "pear";
};

TEST(Handles, AreAliveUntilTheyAreDestroyed) {
  auto apple = std::make_unique<Apple>();
  const Apple* const address = apple.get();
  EXPECT_TRUE(is_alive(address));
  EXPECT_TRUE(is_alive(address, "apple"));
  EXPECT_FALSE(is_alive(address, "pear"));
  const Apple copy = *apple;
  EXPECT_TRUE(is_alive(&copy, "apple"));
  apple.reset();
  EXPECT_FALSE(is_alive(address));
  EXPECT_TRUE(is_alive(&copy));
  EXPECT_FALSE(is_alive(static_cast<const void*>(nullptr)));
}

TEST(Handles, AreRefusedByName) {
  const Apple apple;
  expect_alive("weft_eat", &apple, "fruit", Apple::kKind);
  test::expect_error(ErrorCode::bad_argument, "weft_eat: fruit is a apple; expected a pear",
                     [&] { expect_alive("weft_eat", &apple, "fruit", Pear::kKind); });
  alignas(Apple) const std::byte nothing[sizeof(Apple)] = {};
  test::expect_error(
      ErrorCode::bad_argument,
      "weft_eat: fruit is no live apple: it is destroyed, or another libweft made it",
      [&] { expect_alive("weft_eat", reinterpret_cast<const HandleBase*>(nothing), "fruit", Apple::kKind); });
}

TEST(Handles, ThatAreLentAreLeftAlone) {
  Apple apple;
  apple.lend();
  testing::internal::CaptureStderr();
  EXPECT_FALSE(retire("weft_eat", &apple, "fruit", Apple::kKind));
  EXPECT_NE(testing::internal::GetCapturedStderr().find("weft_eat: fruit is borrowed: its owner destroys it"),
            std::string::npos);
  EXPECT_TRUE(is_alive(&apple, Apple::kKind));
}

// More handles than the first array holds, and most of the second one: each is found, even after its
// neighbours are removed.
TEST(Handles, MayBeMany) {
  constexpr std::size_t kMany = 30000;
  std::vector<std::unique_ptr<Apple>> apples(kMany);
  for (auto& a : apples) a = std::make_unique<Apple>();
  for (const auto& a : apples) ASSERT_TRUE(is_alive(a.get(), Apple::kKind));
  std::vector<const Apple*> eaten;
  for (std::size_t i = 0; i < kMany; ++i) {
    if (i % 3 == 0) continue;
    eaten.push_back(apples[i].get());
    apples[i].reset();
  }
  for (const Apple* a : eaten) ASSERT_FALSE(is_alive(a));
  for (std::size_t i = 0; i < kMany; i += 3) ASSERT_TRUE(is_alive(apples[i].get(), Apple::kKind));
}

// Threads make and destroy their own handles while they query one that they share. The table grows meanwhile.
TEST(Handles, OfSeveralThreads) {
  constexpr int kThreads = 4, kRounds = 20, kEach = 3000;
  const Pear shared;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        std::vector<std::unique_ptr<Apple>> apples;
        for (int i = 0; i < kEach; ++i) {
          apples.push_back(std::make_unique<Apple>());
          ASSERT_TRUE(is_alive(apples.back().get(), Apple::kKind));
          ASSERT_TRUE(is_alive(&shared, Pear::kKind));
        }
        for (const auto& a : apples) ASSERT_TRUE(is_alive(a.get()));
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_TRUE(is_alive(&shared));
}

// If two threads destroy one handle, one does it. The other reads none of its memory.
TEST(Handles, AreDestroyedByOneOfTwoThreads) {
  constexpr int kApples = 100;
  std::vector<Apple*> apples;
  for (int i = 0; i < kApples; ++i) apples.push_back(new Apple);
  std::atomic<int> destroyed{0};
  const auto destroy_all = [&] {
    for (Apple* const apple : apples) {
      if (!retire("weft_eat", apple, "fruit", Apple::kKind)) continue;
      ++destroyed;
      delete apple;
    }
  };
  testing::internal::CaptureStderr();
  std::thread other(destroy_all);
  destroy_all();
  other.join();
  testing::internal::GetCapturedStderr();  // a line for each that was destroyed already
  EXPECT_EQ(destroyed, kApples);
}

TEST(Handles, AreRetiredOnce) {
  Apple apple;
  EXPECT_TRUE(retire("weft_eat", &apple, "fruit", Apple::kKind));
  EXPECT_FALSE(is_alive(&apple));
  testing::internal::CaptureStderr();
  EXPECT_FALSE(retire("weft_eat", &apple, "fruit", Apple::kKind));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "weft error: weft_eat: fruit is no live apple: it is destroyed, or another libweft made it; "
            "nothing is destroyed\n");
}

TEST(Handles, AskedForATextGiveNoneWhereThereIsNone) {
  weft_store* store = nullptr;
  ASSERT_EQ(weft_store_create_local(&store, nullptr), WEFT_OK);
  EXPECT_STREQ(weft_text_data(reinterpret_cast<weft_text*>(store)), "");
  EXPECT_EQ(weft_text_size(reinterpret_cast<weft_text*>(store)), 0u);
  weft_store_destroy(store);
}

// weft_error e = {0};
TEST(Errors, WithoutTheirInitialiserAreRefusedAudibly) {
  weft_error error = {};
  weft_context* context = nullptr;
  testing::internal::CaptureStderr();
  EXPECT_EQ(weft_context_create(nullptr, &context, &error), WEFT_BAD_ARGUMENT);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "weft error: weft_context_create: error->struct_size is 0; expected 1120: initialise it with "
            "WEFT_ERROR_INIT. Nothing is done, here and in later calls with such an error\n");
  EXPECT_EQ(context, nullptr);
  EXPECT_EQ(error.code, WEFT_BAD_ARGUMENT);
  error.code = WEFT_OK;
  error.struct_size = 0x5a5a5a5a;  // memory that nobody has initialised
  testing::internal::CaptureStderr();
  EXPECT_EQ(weft_context_create(nullptr, &context, &error), WEFT_BAD_ARGUMENT);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");  // once in a process
  EXPECT_EQ(error.code, WEFT_BAD_ARGUMENT);
  EXPECT_STREQ(error.text, "");
  error = WEFT_ERROR_INIT;
  EXPECT_EQ(weft_context_create(nullptr, &context, &error), WEFT_OK);
  weft_context_destroy(context);
}

}  // namespace
}  // namespace weft::capi::handles_test
