// Matching by (source, tag): the order, the limits, the cost.
#include "weft/backends/matching.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <string>

#include "support/errors.hpp"

namespace weft::test::matching_test {
namespace {

using testing::ElementsAre;

struct Receive {
  int got = -1;
};
struct Message {
  int number = -1;
};
using Matcher = MessageMatcher<Receive, Message>;

// The steps of a transport for an arriving message, and for a posted receive.
void come(Matcher& m, int source, int tag, int number) {
  if (Receive* const r = m.take_receive(source, tag)) {
    r->got = number;
  } else {
    m.keep(source, tag, 8).number = number;
  }
}
void call(Matcher& m, int source, int tag, Receive& r) {
  if (!m.take_message(source, tag, [&](const Message& message) { r.got = message.number; }))
    m.post(source, tag, r);
}

TEST(MessageMatcher, KeepsTheOrderOfEachSourceAndTag) {
  Matcher m(3, {});
  Receive r[8];
  call(m, 1, 5, r[0]);
  call(m, 1, 5, r[1]);
  call(m, 1, -5, r[2]);
  call(m, 2, 5, r[3]);
  EXPECT_TRUE(m.awaits(1));
  EXPECT_FALSE(m.awaits(0));
  come(m, 2, 5, 20);
  come(m, 1, -5, 12);
  come(m, 1, 5, 10);
  come(m, 1, 5, 11);
  EXPECT_THAT((std::vector{r[0].got, r[1].got, r[2].got, r[3].got}), ElementsAre(10, 11, 12, 20));
  EXPECT_FALSE(m.awaits(1));
  for (const int tag : {7, INT32_MIN, INT32_MAX, 0, 7}) come(m, 0, tag, 30 + static_cast<int>(m.messages()));
  EXPECT_EQ(m.messages(), 5);
  call(m, 0, 7, r[4]);
  call(m, 0, 7, r[5]);
  call(m, 0, INT32_MIN, r[6]);
  call(m, 1, 0, r[7]);  // of another source
  EXPECT_THAT((std::vector{r[4].got, r[5].got, r[6].got, r[7].got}), ElementsAre(30, 34, 31, -1));
  EXPECT_EQ(m.messages(), 2);
}

// A message goes to the first posted receive that it fits.
TEST(MessageMatcher, AReceiveFromAnySourceHasItsTurn) {
  Matcher m(3, {});
  Receive named, any, later, other_tag;
  call(m, 1, 5, named);
  EXPECT_FALSE(m.awaits_any());
  m.post(any_source, 5, any);
  call(m, 1, 5, later);
  m.post(any_source, 6, other_tag);
  EXPECT_TRUE(m.awaits_any());
  EXPECT_FALSE(m.awaits(2));
  come(m, 1, 5, 10);
  come(m, 1, 5, 11);
  come(m, 1, 5, 12);
  EXPECT_THAT((std::vector{named.got, any.got, later.got, other_tag.got}), ElementsAre(10, 11, 12, -1));
  EXPECT_FALSE(m.awaits(1));
  EXPECT_TRUE(m.awaits_any());
  come(m, 2, 6, 20);
  EXPECT_EQ(other_tag.got, 20);
  EXPECT_FALSE(m.awaits_any());
  Receive first, second;
  m.post(any_source, 5, first);
  call(m, 2, 5, second);
  come(m, 2, 5, 21);  // fits both
  EXPECT_EQ(first.got, 21);
  come(m, 0, 5, 1);  // fits none
  EXPECT_EQ(second.got, -1);
  EXPECT_EQ(m.messages(), 1);
}

// The oldest arrived message of that tag is next, over all sources.
TEST(MessageMatcher, FromAnySourceTheOldestIsNext) {
  Matcher m(4, {});
  EXPECT_EQ(m.source_of(any_source, 5), -1);
  EXPECT_EQ(m.source_of(2, 5), -1);
  EXPECT_EQ(m.message(2, 5), nullptr);
  come(m, 3, 6, 60);
  come(m, 2, 5, 20);
  come(m, 0, 5, 1);
  come(m, 2, 5, 21);
  come(m, 3, 5, 30);
  EXPECT_EQ(m.source_of(0, 5), 0);
  EXPECT_EQ(m.source_of(1, 5), -1);
  std::vector<int> got, sources;
  for (int source = m.source_of(any_source, 5); source >= 0; source = m.source_of(any_source, 5)) {
    sources.push_back(source);
    EXPECT_EQ(m.message(source, 5), m.message(source, 5));  // a look takes nothing
    const int number = m.message(source, 5)->number;
    Receive r;
    call(m, source, 5, r);
    EXPECT_EQ(r.got, number);
    got.push_back(r.got);
  }
  EXPECT_THAT(sources, ElementsAre(2, 0, 2, 3));
  EXPECT_THAT(got, ElementsAre(20, 1, 21, 30));
  EXPECT_EQ(m.source_of(any_source, 6), 3);
  EXPECT_EQ(m.messages(), 1);
}

OpState receive(Op op, int source) {
  OpState s{.op = op, .call = kNoCall, .peer = source, .scratch = {}};
  s.tag = 7;
  return s;
}

TEST(MessageMatcher, WhomAReceiveWaitsForAndWhatATimeOutSays) {
  const OpState any = receive(Op::recv, any_source), named = receive(Op::recv, 2),
                wait = receive(Op::wait_message, 2);
  EXPECT_THAT(awaited_sources(any, 1, 4), ElementsAre(0, 2, 3));
  EXPECT_THAT(awaited_sources(any, 0, 1), ElementsAre(0));
  EXPECT_THAT(awaited_sources(named, 1, 4), ElementsAre(2));
  const int all[] = {0, 2, 3}, two[] = {2};
  EXPECT_EQ(not_sent(any, all, 1, 4), "no rank has sent a message with tag 7");
  EXPECT_EQ(not_sent(any, two, 1, 4), "no rank has sent a message with tag 7; rank 2 could");
  EXPECT_EQ(not_sent(named, two, 1, 4), "rank 2 has not sent it (tag 7)");
  EXPECT_EQ(not_sent(wait, two, 1, 4), "rank 2 has sent no message with tag 7");
}

TEST(MessageMatcher, WhatATimeOutSaysOfMessagesWithOtherTags) {
  Matcher m(3, {});
  EXPECT_EQ(not_received(m.kept(any_source)), "");
  come(m, 1, 8, 0);
  come(m, 1, 8, 1);
  come(m, 2, 3, 2);
  come(m, 1, -5, 3);  // of a composed call
  EXPECT_EQ(not_received(m.kept(1)), "; messages that were not received: tag 8 from rank 1");
  EXPECT_EQ(not_received(m.kept(any_source)),
            "; messages that were not received: tag 8 from rank 1, tag 3 from rank 2");
  EXPECT_EQ(not_received(m.kept(0)), "");
  for (int tag = 10; tag < 15; ++tag) come(m, 2, tag, tag);
  EXPECT_EQ(
      not_received(m.kept(2)),
      "; messages that were not received: tag 3 from rank 2, tag 10 from rank 2, tag 11 from rank 2, tag "
      "12 from rank 2 and 2 more");
}

TEST(MessageMatcher, SaysWhenItHoldsTooMuch) {
  Matcher few(2, {.messages = 3, .bytes = 1000});
  EXPECT_TRUE(few.has_room(5000));  // a single one
  for (int k = 0; k < 3; ++k) {
    EXPECT_TRUE(few.has_room(8));
    come(few, 1, k, k);
  }
  EXPECT_FALSE(few.has_room(0));
  const Failure number = few.refusal(0, 1, -9, 16);
  EXPECT_EQ(number.code, ErrorCode::system);
  EXPECT_THAT(number.ranks, ElementsAre(0, 1));
  EXPECT_EQ(number.text,
            "rank 0 has no room for a message of 16 bytes with tag -9 from rank 1: it holds 3 messages of 24 "
            "bytes that it has not received yet, and WEFT_UNEXPECTED_MESSAGES is 3");
  Receive r;
  call(few, 1, 2, r);
  EXPECT_EQ(r.got, 2);
  EXPECT_TRUE(few.has_room(984));
  EXPECT_FALSE(few.has_room(985));
  EXPECT_EQ(few.refusal(0, 1, 4, 985).text,
            "rank 0 has no room for a message of 985 bytes with tag 4 from rank 1: it holds 2 messages of 16 "
            "bytes that it has not received yet, and WEFT_UNEXPECTED_BYTES is 1000");
}

TEST(MessageMatcher, LimitsComeFromTheEnvironment) {
  EXPECT_EQ(UnexpectedLimits::from_env().messages, 1 << 20);
  EXPECT_EQ(UnexpectedLimits::from_env().bytes, 1 << 30);
  ::setenv("WEFT_UNEXPECTED_MESSAGES", "17", 1);
  ::setenv("WEFT_UNEXPECTED_BYTES", "0", 1);
  EXPECT_STREQ(error_of([] { UnexpectedLimits::from_env(); }).what(),
               "WEFT_UNEXPECTED_BYTES is \"0\"; expected an integer from 1 to 281474976710656");
  ::unsetenv("WEFT_UNEXPECTED_BYTES");
  EXPECT_EQ(UnexpectedLimits::from_env().messages, 17);
  ::unsetenv("WEFT_UNEXPECTED_MESSAGES");
}

// Processor time of n messages of n tags that are received in the opposite order.
double seconds_of(int n) {
  const auto now = [] {
    timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  };
  const double began = now();
  Matcher m(1, {});
  for (int k = 0; k < n; ++k) come(m, 0, k, k);
  for (int k = n; k-- > 0;) {
    Receive r;
    call(m, 0, k, r);
    EXPECT_EQ(r.got, k);
  }
  return now() - began;
}

// Eight times as many messages take about eight times as long. With a search they would take sixty-four times
// as long.
TEST(MessageMatcher, CostsTheSamePerMessageHoweverManyThereAre) {
  seconds_of(1000);
  double few = 1, many = 1;
  for (int round = 0; round < 3; ++round) {
    few = std::min(few, seconds_of(12500));
    many = std::min(many, seconds_of(100000));
  }
  EXPECT_LT(many, 30 * few);
}

}  // namespace
}  // namespace weft::test::matching_test
