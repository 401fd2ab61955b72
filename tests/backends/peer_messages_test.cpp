// The protocol of messages, over a medium that only records its calls.
#include "backends/messages/peer_messages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <string>

namespace weft::test::peer_messages_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Told {
  int to;
  Notice notice;
  std::uint32_t number;
  std::vector<std::byte> bytes;
};

class Written final : public MessageMedium {
 public:
  void notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) override {
    told.push_back({to, notice, number, {bytes.begin(), bytes.end()}});
  }
  void fetch(OpState& recv, int source, std::uint64_t number) override {
    fetched.emplace_back(&recv, source, number);
  }
  void done(OpState& s, const MessageInfo& found) override { ended[&s] = found; }
  void refuse(OpState& s, Failure why) override { refused[&s] = why.text; }
  bool over(const OpState& s) const override { return &s == taken; }
  OwnCalls own_calls() const override { return calls; }
  bool is_done(const OpState& s) const { return ended.count(&s) == 1; }

  std::vector<Told> told;
  std::vector<std::tuple<OpState*, int, std::uint64_t>> fetched;
  std::map<const OpState*, MessageInfo> ended;
  std::map<const OpState*, std::string> refused;
  const OpState* taken = nullptr;
  OwnCalls calls;
};

OpState call(Op op, int peer, int tag) {
  OpState s{.op = op, .dtype = DType::i32, .peer = peer, .tag = tag, .scratch = {}};
  return s;
}

// Rank 0 of three.
class PeerMessagesTest : public testing::Test {
 protected:
  OpState recv(int peer, int tag, std::int32_t& to) {
    OpState s = call(Op::recv, peer, tag);
    s.out = reinterpret_cast<std::byte*>(&to);
    s.out_count = 1;
    return s;
  }
  OpState send(int peer, int tag, const std::int32_t& from) {
    OpState s = call(Op::send, peer, tag);
    s.in = reinterpret_cast<const std::byte*>(&from);
    s.in_count = 1;
    return s;
  }
  std::optional<Failure> comes(int source, int tag, std::int32_t value) {
    return messages.arrived(source, {.dtype = DType::i32, .tag = tag, .count = 1},
                            std::as_bytes(std::span(&value, 1)));
  }
  Written medium;
  PeerMessages messages{medium, 0, 3, {.messages = 4, .bytes = 1000}};
  std::int32_t x = 0, y = 0;
};

TEST_F(PeerMessagesTest, AMessageGoesToItsReceiveInEitherOrder) {
  OpState first = recv(1, 7, x), second = recv(any_source, 7, y);
  messages.receive(first);
  EXPECT_FALSE(medium.is_done(first));
  EXPECT_THAT(messages.awaited(), ElementsAre(1));
  EXPECT_EQ(comes(1, 7, 11), std::nullopt);
  EXPECT_EQ(x, 11);
  EXPECT_TRUE(medium.is_done(first));
  EXPECT_THAT(messages.awaited(), IsEmpty());
  EXPECT_EQ(comes(2, 7, 22), std::nullopt);
  EXPECT_EQ(messages.probe(any_source, 7), (MessageInfo{2, 7, DType::i32, 1}));
  messages.receive(second);
  EXPECT_EQ(y, 22);
  EXPECT_EQ(medium.ended.at(&second).source, 2);
  EXPECT_EQ(messages.probe(any_source, 7), std::nullopt);
}

TEST_F(PeerMessagesTest, AnOfferIsFetchedByTheReceiveThatTakesIt) {
  OpState r = recv(any_source, 7, x);
  messages.receive(r);
  EXPECT_THAT(messages.awaited(), ElementsAre(1, 2));
  EXPECT_EQ(
      messages.arrived(2, {.dtype = DType::i32, .tag = 7, .count = 1, .offered = true, .number = 5}, {}),
      std::nullopt);
  ASSERT_EQ(medium.fetched.size(), 1u);
  EXPECT_EQ(medium.fetched[0], std::make_tuple(&r, 2, std::uint64_t{5}));
  EXPECT_FALSE(medium.is_done(r));
  EXPECT_THAT(messages.awaited(), ElementsAre(2));  // now that its source is known
  messages.received(r);
  EXPECT_EQ(medium.ended.at(&r), (MessageInfo{2, 7, DType::i32, 1}));
}

TEST_F(PeerMessagesTest, AReceiveThatDoesNotFitIsRefused) {
  OpState r = recv(1, 7, x);
  r.dtype = DType::f32;
  messages.receive(r);
  EXPECT_EQ(comes(1, 7, 11), std::nullopt);
  EXPECT_THAT(medium.refused.at(&r), HasSubstr("rank 1 sent i32 x1"));
  EXPECT_THAT(messages.awaited(), IsEmpty());
  OpState again = recv(1, 7, x);
  again.out_count = 2;
  messages.receive(again);
  EXPECT_EQ(messages.claim(1, {.dtype = DType::i32, .tag = 7, .count = 1}), nullptr);
  EXPECT_EQ(medium.refused.count(&again), 1u);
}

TEST_F(PeerMessagesTest, AWaitIsOverWhenAMessageComesAndLeavesIt) {
  OpState any = call(Op::wait_message, any_source, 7), named = call(Op::wait_message, 2, 7),
          other = call(Op::wait_message, 1, 7);
  for (OpState* s : {&any, &named, &other}) messages.receive(*s);
  EXPECT_EQ(comes(2, 7, 22), std::nullopt);
  EXPECT_EQ(medium.ended.at(&any), (MessageInfo{2, 7, DType::i32, 1}));
  EXPECT_TRUE(medium.is_done(named));
  EXPECT_FALSE(medium.is_done(other));
  OpState late = call(Op::wait_message, any_source, 7);
  messages.receive(late);
  EXPECT_TRUE(medium.is_done(late));
  OpState r = recv(2, 7, x);
  messages.receive(r);
  EXPECT_EQ(x, 22);
}

// If the message of a wait arrived just before its source left, between two polls of the call, no rank is
// missing.
TEST_F(PeerMessagesTest, ARankThatLeftIsLostOnlyToWhoeverStillWaitsForIt) {
  OpState wait = call(Op::wait_message, 1, 7), r = recv(1, 8, x), any = recv(any_source, 9, y);
  messages.receive(wait);
  EXPECT_EQ(comes(1, 7, 11), std::nullopt);
  messages.left(1);
  EXPECT_THAT(messages.lost(), IsEmpty());
  EXPECT_THAT(messages.lost(recv(1, 7, x)), IsEmpty());  // its message lies here
  EXPECT_THAT(messages.lost(r), ElementsAre(1));
  messages.receive(r);
  EXPECT_THAT(messages.lost(), ElementsAre(1));
  messages.ended(r);
  messages.receive(any);
  EXPECT_THAT(messages.lost(), IsEmpty());
  messages.left(2);
  EXPECT_THAT(messages.lost(), ElementsAre(1, 2));
}

TEST_F(PeerMessagesTest, ASendIsInFlightUntilItIsTaken) {
  OpState s = send(2, 3, x);
  messages.begin_send(s);
  EXPECT_THAT(messages.awaited(), ElementsAre(2));
  messages.left(2);
  EXPECT_THAT(messages.lost(), ElementsAre(2));
  medium.taken = &s;
  EXPECT_THAT(messages.awaited(), IsEmpty());
  EXPECT_THAT(messages.lost(), IsEmpty());
  messages.sent(s);
  EXPECT_EQ(medium.ended.at(&s).source, 2);
}

TEST_F(PeerMessagesTest, MessagesToThisRankAreLimitedLikeThoseOfOthers) {
  std::array<OpState, 5> sends;
  const std::int32_t value = 5;
  for (OpState& s : sends) {
    s = send(0, 1, value);
    messages.send_to_self(s);
  }
  EXPECT_TRUE(medium.is_done(sends[3]));
  EXPECT_FALSE(medium.is_done(sends[4]));
  EXPECT_THAT(
      medium.refused.at(&sends[4]),
      HasSubstr("rank 0 has no room for a message of 4 bytes with tag 1 from rank 0: it holds 4 messages"));
  const std::optional<Failure> why = comes(1, 1, 6);
  ASSERT_TRUE(why.has_value());
  EXPECT_THAT(why->text, HasSubstr("from rank 1"));
  OpState r = recv(0, 1, x);
  messages.receive(r);
  EXPECT_EQ(x, 5);
}

TEST_F(PeerMessagesTest, ElementsThatComePieceByPieceGoToTheReceiveOrAreKept) {
  const MessageHead head{.dtype = DType::i32, .tag = 7, .count = 1};
  OpState r = recv(any_source, 7, x);
  messages.receive(r);
  EXPECT_EQ(messages.claim(1, head), &r);
  EXPECT_THAT(messages.awaited(), ElementsAre(1));
  messages.received(r);
  EXPECT_EQ(medium.ended.at(&r).source, 1);
  EXPECT_EQ(messages.claim(1, head), nullptr);
  EXPECT_EQ(messages.no_room(1, head), std::nullopt);
  std::int32_t value = 9;
  messages.completed(1, head, Storage::borrow(&value, sizeof value));
  OpState late = recv(1, 7, y);
  messages.receive(late);
  EXPECT_EQ(y, 9);
}

TEST_F(PeerMessagesTest, APongSaysWhomCallsAndMessagesWaitFor) {
  OpState r = recv(2, 7, x);
  messages.receive(r);
  medium.calls.last = {.state = LastCall::State::in_flight, .op = Op::barrier};
  medium.calls.last.call = 3;
  messages.received_notice(1, Notice::ping, 17, {});
  ASSERT_EQ(medium.told.size(), 1u);
  EXPECT_EQ(medium.told[0].to, 1);
  EXPECT_EQ(medium.told[0].notice, Notice::pong);
  EXPECT_EQ(medium.told[0].number, 17u);

  // Rank 1 asks, and gets the answer.
  Written other;
  PeerMessages asking(other, 1, 3, {});
  OpState waits = recv(0, 4, y);
  asking.receive(waits);
  asking.left(2);
  asking.ask(waits);
  ASSERT_EQ(other.told.size(), 1u);  // not the one that has left
  EXPECT_EQ(other.told[0].notice, Notice::ping);
  asking.received_notice(0, Notice::pong, other.told[0].number, medium.told[0].bytes);
  const std::vector<LastCall> calls = asking.last_calls(LastCall::State::none);
  EXPECT_EQ(calls[0].op, Op::barrier);
  EXPECT_EQ(calls[0].message.peer, 2);
  EXPECT_EQ(calls[0].message.tag, 7);
  std::string story;
  EXPECT_THAT(asking.missing(waits, story), ElementsAre(2));
  EXPECT_EQ(story, "rank 0 has not sent it (tag 4); rank 0 waits, too; rank 2 does not answer");
}

TEST_F(PeerMessagesTest, ATimeOutSaysWhatIsNotDone) {
  std::string story;
  EXPECT_EQ(comes(1, 8, 1), std::nullopt);
  EXPECT_THAT(messages.missing(recv(1, 9, x), story), ElementsAre(1));
  EXPECT_EQ(story, "rank 1 has not sent it (tag 9); messages that were not received: tag 8 from rank 1");
  EXPECT_THAT(messages.missing(send(2, 4, x), story), ElementsAre(2));
  EXPECT_EQ(story, "rank 2 has not received it (tag 4)");
  EXPECT_THAT(messages.missing(recv(any_source, 9, x), story), ElementsAre(1, 2));
  EXPECT_THAT(story, HasSubstr("no rank has sent a message with tag 9"));
}

TEST_F(PeerMessagesTest, TheMessageThatARankWaitsInIsTheOneThatWasPolledLast) {
  OpState part = recv(1, -5, x), first = recv(1, 1, x), second = recv(2, 2, y);
  for (OpState* s : {&part, &first, &second}) messages.receive(*s);
  EXPECT_EQ(messages.last_message().tag, 1);  // parts of composed calls are not reported
  messages.waits_in(part);
  messages.waits_in(second);
  EXPECT_EQ(messages.last_message().tag, 2);
  messages.ended(second);
  EXPECT_EQ(messages.last_message().tag, 1);
}

}  // namespace
}  // namespace weft::test::peer_messages_test
