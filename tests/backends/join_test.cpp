// How the ranks of a group meet in the store, and what they say where one, or the store, does not answer.
#include "backends/join.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "weft/base/context.hpp"

namespace weft::test {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::MatchesRegex;

// A store that stops answering, as one does whose process is stopped.
class Mortal final : public Store {
 public:
  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    answer();
    store_->set(key, value, deadline);
  }
  std::string get(std::string_view key, Deadline deadline) override {
    answer();
    return store_->get(key, deadline);
  }
  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    if (silent_when_asked) silent = true;
    answer();
    return store_->try_get(key, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    return store_->add(key, delta, deadline);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return store_->compare_set(key, expected, desired, deadline);
  }
  void remove(std::string_view key, Deadline deadline) override {
    answer();
    store_->remove(key, deadline);
  }

  bool silent = false, silent_when_asked = false;

 private:
  void answer() const {
    if (silent) throw Error(ErrorCode::timeout, "store: the server does not answer");
  }
  std::shared_ptr<Store> store_ = make_local_store();
};

class Join : public testing::Test {
 protected:
  Bringup at(int rank, int size = 3, Duration limit = std::chrono::seconds(20)) {
    return {.context = context_,
            .store = store_,
            .token = "token",
            .name = "g",
            .rank = rank,
            .size = size,
            .deadline = Deadline::after(limit),
            .test = {}};
  }
  Context context_;
  std::shared_ptr<Mortal> store_ = std::make_shared<Mortal>();
};

TEST_F(Join, GivesTheCardsOfAllAndLeavesNothing) {
  std::vector<std::string> cards[3];
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 3; ++r)
      ranks.emplace_back([&, r] { cards[r] = join(at(r), "card", "of " + std::to_string(r), 0); });
  }
  for (const auto& seen : cards) EXPECT_THAT(seen, ElementsAre("of 0", "of 1", "of 2"));
  for (int r = 0; r < 3; ++r) withdraw(at(r), "card");
  for (int r = 0; r < 3; ++r)
    EXPECT_FALSE(store_->try_get("token/card/" + std::to_string(r), Deadline::never()));
}

TEST_F(Join, NamesAllThatAreAbsent) {
  const Error e = error_of([&] { join(at(1, 3, milliseconds(50)), "card", {}, 0); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), MatchesRegex("group \"g\": ranks 0, 2 did not join within [0-9.]+ s \\[rank 1\\]"));
  EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(0, 2));
}

TEST_F(Join, AnotherSizeIsAMismatchAtOnce) {
  announce(at(0, 2), "card", {}, 0);
  const Error e = error_of([&] { join(at(1), "card", {}, 0); });
  EXPECT_EQ(e.code(), ErrorCode::mismatch);
  EXPECT_STREQ(e.what(), "group \"g\": rank 0 says size 2, rank 1 says 3");
}

// Then nobody can say who is absent.
TEST_F(Join, ASilentStoreIsNotTakenForAnAbsentRank) {
  store_->silent_when_asked = true;  // after the deadline has passed
  const Error late = error_of([&] { join(at(1, 3, milliseconds(50)), "card", {}, 0); });
  for (const Error& e : {late, error_of([&] { join(at(1), "card", {}, 0); })}) {
    EXPECT_EQ(e.code(), ErrorCode::timeout);
    EXPECT_STREQ(e.what(), "group \"g\": store: the server does not answer [rank 1]");
    EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), IsEmpty());
  }
  withdraw(at(1), "card");  // no error: what stays is small
}

}  // namespace
}  // namespace weft::test
