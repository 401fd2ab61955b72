// Every kind of store against one suite.
#include "weft/backends/store.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "weft/base/error.hpp"

namespace weft {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

Deadline soon() { return Deadline::after(seconds(10)); }

template <class F>
void expect_error(ErrorCode code, const std::string& text, F&& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected: " << text;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    EXPECT_THAT(e.what(), HasSubstr(text));
  }
}

/// Where a test gets its stores from: `client` is one rank's view of the one table. Clients may be shared by
/// threads.
struct Source {
  virtual ~Source() = default;
  virtual std::shared_ptr<Store> client() = 0;
};

struct LocalSource final : Source {
  std::shared_ptr<Store> store = make_local_store();
  std::shared_ptr<Store> client() override { return store; }
};

struct Kind {
  const char* name;
  std::function<std::unique_ptr<Source>()> make;
};

class StoreTest : public ::testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Source> source_ = GetParam().make();
  std::shared_ptr<Store> store_ = source_->client();
};

TEST_P(StoreTest, GivesBackWhatWasSet) {
  const std::string bytes("a\0b\xff\n", 5);
  store_->set("key", bytes);
  store_->set("empty", "");
  EXPECT_EQ(store_->get("key", soon()), bytes);
  EXPECT_EQ(store_->get("empty", soon()), "");
  store_->set("key", "again");
  EXPECT_EQ(source_->client()->get("key", soon()), "again");
}

TEST_P(StoreTest, TryGetDoesNotWait) {
  EXPECT_FALSE(store_->try_get("absent").has_value());
  store_->set("present", "");
  EXPECT_EQ(store_->try_get("present"), "");
}

TEST_P(StoreTest, GetWaitsForASetFromElsewhere) {
  std::thread other([client = source_->client()] {
    std::this_thread::sleep_for(milliseconds(50));
    client->set("late", "value");
  });
  EXPECT_EQ(store_->get("late", soon()), "value");
  other.join();
}

TEST_P(StoreTest, AddAndCompareSetWakeWaiters) {
  std::thread other([client = source_->client()] {
    std::this_thread::sleep_for(milliseconds(30));
    client->add("counter", 7);
    client->compare_set("word", "", "new");
  });
  EXPECT_EQ(store_->get("counter", soon()), "7");
  EXPECT_EQ(store_->get("word", soon()), "new");
  other.join();
}

TEST_P(StoreTest, GetNamesTheKeyAndTheTimeAtItsDeadline) {
  const auto start = Clock::now();
  expect_error(ErrorCode::timeout, "store: key \"never\\x\" was not set within 200 ms",
               [&] { store_->get("never\\x", Deadline::after(milliseconds(200))); });
  const auto took = Clock::now() - start;
  EXPECT_GE(took, milliseconds(200));
  EXPECT_LT(took, seconds(5));
  expect_error(ErrorCode::timeout, "store: key \"never\" was not set within 1.1 s",
               [&] { store_->get("never", Deadline::after(milliseconds(1100))); });
  expect_error(ErrorCode::timeout, "was not set within 0 ms",
               [&] { store_->get("never", Deadline::at(Clock::now())); });
}

TEST_P(StoreTest, CountersAddUp) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(store_->get("n", soon()), "-2");
  store_->set("n", std::to_string(std::numeric_limits<std::int64_t>::max()));
  expect_error(ErrorCode::bad_argument,
               "store: add: key \"n\" holds 9223372036854775807; adding 1 leaves 64 bits",
               [&] { store_->add("n", 1); });
  store_->set("n", "12x");
  expect_error(ErrorCode::bad_argument, "store: add: key \"n\" holds \"12x\"; expected a decimal counter",
               [&] { store_->add("n", 1); });
  EXPECT_EQ(store_->get("n", soon()), "12x");
}

TEST_P(StoreTest, CompareSetChangesOnlyWhatItExpects) {
  EXPECT_EQ(store_->compare_set("k", "other", "a"), "");
  EXPECT_FALSE(store_->try_get("k").has_value());
  EXPECT_EQ(store_->compare_set("k", "", "a"), "a");
  EXPECT_EQ(store_->compare_set("k", "", "b"), "a");
  EXPECT_EQ(store_->compare_set("k", "a", "b"), "b");
  EXPECT_EQ(store_->get("k", soon()), "b");
}

TEST_P(StoreTest, RemovedKeysAreAbsent) {
  store_->set("k", "v");
  store_->remove("k");
  store_->remove("k");
  EXPECT_FALSE(store_->try_get("k").has_value());
  EXPECT_EQ(store_->add("k", 1), 1);
}

TEST_P(StoreTest, RefusesKeysAndValuesBeyondTheLimits) {
  const std::string key(1024, 'k');
  const std::string value(std::size_t{1} << 20, 'v');
  store_->set(key, value);
  EXPECT_EQ(store_->get(key, soon()), value);
  EXPECT_EQ(store_->compare_set(key, value, value), value);

  expect_error(ErrorCode::bad_argument, "store: key \"\" has 0 bytes; expected 1 to 1024",
               [&] { store_->set("", "v"); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->get(key + "k", soon()); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->try_get(key + "k"); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->add(key + "k", 1); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->remove(key + "k"); });
  expect_error(ErrorCode::bad_argument,
               "store: the value for key \"x\" has 1048577 bytes; expected at most 1048576",
               [&] { store_->set("x", value + "v"); });
  expect_error(ErrorCode::bad_argument,
               "store: the value for key \"x\" has 1048577 bytes; expected at most 1048576",
               [&] { store_->compare_set("x", "", value + "v"); });
  EXPECT_FALSE(store_->try_get("x").has_value());
}

// Eight threads, half of them on one shared client: a counter loses nothing, and each finds what its
// neighbour set.
TEST_P(StoreTest, ManyThreadsAtOnce) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 50;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      const auto client = rank % 2 == 0 ? store_ : source_->client();
      for (int round = 0; round < kRounds; ++round) {
        const auto key = [&](int r) { return std::to_string(round) + "/" + std::to_string(r); };
        client->set(key(rank), std::to_string(round * kThreads + rank));
        const int next = (rank + 1) % kThreads;
        EXPECT_EQ(client->get(key(next), soon()), std::to_string(round * kThreads + next));
        client->add("total", rank);
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(store_->get("total", soon()), std::to_string(kRounds * kThreads * (kThreads - 1) / 2));
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest,
                         ::testing::Values(Kind{"local", [] { return std::make_unique<LocalSource>(); }}),
                         [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace weft
