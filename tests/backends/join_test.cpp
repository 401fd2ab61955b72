// How the ranks of a group exchange their infos through the store, and their errors if a rank, or the store,
// does not answer.
#include "weft/backends/join.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/build.hpp"
#include "store/forwarding_store.hpp"
#include "support/errors.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/host/context.hpp"

namespace weft::test::join_test {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::MatchesRegex;

class Join : public testing::Test {
 protected:
  GroupInit at(int rank, int size = 3, Duration limit = std::chrono::seconds(20)) {
    return {.context = context_,
            .store = store_,
            .token = "token",
            .name = "g",
            .rank = rank,
            .size = size,
            .deadline = Deadline::after(limit)};
  }
  Context context_;
  // A store like one whose process is stopped, from now on or from the first try_get() on.
  std::atomic<bool> silent_{false}, silent_when_asked_{false};
  std::atomic<int> requests_{0};
  const std::shared_ptr<Store> store_ = std::make_shared<ObservedStore>(
      make_local_store(), [this](StoreRequest request, std::string_view, Deadline) {
        ++requests_;
        if (silent_when_asked_ && request == StoreRequest::try_get) silent_ = true;
        if (silent_) throw Error(ErrorCode::timeout, "store: the server does not answer");
      });
};

TEST_F(Join, GivesTheInfoOfAllAndLeavesNothing) {
  std::vector<std::string> infos[3];
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 3; ++r)
      ranks.emplace_back([&, r] { infos[r] = join(at(r), "info", "of " + std::to_string(r), 0); });
  }
  for (const auto& seen : infos) EXPECT_THAT(seen, ElementsAre("of 0", "of 1", "of 2"));
  for (int r = 0; r < 3; ++r) withdraw(at(r), "info");
  for (int r = 0; r < 3; ++r)
    EXPECT_FALSE(store_->try_get("token/info/" + std::to_string(r), Deadline::never()));
}

TEST_F(Join, AsksTheStoreAFewTimesPerRank) {
  constexpr int kRanks = 64;
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < kRanks; ++r)
      ranks.emplace_back(
          [&, r] { EXPECT_EQ(join(at(r, kRanks), "info", std::string(1, '\0'), 0).size(), kRanks); });
  }
  EXPECT_LE(requests_,
            8 * kRanks);  // and some more where this machine is busy: looks for a first cause
}

TEST_F(Join, AnyByteMayBeInAnInfo) {
  const std::string odd("7:\0 12:\n", 9);
  std::vector<std::string> infos[2];
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 2; ++r)
      ranks.emplace_back([&, r] { infos[r] = join(at(r, 2), "info", r == 0 ? odd : "", 0); });
  }
  for (const auto& seen : infos) EXPECT_THAT(seen, ElementsAre(odd, ""));
}

// Together they are longer than a value of the store may be. One size makes the last part empty.
TEST_F(Join, InfosMayBeLongTogether) {
  constexpr std::size_t kLong = (std::size_t{1} << 20) - 256;
  for (const std::size_t bytes : {kLong, (std::size_t{1} << 19) / 4}) {
    std::vector<std::string> infos[4];
    {
      std::vector<std::jthread> ranks;
      for (int r = 0; r < 4; ++r)
        ranks.emplace_back([&, r] {
          GroupInit b = at(r, 4);
          // "size:build size place info": with this info, the text of rank r has as many bytes as is said.
          const std::string head = fmt::format("{}:{} 4 1 ", bytes, build_word(0, r));
          infos[r] = join(b, "long", std::string(bytes - head.size(), static_cast<char>('a' + r)), 0);
        });
    }
    for (const auto& seen : infos) {
      ASSERT_EQ(seen.size(), 4u);
      for (int r = 0; r < 4; ++r) {
        EXPECT_GE(seen[r].size(), bytes - 256);
        EXPECT_EQ(seen[r].find_first_not_of(static_cast<char>('a' + r)), std::string::npos);
      }
    }
    for (int r = 3; r >= 0; --r) withdraw(at(r, 4), "long");
    for (const char* key : {"count", "all", "all/1", "all/2", "all/7", "all/8"})
      EXPECT_FALSE(store_->try_get("token/long/" + std::string(key), Deadline::never())) << key;
  }
}

TEST_F(Join, WhatTheStoreHoldsIsChecked) {
  for (const char* text :
       {"", "2:ab", "1:a1:b", "1:a1:b1:c1:d", "1:a1:b9:c", "1:a1:b1c", "x", "99999999999999999999:a"}) {
    store_->set("token/info/all", text, Deadline::never());
    store_->remove("token/info/count", Deadline::never());
    const Error e = error_of([&] { join(at(1), "info", {}, 0); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(e.what(), "group \"g\": the store does not hold the texts of 3 ranks [rank 1]");
  }
}

// The rank that comes last puts the infos together. In this test it stopped before it did so.
TEST_F(Join, WhoStopsBeforeItHasPutTheInfosTogetherIsNamed) {
  store_->set("token/info/0", build_word(0, 0) + " 3 1 x", Deadline::never());
  store_->set("token/info/2", build_word(0, 2) + " 3 3 x", Deadline::never());
  store_->add("token/info/count", (std::int64_t{3} << 24) + 1, Deadline::never());
  const Error e = error_of([&] { join(at(1, 3, milliseconds(50)), "info", "x", 0); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), MatchesRegex("group \"g\": rank 2 did not join within [0-9.]+ s \\[rank 1\\]"));
}

// The texts of the others show which rank came last.
TEST_F(Join, ANumberThatIsNoneIsNamed) {
  for (const char* number : {"", "0", "-1", "1x", "99999999999"}) {
    store_->set("token/info/0", fmt::format("{} 3 {} x", build_word(0, 0), number), Deadline::never());
    store_->set("token/info/2", build_word(0, 2) + " 3 3 x", Deadline::never());
    store_->set("token/info/count", std::to_string((std::int64_t{3} << 24) + 1), Deadline::never());
    expect_error(ErrorCode::mismatch,
                 fmt::format("group \"g\": rank 0 reports arrival number \"{}\"; expected 1 or more "
                             "[rank 1]",
                             number),
                 [&] { join(at(1, 3, milliseconds(20)), "info", "x", 0); });
  }
}

// Rank 0 was counted, and stopped before its info was there.
TEST_F(Join, WhoStopsBeforeItsInfoIsThereIsNamed) {
  store_->add("token/info/count", (std::int64_t{2} << 24) + 1, Deadline::never());
  const Error e = error_of([&] { join(at(1, 2, milliseconds(50)), "info", "x", 0); });
  EXPECT_THAT(e.what(), MatchesRegex("group \"g\": rank 0 did not join within [0-9.]+ s \\[rank 1\\]"));
}

// Rank 2 gives up before it joins; no rank waits until the deadline or names another rank.
TEST_F(Join, TheReasonOfWhoGaveUpIsTold) {
  const auto began = Clock::now();
  std::vector<Error> errors(2, Error(ErrorCode::system, "none"));
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 2; ++r)
      ranks.emplace_back(
          [&, r] { errors[r] = give_up(at(r), error_of([&] { join(at(r), "info", {}, 0); })); });
    const Error own(ErrorCode::system, "group \"g\": no pidfd: Too many open files [rank 2]");
    EXPECT_STREQ(give_up(at(2), own).what(), own.what());
  }
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(errors[r].code(), ErrorCode::system);
    EXPECT_EQ(errors[r].what(), "group \"g\": rank 2 cannot make it: no pidfd: Too many open files [rank " +
                                    std::to_string(r) + "]");
    EXPECT_THAT(std::vector<int>(errors[r].ranks().begin(), errors[r].ranks().end()), ElementsAre(2));
  }
}

// A cascade. Rank 0 noticed that rank 2 died, and left. Rank 1 finds that rank 0 has left, or that no rank
// arrives by its deadline.
TEST_F(Join, WhoOnlyGaveUpIsNotBlamed) {
  const auto lost = [](int self, int other) {
    return Error(Failure{
        .code = ErrorCode::peer_lost,
        .text = "group \"g\": rank " + std::to_string(other) + " died [rank " + std::to_string(self) + "]",
        .ranks = {other}});
  };
  EXPECT_STREQ(give_up(at(0), lost(0, 2)).what(), "group \"g\": rank 2 died [rank 0]");
  const Error cascaded = give_up(at(1), lost(1, 0));
  EXPECT_EQ(cascaded.code(), ErrorCode::peer_lost);
  EXPECT_STREQ(cascaded.what(), "group \"g\": rank 2 died [rank 1]");
  EXPECT_THAT(std::vector<int>(cascaded.ranks().begin(), cascaded.ranks().end()), ElementsAre(2));
  // A rank reports its own reason, whichever reason came first.
  const Error own(ErrorCode::bad_argument, "WEFT_SINGLE_COPY is \"x\"");
  EXPECT_STREQ(give_up(at(1), own).what(), own.what());
}

// Otherwise the texts of the first join would be mistaken for those of the second.
TEST_F(Join, ANameIsUsedOnce) {
  const auto all = [&](const std::string& info) {
    std::vector<std::string> said(2);
    {
      std::vector<std::jthread> ranks;
      for (int r = 0; r < 2; ++r)
        ranks.emplace_back([&, r] { said[r] = error_text([&] { join(at(r, 2), "info", info, 0); }); });
    }
    return said;
  };
  EXPECT_THAT(all("first"), ElementsAre("no error", "no error"));
  const std::string text =
      "bad_argument: group \"g\": the ranks have joined as \"info\" already; expected another name, or "
      "withdraw() "
      "first [rank ";
  EXPECT_THAT(all("second"), ElementsAre(text + "0]", text + "1]"));
  for (int r = 1; r >= 0; --r) withdraw(at(r, 2), "info");
  EXPECT_THAT(all("third"), ElementsAre("no error", "no error"));
}

TEST_F(Join, OneRankNeedsNoStore) {
  GroupInit b = at(0, 1);
  b.store = nullptr;
  announce(b, "info", "x", 0);
  EXPECT_THAT(join(b, "info", "x", 0), ElementsAre("x"));
  withdraw(b, "info");
  expect_error(ErrorCode::bad_argument, "group \"g\": there is no store in which to wait for key \"k\"",
               [&] { await(b, "k"); });
}

// No text gives a code or an op that this build does not have.
TEST_F(Join, AFirstCauseOfUnknownNumbersIsRead) {
  for (const char* head : {"99 200 5 1 2", "0 200 5 1 2", "-1 -1 5 1 2"}) {
    const Failure why = decode_failure(std::string(head) + "\nwords");
    EXPECT_EQ(why.code, ErrorCode::system);
    EXPECT_EQ(why.op, Op::none);
    EXPECT_EQ(why.text, "words");
    EXPECT_THAT(why.ranks, ElementsAre(2));
  }
}

TEST_F(Join, AFirstCauseOfEachCodeArrives) {
  for (int number = 1; number <= kErrorCodeCount; ++number) {
    const auto code = static_cast<ErrorCode>(number);
    EXPECT_NE(name(code), "?");
    EXPECT_EQ(decode_failure(encode({.code = code, .text = "words", .ranks = {}})).code, code);
  }
}

TEST_F(Join, NamesAllThatAreAbsent) {
  const Error e = error_of([&] { join(at(1, 3, milliseconds(50)), "info", {}, 0); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), MatchesRegex("group \"g\": ranks 0, 2 did not join within [0-9.]+ s \\[rank 1\\]"));
  EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(0, 2));
}

TEST_F(Join, AnotherSizeIsAMismatchAtOnce) {
  announce(at(0, 2), "info", {}, 0);
  const Error e = error_of([&] { join(at(1), "info", {}, 0); });
  EXPECT_EQ(e.code(), ErrorCode::mismatch);
  EXPECT_STREQ(e.what(), "group \"g\": rank 0 says size 2, rank 1 says 3");
}

// Then no rank can tell which rank is absent.
TEST_F(Join, ASilentStoreIsNotTakenForAnAbsentRank) {
  silent_when_asked_ = true;  // after the deadline has passed
  const Error late = error_of([&] { join(at(1, 3, milliseconds(50)), "info", {}, 0); });
  for (const Error& e : {late, error_of([&] { join(at(1), "info", {}, 0); })}) {
    EXPECT_EQ(e.code(), ErrorCode::timeout);
    EXPECT_STREQ(e.what(), "group \"g\": store: the server does not answer [rank 1]");
    EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), IsEmpty());
  }
  withdraw(at(1), "info");  // no error: what stays is small
}

}  // namespace
}  // namespace weft::test::join_test
