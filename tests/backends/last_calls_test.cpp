// Tests the last calls of all ranks in a time-out, over every transport, and the text.
#include "backends/last_calls.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "weft/backends/roll_call_messages.hpp"
#include "weft/base/view.hpp"

namespace weft::test::last_calls_test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using State = LastCall::State;

LastCall all_reduce(int rank, std::uint64_t call, State state = State::in_flight) {
  LastCall c{.rank = rank, .state = state, .answered = true, .op = Op::all_reduce, .dtype = DType::f32};
  c.count = 4096;
  c.call = call;
  if (state == State::in_flight) c.oldest = call;
  return c;
}

LastCall barrier(int rank, std::uint64_t call, State state) {
  LastCall c{.rank = rank, .state = state, .answered = true, .op = Op::barrier};
  c.call = call;
  return c;
}

TEST(LastCalls, RanksThatSayTheSameAreToldTogetherAndThoseThatAreBehindFirst) {
  const std::vector<LastCall> calls = {barrier(0, 18, State::in_flight), barrier(1, 18, State::in_flight),
                                       barrier(2, 18, State::in_flight), all_reduce(3, 17),
                                       all_reduce(4, 16, State::finished)};
  EXPECT_EQ(
      tell_last_calls(calls),
      "last calls: rank 4 finished all_reduce f32 x4096 sum [call 16]; rank 3 is in all_reduce f32 x4096 "
      "sum [call 17]; ranks 0, 1, 2 are in barrier [call 18]");
}

TEST(LastCalls, WhatIsNotKnownIsSaid) {
  LastCall waits = barrier(2, 3, State::finished);
  waits.message = {.op = Op::recv, .dtype = DType::i64, .peer = 5, .tag = 9, .count = 7};
  LastCall any = barrier(6, 4, State::called);
  any.message = {.op = Op::recv, .dtype = DType::i64, .peer = -1, .tag = 2, .count = 1};
  LastCall several = all_reduce(3, 23);
  several.oldest = 5;
  const std::vector<LastCall> calls = {{.rank = 0}, {.rank = 1, .state = State::none, .answered = true},
                                       waits,       several,
                                       {.rank = 4}, {.rank = 5, .answered = true},
                                       any};
  EXPECT_EQ(
      tell_last_calls(calls),
      "last calls: ranks 0, 4 did not answer, so that their last calls are unknown; rank 5 does not say "
      "it, so that its last call is unknown; rank 1 has called nothing yet; rank 2 finished barrier "
      "[call 3] and waits in recv i64 x7 from rank 5 (tag 9); rank 6 called barrier [call 4] and waits in "
      "recv i64 x1 from any rank (tag 2); rank 3 is in all_reduce f32 x4096 sum [call 23], of which all "
      "from call 5 on are in flight");
  EXPECT_EQ(tell_last_calls(std::vector<LastCall>(3)), "");
}

// The text travels in a record of 2 KiB.
TEST(LastCalls, ThousandsOfRanksGiveABoundedText) {
  std::vector<LastCall> same, apart;
  for (int r = 0; r < 4000; ++r) {
    same.push_back(all_reduce(r, r == 17 ? 4 : 5));
    apart.push_back(all_reduce(r, static_cast<std::uint64_t>(r)));
  }
  EXPECT_THAT(
      tell_last_calls(same),
      AllOf(testing::StartsWith("last calls: rank 17 is in all_reduce f32 x4096 sum [call 4]; ranks 0, 1,"),
            HasSubstr(", 31, 32 and 3967 more are in all_reduce f32 x4096 sum [call 5]")));
  const std::string text = tell_last_calls(apart);
  EXPECT_THAT(text, HasSubstr("; rank 9 is in all_reduce f32 x4096 sum [call 9]; "));
  EXPECT_THAT(text, testing::EndsWith(" more ranks are not listed"));
  EXPECT_LT(text.size(), 1200u);
}

std::vector<std::byte> pong_of(const LastCall& last) {
  return RollCallMessages::encode(std::vector<int>{0}, 3, last);
}

TEST(RollCallMessages, APongSaysWhatItsSenderCalled) {
  RollCallMessages roll(0, 3);
  const std::uint32_t number = roll.begin(Op::barrier, 2);
  LastCall last = all_reduce(1, 7);
  last.message = {.op = Op::send, .dtype = DType::u8, .peer = 2, .tag = 1, .count = 3};
  roll.answered(1, number, pong_of(last));
  const std::vector<LastCall> calls = roll.last_calls(barrier(0, 8, State::in_flight), State::none);
  EXPECT_EQ(calls[0].call, 8u);
  EXPECT_EQ(calls[1].state, State::in_flight);
  EXPECT_TRUE(calls[1].answered);
  EXPECT_EQ(calls[1].message, last.message);
  EXPECT_EQ(calls[2].state, State::none);
  EXPECT_FALSE(calls[2].answered);
  roll.called(1, all_reduce(1, 8, State::called));  // and goes on
  EXPECT_EQ(roll.last_calls({}, State::none)[1].state, State::called);
  EXPECT_EQ(roll.last_calls({}, State::none)[1].call, 8u);
}

// The answer of a rank to an earlier question need not hold any more.
TEST(RollCallMessages, AnOldPongIsNoAnswer) {
  RollCallMessages roll(0, 2);
  const std::uint32_t number = roll.begin(Op::barrier, 2);
  roll.answered(1, number - 1, pong_of(all_reduce(1, 7)));
  const LastCall c = roll.last_calls({}, State::unknown)[1];
  EXPECT_EQ(c.state, State::called);
  EXPECT_FALSE(c.answered);
  EXPECT_EQ(c.oldest, kNoCall);
}

// Bytes from elsewhere: every one of them is changed, and a pong is cut anywhere.
TEST(RollCallMessages, APongThatMakesNoSenseTellsNothing) {
  const LastCall last = all_reduce(1, 7);
  const std::vector<std::byte> sound = pong_of(last);
  RollCallMessages roll(0, 3);
  const std::uint32_t number = roll.begin(Op::barrier, 2);
  for (std::size_t at = 0; at < sound.size(); ++at)
    for (const int with : {0, 1, 0x7f, 0xff}) {
      std::vector<std::byte> pong = sound;
      pong[at] = static_cast<std::byte>(with);
      roll.answered(1, number, pong);
      const LastCall c = roll.last_calls({}, State::unknown)[1];
      EXPECT_LT(static_cast<int>(c.op), kOpCount);
      EXPECT_LT(static_cast<int>(c.dtype), kDTypeCount);
      EXPECT_LE(c.state, State::finished);
      EXPECT_FALSE(tell_last_calls(std::vector<LastCall>{all_reduce(0, 7), c}).empty());
      pong.resize(at);
      roll.answered(1, number, pong);
      roll.found(std::vector<int>{1, 2});
    }
  roll.answered(1, number, std::vector<std::byte>(sound.size(), std::byte{0xff}));
  EXPECT_EQ(roll.last_calls({}, State::unknown)[1].state, State::unknown);
}

struct Over {
  const char* name;
  Ranks kind;
};

class OverTransports : public testing::TestWithParam<Over> {
 protected:
  void SetUp() override {
    if (GetParam().name == std::string("gloo") && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  }
  static RankOptions options() {
    RankOptions o;
    o.backend = GetParam().name;
    o.context.log_level = LogLevel::error;
    return o;
  }
};
INSTANTIATE_TEST_SUITE_P(Of, OverTransports,
                         testing::Values(Over{"shm", Ranks::threads}, Over{"shm", Ranks::processes},
                                         Over{"gloo", Ranks::processes}),
                         [](const auto& p) {
                           return std::string(p.param.name) + "_" + to_string(p.param.kind);
                         });

// Under a sanitizer the others take longer to answer.
constexpr CallOptions kSoon{.deadline = kEveryKernel ? 300ms : 1000ms};
constexpr const char* kSoonText = kEveryKernel ? "0.3 s" : "1 s";

// Ranks 0 and 2 are in their second all_reduce; rank 1 is done with the first.
TEST_P(OverTransports, ARankThatSkipsACallIsToldWithItsLastOne) {
  run_ranks(
      GetParam().kind, 3,
      [](Rank& r) {
        std::vector<float> x(1000), y(500);
        r.group().all_reduce(view(x), view(x)).wait();
        r.meet("first");
        if (r.rank != 1) {
          const Error e = error_of([&] { r.group().all_reduce(view(y), view(y), kSoon).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.what(), HasSubstr(std::string("all_reduce: not finished within ") + kSoonText +
                                          ": rank 1 had not arrived; last calls: rank 1 "));
          EXPECT_THAT(e.what(), AnyOf(HasSubstr("rank 1 finished all_reduce f32 x1000 sum [call 0]; "),
                                      HasSubstr("rank 1 called all_reduce f32 x1000 sum [call 0]; ")));
          EXPECT_THAT(e.what(), AnyOf(HasSubstr("ranks 0, 2 are in all_reduce f32 x500 sum [call 1] [group"),
                                      HasSubstr("rank 0 called all_reduce f32 x500 sum [call 1]"),
                                      HasSubstr("rank 2 called all_reduce f32 x500 sum [call 1]")));
          ASSERT_EQ(e.last_calls().size(), 3u);
          const LastCall late = e.last_calls()[1], own = e.last_calls()[static_cast<std::size_t>(r.rank)];
          EXPECT_EQ(late.rank, 1);
          EXPECT_EQ(late.call, 0u);
          EXPECT_EQ(late.count, 1000);
          EXPECT_NE(late.state, State::in_flight);
          EXPECT_EQ(own.rank, r.rank);
          EXPECT_EQ(own.state, State::in_flight);
          EXPECT_EQ(own.op, Op::all_reduce);
          EXPECT_EQ(own.dtype, DType::f32);
          EXPECT_EQ(own.count, 500);
          EXPECT_EQ(own.call, 1u);
          const LastCall other = e.last_calls()[r.rank == 0 ? 2 : 0];
          EXPECT_EQ(other.call, 1u);
          EXPECT_EQ(other.count, 500);
        }
        r.meet("end");
        if (r.rank == 1) {  // too late: it reads the same
          const Error e = error_of([&] { r.group().barrier(kSoon).wait(); });
          EXPECT_THAT(e.what(), HasSubstr("; last calls: rank 1 "));
        }
        r.meet("all know");
      },
      options());
}

TEST_P(OverTransports, ARankThatHasCalledNothingIsTold) {
  run_ranks(
      GetParam().kind, 2,
      [](Rank& r) {
        r.group();
        if (r.rank == 0) {
          const Error e = error_of([&] { r.group().barrier(kSoon).wait(); });
          EXPECT_THAT(e.what(), HasSubstr("; last calls: rank 1 has called nothing yet; rank 0 is in barrier "
                                          "[call 0] [group"));
          ASSERT_EQ(e.last_calls().size(), 2u);
          EXPECT_EQ(e.last_calls()[1].state, State::none);
          EXPECT_EQ(e.last_calls()[1].call, kNoCall);
        }
        r.meet("end");
      },
      options());
}

// The rank answers, so it reports the message for which it waits.
TEST_P(OverTransports, ARankThatWaitsInAMessageIsToldWithIt) {
  run_ranks(
      GetParam().kind, 3,
      [](Rank& r) {
        std::vector<double> x(4);
        r.group().barrier().wait();
        const Error e = error_of([&] {
          if (r.rank == 1) r.group().recv(view(x), 2, {.deadline = 20s, .tag = 5}).wait();
          r.group().barrier({.deadline = r.rank == 0 ? Duration(300ms) : Duration(20s)}).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(e.what(),
                    HasSubstr("rank 1 finished barrier [call 0] and waits in recv f64 x4 from rank 2 "
                              "(tag 5); ranks 0, 2 are in barrier [call 1] [group"));
        ASSERT_EQ(e.last_calls().size(), 3u);
        if (r.rank == 0) {
          EXPECT_TRUE(e.last_calls()[1].answered);
          EXPECT_EQ(
              e.last_calls()[1].message,
              (LastCall::Message{.op = Op::recv, .dtype = DType::f64, .peer = 2, .tag = 5, .count = 4}));
        }
        r.meet("end");
      },
      options());
}

// If several calls are in flight, the last one is reported, and how many are before it.
TEST_P(OverTransports, SeveralCallsInFlightAreTold) {
  run_ranks(
      GetParam().kind, 2,
      [](Rank& r) {
        std::vector<float> x(10), y(20);
        r.group().barrier().wait();
        if (r.rank == 0) {
          Work first, second;
          const Error e = error_of([&] {
            first = r.group().all_reduce(view(x), view(x), kSoon);
            second = r.group().all_reduce(view(y), view(y), kSoon);
            second.wait();
          });
          EXPECT_THAT(e.what(),
                      HasSubstr("rank 0 is in all_reduce f32 x20 sum [call 2], of which all from call 1 "
                                "on are in flight [group"));
          EXPECT_EQ(e.last_calls()[0].oldest, 1u);
        }
        r.meet("end");
      },
      options());
}

// Its last call before it stopped is known nevertheless.
TEST_P(OverTransports, AStoppedRankIsToldWithItsLastCall) {
  if (GetParam().kind == Ranks::threads) GTEST_SKIP() << "a thread cannot be stopped alone";
  RankProcesses ranks(
      3,
      [](Rank& r) {
        std::vector<std::int32_t> x(12);
        r.group().broadcast(view(x), 0).wait();
        r.group().barrier().wait();
        if (r.rank == 1) {
          raise(SIGSTOP);
          return;
        }
        const Error e = error_of([&] { r.group().broadcast(view(x), 1, kSoon).wait(); });
        EXPECT_THAT(ranks_of(e), testing::ElementsAre(1)) << e.what();
        EXPECT_THAT(e.what(), AnyOf(HasSubstr("; last calls: rank 1 finished barrier [call 1]; "),
                                    HasSubstr("; last calls: rank 1 called barrier [call 1]; "),
                                    HasSubstr("; last calls: rank 1 is in barrier [call 1]; ")));
        ASSERT_EQ(e.last_calls().size(), 3u);
        EXPECT_EQ(e.last_calls()[1].op, Op::barrier);
        EXPECT_EQ(e.last_calls()[1].call, 1u);
        EXPECT_FALSE(e.last_calls()[1].answered);
        r.store->add("through", 1, Deadline::after(10s));
      },
      options());
  const Deadline end = Deadline::after(30s);
  while (ranks.store().add("through", 0, Deadline::after(10s)) < 2 && !end.passed())
    std::this_thread::sleep_for(5ms);
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

// In shared memory the last call of a dead rank stays.
TEST_P(OverTransports, ADeadRankIsToldWithItsLastCall) {
  if (GetParam().kind == Ranks::threads) GTEST_SKIP() << "a thread cannot die alone";
  RankProcesses ranks(
      3,
      [](Rank& r) {
        std::vector<float> x(8);
        r.group().all_reduce(view(x), view(x)).wait();
        if (r.rank == 1) raise(SIGKILL);
        const Error e = error_of([&] { r.group().barrier().wait(); });
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        ASSERT_EQ(e.last_calls().size(), 3u);
        EXPECT_EQ(e.last_calls()[1].op, Op::all_reduce);
        EXPECT_EQ(e.last_calls()[1].call, 0u);
        EXPECT_EQ(e.last_calls()[1].count, 8);
      },
      options());
  ranks.finish({1});
}

// The rank waits in a call of another group, so it answers that it has finished its last call of this group.
TEST_P(OverTransports, ARankInACallOfAnotherGroupIsToldWithItsLastCallHere) {
  run_ranks(
      GetParam().kind, 3,
      [](Rank& r) {
        ProcessGroup pair = r.rank == 2 ? ProcessGroup() : r.group().subgroup("pair", {0, 1});
        r.group().barrier().wait();
        if (r.rank == 1) {
          EXPECT_EQ(error_of([&] { pair.barrier().wait(); }).code(), ErrorCode::aborted);
        } else {
          const Error e = error_of([&] { r.group().barrier(kSoon).wait(); });
          EXPECT_THAT(e.what(), HasSubstr("; last calls: rank 1 finished barrier [call 0]; "));
          // "called": its answer arrived too late.
          EXPECT_THAT(e.what(), AnyOf(HasSubstr("ranks 0, 2 are in barrier [call 1] [group \"world\""),
                                      HasSubstr("rank 0 called barrier [call 1]"),
                                      HasSubstr("rank 2 called barrier [call 1]")));
          EXPECT_EQ(e.last_calls()[1].state, State::finished);
          if (pair) pair.abort("enough");
        }
        r.meet("end");
      },
      options());
}

// A rank that calls something else gets a mismatch before a time-out. But the root of a broadcast waits for
// nobody, and so the time-out of a later call shows the difference.
TEST_P(OverTransports, ARankThatCallsAnotherOperationIsAMismatchAtOnce) {
  run_ranks(
      GetParam().kind, 2,
      [](Rank& r) {
        std::vector<float> x(4);
        const Error e = error_of([&] {
          (r.rank == 0 ? r.group().all_reduce(view(x), view(x), kSoon) : r.group().barrier(kSoon)).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.last_calls(), IsEmpty());
        r.meet("end");
      },
      options());
}

// Gloo lacks reduce_scatter: it is composed of other calls, and reported in the user's terms and numbers.
TEST(LastCalls, OfComposedCallsTheUsersAreTold) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  RankOptions options;
  options.backend = "gloo";
  options.context.log_level = LogLevel::error;
  run_ranks(
      Ranks::threads, 2,
      [](Rank& r) {
        std::vector<float> x(6), y(3);
        r.group().reduce_scatter(view(x), view(y), {.order = Order::canonical}).wait();
        r.group().reduce_scatter(view(x), view(y)).wait();
        r.meet("first");
        if (r.rank == 0) {
          const Error e = error_of([&] { r.group().all_reduce(view(x), view(x), kSoon).wait(); });
          EXPECT_THAT(e.what(),
                      HasSubstr("last calls: rank 1 finished reduce_scatter f32 x3 sum [call 1]; rank 0 "
                                "is in all_reduce f32 x6 sum [call 2] [group"));
          EXPECT_EQ(e.last_calls()[1].op, Op::reduce_scatter);
          EXPECT_EQ(e.last_calls()[1].call, 1u);
        }
        r.meet("end");
      },
      options);
}

}  // namespace
}  // namespace weft::test::last_calls_test
