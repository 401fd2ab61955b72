// Persistent calls: described and checked once, started often. Tests the backend's arguments, texts, calls
// that may not be started, and Works and PersistentCalls of which either exists longer. Over shm it tests
// results and faults.
#include "weft/group/persistent_call.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "group/group_state.hpp"
#include "support/processes.hpp"
#include "support/recorded_group.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/interrupt.hpp"

namespace weft::test::persistent_call_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

std::string text_of(const std::function<void()>& f) {
  const Error e = error_of(f);
  return e.code() == ErrorCode::bad_argument ? e.what() : "no bad_argument: " + std::string(e.what());
}

class PersistentCalls : public RecordedGroup {};

std::vector<BufferBlock> blocks_of(const BufferBlock* from, int n) {
  return from == nullptr ? std::vector<BufferBlock>{} : std::vector<BufferBlock>(from, from + n);
}

TEST_F(PersistentCalls, TheBackendIsHandedWhatAPlainCallHandsIt) {
  ProcessGroup g = make();
  const UserReduction mine{"mine", [](const void*, const void*, void*, std::int64_t, DType) {}};
  const std::vector<std::int64_t> counts{2, 0, 1}, offsets{4, 3, 0};
  const Blocks some{counts}, apart{counts, offsets};
  const std::vector<Call> calls{
      call::all_reduce(a, b, {.op = ReduceOp::max, .order = Order::canonical}),
      call::all_reduce(a, {.op = ReduceOp::premul_sum(0.5)}),
      call::all_reduce(a, b, {.op = ReduceOp::of(mine)}),
      call::reduce(a, b, 1),
      call::reduce(a, 0),
      call::scan(a, b),
      call::scan(a),
      call::exscan(a, b),
      call::exscan(a),
      call::all_gather(view(a.data(), 4), b),
      call::all_gather_v(view(a.data(), 2), b, apart),
      call::reduce_scatter(a, view(b.data(), 4), {.op = ReduceOp::avg}),
      call::reduce_scatter_v(a, view(b.data(), 2), some),
      call::gather(view(a.data(), 4), b, 0),
      call::scatter(a, view(b.data(), 4), 0),
      call::all_to_all(a, b),
      call::all_to_all_v(a, b, some, apart),
      call::broadcast(a, b, 0),
      call::broadcast(a, 2),
      call::barrier(),
      call::send(a, 1, {.tag = 7}),
      call::recv(b, 2, {.tag = 8}),
  };
  std::size_t ops = 0;
  for (const Call& c : calls) ops |= std::size_t{1} << static_cast<int>(c.op);
  EXPECT_EQ(ops, (std::size_t{1} << kOpCount) - 2 - op_bit(Op::wait_message) - op_bit(Op::exchange));
  for (const Call& c : calls) {
    SCOPED_TRACE(name(c.op));
    const std::size_t before = recording.posted().size();
    PersistentCall p = g.make(c);
    EXPECT_EQ(p.op(), c.op);
    EXPECT_EQ(recording.posted().size(), before);  // nothing is sent
    std::vector<std::vector<BufferBlock>> blocks;
    recording.decide([&](const OpState& s) {
      blocks.push_back(blocks_of(s.in_blocks, 3));
      blocks.push_back(blocks_of(s.out_blocks, 3));
      return Fate{};
    });
    g.submit(c).wait();
    p.start().wait();
    p.start().wait();
    ASSERT_EQ(blocks.size(), 6u);
    const std::vector<OpState> posted = recording.posted();
    for (const std::size_t k : {before + 1, before + 2}) {
      const OpState &plain = posted[before], &s = posted[k];
      EXPECT_EQ(s.call, plain.call + (k - before));
      EXPECT_EQ(s.op, plain.op);
      EXPECT_EQ(s.dtype, plain.dtype);
      EXPECT_EQ(s.reduce, plain.reduce);
      EXPECT_EQ(s.order, plain.order);
      EXPECT_EQ(s.in, plain.in);
      EXPECT_EQ(s.out, plain.out);
      EXPECT_EQ(s.in_count, plain.in_count);
      EXPECT_EQ(s.out_count, plain.out_count);
      EXPECT_EQ(s.root, plain.root);
      EXPECT_EQ(s.peer, plain.peer);
      EXPECT_EQ(s.tag, plain.tag);
      EXPECT_EQ(s.stream, plain.stream);
      EXPECT_EQ(s.user, nullptr);
      for (const std::size_t side : {0u, 1u}) {
        const auto& want = blocks[side];
        const auto& got = blocks[2 * (k - before) + side];
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t r = 0; r < want.size(); ++r) {
          EXPECT_EQ(got[r].offset, want[r].offset);
          EXPECT_EQ(got[r].count, want[r].count);
        }
      }
    }
  }
}

TEST_F(PersistentCalls, WhatAnOperationDoesNotHaveIsNotHandedOn) {
  ProcessGroup g = make();
  Call sum = call::all_reduce(a, b, {.order = Order::canonical});
  sum.root = 2;
  sum.peer = any_source;
  Call gather = call::all_gather(view(a.data(), 4), b, {.order = Order::canonical});
  Call send = call::send(a, 1);
  send.root = 2;
  for (const Call& c : {sum, gather, send}) {
    g.submit(c).wait();
    g.make(c).start().wait();
  }
  const std::vector<OpState> posted = recording.posted();
  ASSERT_EQ(posted.size(), 6u);
  for (std::size_t i = 0; i < posted.size(); ++i) {
    EXPECT_EQ(posted[i].root, -1) << i;
    EXPECT_EQ(posted[i].peer, i < 4 ? -1 : 1) << i;
    EXPECT_EQ(posted[i].order, i < 2 ? Order::canonical : Order::native) << i;
  }
}

TEST_F(PersistentCalls, TheNamedFunctionsMakeTheCallsOfTheirNames) {
  ProcessGroup g = make();
  const std::vector<std::int64_t> counts{2, 0, 1};
  const Blocks some{counts};
  const TensorView two = view(b.data(), 2), four = view(b.data(), 4);
  std::vector<PersistentCall> all;
  all.push_back(g.make_all_reduce(a, b));
  all.push_back(g.make_all_reduce(a));
  all.push_back(g.make_reduce(a, b, 1));
  all.push_back(g.make_reduce(a, 1));
  all.push_back(g.make_scan(a, b));
  all.push_back(g.make_scan(a));
  all.push_back(g.make_exscan(a, b));
  all.push_back(g.make_exscan(a));
  all.push_back(g.make_all_gather(view(a.data(), 4), b));
  all.push_back(g.make_all_gather_v(view(a.data(), 2), b, some));
  all.push_back(g.make_reduce_scatter(a, four));
  all.push_back(g.make_reduce_scatter_v(a, two, some));
  all.push_back(g.make_gather(view(a.data(), 4), b, 0));
  all.push_back(g.make_scatter(a, four, 0));
  all.push_back(g.make_all_to_all(a, b));
  all.push_back(g.make_all_to_all_v(a, b, some, some));
  all.push_back(g.make_broadcast(a, b, 0));
  all.push_back(g.make_broadcast(a, 0));
  all.push_back(g.make_barrier());
  all.push_back(g.make_send(a, 1, {.tag = 3}));
  all.push_back(g.make_recv(b, 2, {.tag = 4}));
  std::vector<Op> ops;
  for (PersistentCall& p : all) {
    ops.push_back(p.op());
    p.start().wait();
  }
  EXPECT_THAT(
      ops, ElementsAre(Op::all_reduce, Op::all_reduce, Op::reduce, Op::reduce, Op::scan, Op::scan, Op::exscan,
                       Op::exscan, Op::all_gather, Op::all_gather_v, Op::reduce_scatter, Op::reduce_scatter_v,
                       Op::gather, Op::scatter, Op::all_to_all, Op::all_to_all_v, Op::broadcast,
                       Op::broadcast, Op::barrier, Op::send, Op::recv));
  const std::vector<OpState> posted = recording.posted();
  ASSERT_EQ(posted.size(), all.size());
  EXPECT_EQ(posted[0].out, reinterpret_cast<std::byte*>(b.data()));
  EXPECT_EQ(posted[1].out, reinterpret_cast<std::byte*>(a.data()));
  EXPECT_EQ(posted[2].root, 1);
  EXPECT_EQ(posted[19].peer, 1);
  EXPECT_EQ(posted[19].tag, 3);
  EXPECT_EQ(posted[20].peer, 2);
  EXPECT_EQ(posted[20].tag, 4);
}

TEST_F(PersistentCalls, AWrongArgumentIsRefusedWhenItIsMade) {
  ProcessGroup g = make();
  const auto same = [&](const Call& c) {
    const std::string made = text_of([&] { g.make(c); });
    EXPECT_EQ(made, text_of([&] { g.submit(c).wait(); }));
    return made;
  };
  EXPECT_THAT(same(call::all_reduce(a, view(b.data(), 11))),
              HasSubstr("all_reduce: out has 11 elements; expected 12 (in) [group \"x\", rank 0]"));
  EXPECT_THAT(same(call::broadcast(a, 3)), HasSubstr("broadcast: root is 3"));
  EXPECT_THAT(same(call::send(a, any_source)), HasSubstr("send: dst is any_source"));
  EXPECT_THAT(same(call::barrier({.deadline = -1s})), HasSubstr("barrier: deadline is"));
  EXPECT_THAT(same(Call{}), HasSubstr("the call is empty"));
  EXPECT_THAT(same(call::all_reduce(a, {.stream = {{DeviceKind::cuda, 0}, nullptr}})),
              HasSubstr("all_reduce: stream is of cuda:0; expected cpu"));
  EXPECT_THAT(recording.posted(), testing::IsEmpty());
}

TEST_F(PersistentCalls, AWaitForAMessageCannotBePersistent) {
  ProcessGroup g = make();
  EXPECT_EQ(text_of([&] { g.make(call::wait_message(1)); }),
            "make: op is wait_message, and a persistent call cannot hold its answer; expected a "
            "collective, send or "
            "recv [group \"x\", rank 0]");
}

TEST_F(PersistentCalls, OneThatIsInFlightIsNotStartedAgain) {
  ProcessGroup g = make();
  PersistentCall p = g.make_all_reduce(a, b), other = g.make_all_reduce(b, a);
  recording.decide(Fate{.kind = Fate::never});
  Work first = p.start();
  EXPECT_EQ(text_of([&] { p.start().wait(); }),
            "all_reduce: this persistent call was started before and is still in flight; expected that its "
            "last Work is "
            "done [group \"x\", rank 0]");
  EXPECT_EQ(recording.posted().size(), 1u);
  Work second = other.start();  // another one may be
  recording.let_go();
  first.wait();
  recording.decide(Fate{});
  p.start().wait();
  second.wait();
  EXPECT_EQ(recording.posted().size(), 3u);
}

// A thread that waits for a slot drives the calls in flight, and runs the callbacks that are due.
TEST_F(PersistentCalls, OneThatACallbackStartsWhileAStartWaitsForASlotIsInFlight) {
  ProcessGroup g = make();
  PersistentCall p = g.make_all_reduce(a, b);
  recording.decide(Fate{.kind = Fate::never});
  std::vector<Work> others;
  for (std::uint32_t k = 0; k < Ring::kSlots; ++k) others.push_back(g.send(a, 1));
  Work started;
  others[0].then([&](const Error*) {
    recording.decide(Fate{.kind = Fate::never});
    started = p.start();
  });
  std::thread later([&] {
    std::this_thread::sleep_for(20ms);
    recording.decide(Fate{});
    recording.let_go();
  });
  EXPECT_THAT(text_of([&] { p.start().wait(); }), HasSubstr("started before and is still in flight"));
  later.join();
  EXPECT_EQ(recording.posted().size(), Ring::kSlots + 1);
  recording.let_go();
  started.wait();
  wait_all(others);
  recording.decide(Fate{});
  p.start().wait();
}

TEST_F(PersistentCalls, ItMayBeStartedWhileEachSlotIsTakenInTurn) {
  ProcessGroup g = make();
  PersistentCall p = g.make_all_reduce(a, b);
  recording.decide(Fate{.kind = Fate::never});
  std::vector<Work> others;
  for (std::uint32_t k = 0; k < Ring::kSlots; ++k) {
    recording.decide(Fate{});
    p.start().wait();
    if (k + 1 == Ring::kSlots) break;
    recording.decide(Fate{.kind = Fate::never});
    others.push_back(g.send(a, 1));
  }
  recording.let_go();
  wait_all(others);
  p.start().wait();
}

TEST_F(PersistentCalls, AnEmptyOneSaysSo) {
  const std::string empty =
      "start: empty PersistentCall: it was made by default or moved from; expected one that "
      "ProcessGroup::make() gave";
  PersistentCall p;
  EXPECT_FALSE(p);
  EXPECT_EQ(p.op(), Op::none);
  EXPECT_EQ(text_of([&] { p.start().wait(); }), empty);
  ProcessGroup g = make();
  p = g.make_barrier();
  EXPECT_TRUE(p);
  PersistentCall q = std::move(p);
  EXPECT_EQ(text_of([&] { p.start().wait(); }), empty);  // NOLINT(bugprone-use-after-move)
  q.start().wait();
  ProcessGroup none;
  EXPECT_THAT(text_of([&] { none.make_barrier(); }), HasSubstr("barrier: empty ProcessGroup"));
}

TEST_F(PersistentCalls, AfterItsGroupHasEndedItSaysSo) {
  PersistentCall p;
  const std::string ended =
      "all_reduce: the group of this persistent call has ended: its handle was destroyed, or has left it "
      "[group \"x\", "
      "rank 0]";
  {
    ProcessGroup g = make();
    p = g.make_all_reduce(a, b);
    ProcessGroup moved = std::move(g);  // the group stays where it is
    p.start().wait();
  }
  EXPECT_EQ(recording.destroyed(), 1);
  EXPECT_EQ(text_of([&] { p.start().wait(); }), ended);
  ProcessGroup g = make();
  p = g.make_all_reduce(a, b);
  g.leave();
  EXPECT_EQ(text_of([&] { p.start().wait(); }), ended);
  ProcessGroup h = make();
  p = h.make_all_reduce(a, b);
  recording.decide(Fate{.kind = Fate::never});
  Work work = p.start();
  { const ProcessGroup last = std::move(h); }  // the Work keeps the group, but nothing new begins
  EXPECT_EQ(text_of([&] { p.start().wait(); }), ended);
  recording.let_go();
  work.wait();
  EXPECT_EQ(recording.destroyed(), 3);
}

TEST_F(PersistentCalls, ItMayGoWhileItsCallIsInFlight) {
  ProcessGroup g = make();
  const std::vector<std::int64_t> counts{2, 0, 1};
  const BufferBlock* blocks = nullptr;
  recording.decide([&](const OpState& s) {
    blocks = s.out_blocks;
    return Fate{.kind = Fate::never};
  });
  Work work;
  {
    PersistentCall p = g.make_all_gather_v(view(a.data(), 2), b, {counts});
    work = p.start();
  }
  ASSERT_NE(blocks, nullptr);
  EXPECT_EQ(blocks[0].count, 2);
  EXPECT_EQ(blocks[2].count, 1);
  recording.let_go();
  work.wait();
}

TEST_F(PersistentCalls, AFailureReachesTheCallInFlightAndLaterStarts) {
  ProcessGroup g = make();
  PersistentCall p = g.make_all_reduce(a, b);
  const Failure lost{.code = ErrorCode::peer_lost, .text = "rank 2 died", .ranks = {2}};
  recording.decide(Fate{.kind = Fate::fail, .why = lost});
  int called = 0;
  Work work = p.start().then([&](const Error* e) { called += e != nullptr; });
  EXPECT_EQ(error_of([&] { work.wait(); }).code(), ErrorCode::peer_lost);
  EXPECT_EQ(called, 1);
  const Error again = error_of([&] { p.start().wait(); });
  EXPECT_EQ(again.code(), ErrorCode::peer_lost);
  EXPECT_THAT(again.what(), HasSubstr("rank 2 died"));
}

TEST_F(PersistentCalls, TheDeadlineOfItsOptionsCountsForEachStart) {
  ProcessGroup g = make();
  PersistentCall p = g.make_all_reduce(a, b, {.deadline = 50ms});
  p.start().wait();
  std::this_thread::sleep_for(60ms);  // it counts from the start of each
  p.start().wait();
  recording.decide(Fate{.kind = Fate::never});
  Work work = p.start();
  EXPECT_EQ(error_of([&] { work.wait(); }).code(), ErrorCode::timeout);
}

TEST_F(PersistentCalls, AForkedChildIsTold) {
  ProcessGroup g = make();
  PersistentCall p = g.make_all_reduce(a, b);
  const int parent = ::getpid();
  const ProcessResult result = run_in_child([&] {
    const std::string text =
        ": this process was forked from process " + std::to_string(parent) +
        " after its Context was made; make a new Context in the child, or fork before the first one";
    expect_error(ErrorCode::unsupported, "all_reduce" + text, [&] { p.start().wait(); });
    expect_error(ErrorCode::unsupported, "barrier" + text, [&] { g.make_barrier(); });
    EXPECT_TRUE(recording.posted().empty());
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
  p.start().wait();
}

TEST_F(PersistentCalls, InAGroupOfOneRankItIsOneLocalStep) {
  ProcessGroup g = make(1);
  std::iota(a.begin(), a.end(), 0.f);
  PersistentCall p = g.make_all_reduce(a, b, {.op = ReduceOp::premul_sum(2.0)});
  const std::vector<std::int64_t> count{3}, in_at{4}, out_at{1};
  std::vector<float> c(12, 9.f);
  PersistentCall v = g.make_all_to_all_v(a, c, {count, in_at}, {count, out_at});
  PersistentCall s = g.make_exscan(a, b);
  PersistentCall none = g.make_barrier();
  for (int round = 0; round < 2; ++round) {
    p.start().wait();
    EXPECT_THAT(b, ElementsAre(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22));
    v.start().wait();
    EXPECT_THAT(c, ElementsAre(9, 4, 5, 6, 9, 9, 9, 9, 9, 9, 9, 9));
    s.start().wait();
    EXPECT_THAT(b, testing::Each(0.f));
    none.start().wait();
  }
  EXPECT_THAT(recording.posted(), testing::IsEmpty());
}

TEST_F(PersistentCalls, SeveralAreStartedAsOne) {
  ProcessGroup g = make();
  std::vector<PersistentCall> calls;
  calls.push_back(g.make_recv(b, any_source, {.tag = 3}));
  calls.push_back(g.make_send(a, 1, {.tag = 3}));
  calls.push_back(g.make_barrier());
  recording.decide({.polls = 2});
  for (int round = 0; round < 2; ++round) {
    Work work = start_all(calls);
    EXPECT_TRUE(work.valid());
    work.wait();
  }
  const std::vector<OpState> posted = recording.posted();
  ASSERT_EQ(posted.size(), 6u);
  EXPECT_EQ(posted[3].op, Op::recv);
  EXPECT_EQ(posted[3].tag, 3);
  EXPECT_EQ(static_cast<const void*>(posted[4].in), a.data());
  EXPECT_EQ(posted[5].op, Op::barrier);
  EXPECT_THAT(recording.batches(), ElementsAre(0, 3, 3, 6));
  start_all(calls[1], calls[2]).wait();  // by names
  EXPECT_EQ(recording.posted().size(), 8u);
  EXPECT_TRUE(start_all(std::span<PersistentCall>()).done());
}

TEST_F(PersistentCalls, MoreThanTheRingHoldsAreStartedAsOne) {
  ProcessGroup g = make();
  std::vector<PersistentCall> calls;
  for (int i = 0; i < 150; ++i) calls.push_back(g.make_send(a, 1));
  recording.decide({.polls = 3});
  start_all(calls).wait();
  EXPECT_EQ(recording.posted().size(), 150u);
  EXPECT_EQ(recording.batches().back(), 150u);
  EXPECT_EQ(recording.batches().size() % 2, 0u);
  // Some are sent and the next one finds no slot: the group fails.
  recording.decide({.kind = Fate::never});
  std::vector<PersistentCall> stuck;
  for (int i = 0; i < 70; ++i) stuck.push_back(g.make_send(a, 1, {.deadline = 50ms}));
  const Error e = error_of([&] { static_cast<void>(start_all(stuck)); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), HasSubstr("start_all: rank 0 sent 64 of 70 calls: send: 64 calls in flight and none "
                                  "finished within 0.05 s"));
}

TEST_F(PersistentCalls, ListsThatCannotBeStartedAreRefused) {
  ProcessGroup g = make(), other = make();
  PersistentCall send = g.make_send(a, 1), recv = g.make_recv(b, 1), theirs = other.make_barrier(), empty;
  EXPECT_EQ(text_of([&] { start_all(send, empty).wait(); }),
            "start_all: calls[1] is an empty PersistentCall; expected one that ProcessGroup::make() gave");
  EXPECT_EQ(text_of([&] { start_all(send, recv, theirs).wait(); }),
            "start_all: calls[2] is of another group than calls[0]; expected all of one");
  EXPECT_EQ(text_of([&] { start_all(send, recv, send).wait(); }),
            "start_all: a call (send) is there twice; expected each once");
  { const ProcessGroup gone = std::move(other); }
  EXPECT_THAT(text_of([&] { start_all(theirs).wait(); }),
              HasSubstr("the group of this persistent call has ended"));
  EXPECT_THAT(recording.posted(), testing::IsEmpty());
  recording.decide({.kind = Fate::never});
  Work first = recv.start();
  EXPECT_THAT(text_of([&] { start_all(send, recv).wait(); }),
              HasSubstr("recv: this persistent call was started before"));
  EXPECT_EQ(recording.posted().size(), 1u);
  recording.let_go();
  first.wait();
}

TEST_F(PersistentCalls, InAGroupOfOneRankAListIsDoneAtOnce) {
  ProcessGroup g = make(1);
  std::iota(a.begin(), a.end(), 0.f);
  PersistentCall sum = g.make_all_reduce(a, b, {.op = ReduceOp::premul_sum(2.0)}), meet = g.make_barrier();
  start_all(sum, meet).wait();
  EXPECT_THAT(b, ElementsAre(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22));
  EXPECT_THAT(recording.posted(), testing::IsEmpty());
}

// ---- Between ranks

TEST(PersistentCallsOfRanks, ARingIsStartedAsOne) {
  run_ranks(Ranks::threads, 3, [](Rank& r) {
    std::vector<double> out(100'000), in(out.size());
    std::vector<PersistentCall> ring;
    ring.push_back(r.group().make_send(out, (r.rank + 1) % 3));
    ring.push_back(r.group().make_recv(in, any_source));
    std::vector<double> sum(10, 1.0);
    ring.push_back(r.group().make_all_reduce(sum));
    for (int round = 0; round < 3; ++round) {
      std::fill(out.begin(), out.end(), r.rank + 10.0 * round);
      sum.assign(10, 1.0);
      Work work = start_all(ring);
      work.wait();
      EXPECT_THAT(work.sources(), ElementsAre((r.rank + 2) % 3));
      EXPECT_EQ(in, std::vector<double>(in.size(), (r.rank + 2) % 3 + 10.0 * round));
      EXPECT_THAT(sum, testing::Each(3.0));
      r.group().barrier().wait();
    }
  });
}

TEST(PersistentCallsOfRanks, EachStartTakesWhatTheBuffersHoldThenAndMayMeetAPlainCall) {
  run_ranks(Ranks::threads, 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    std::vector<float> in(1000), plain(1000), started(1000);
    PersistentCall p = g.make_all_reduce(in, started);
    for (int round = 0; round < 20; ++round) {
      for (std::size_t i = 0; i < in.size(); ++i)
        in[i] = static_cast<float>(r.rank + 1) / static_cast<float>(i + 3) + static_cast<float>(round);
      started.assign(1000, -1.f);
      p.start().wait();
      g.all_reduce(in, plain).wait();
      EXPECT_EQ(started, plain);
      started.assign(1000, -1.f);
      if (r.rank == round % 3) {  // one plain, two started
        g.all_reduce(in, started).wait();
      } else {
        p.start().wait();
      }
      EXPECT_EQ(started, plain);
    }
  });
}

TEST(PersistentCallsOfRanks, MessagesAreMatchedAsThoseOfPlainCalls) {
  run_ranks(Ranks::threads, 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    if (r.rank == 0) {
      std::vector<int> got(4);
      PersistentCall from_any = g.make_recv(got, any_source, {.tag = 5}),
                     named = g.make_recv(got, 2, {.tag = 6});
      std::vector<int> sources;
      for (int k = 0; k < 6; ++k) {
        Work w = from_any.start();
        w.wait();
        sources.push_back(w.source());
        EXPECT_THAT(got, testing::Each(w.source() * 10));
        Work n = named.start();
        EXPECT_EQ(n.source(), 2);
        n.wait();
        EXPECT_THAT(got, testing::Each(7 + k));
      }
      EXPECT_EQ(std::count(sources.begin(), sources.end(), 1), 3);
      EXPECT_EQ(std::count(sources.begin(), sources.end(), 2), 3);
    } else {
      std::vector<int> mine(4, r.rank * 10), numbered(4);
      PersistentCall p = g.make_send(mine, 0, {.tag = 5}), other = g.make_send(numbered, 0, {.tag = 6});
      for (int k = 0; k < 3; ++k) p.start().wait();
      for (int k = 0; k < 6 && r.rank == 2; ++k) {
        numbered.assign(4, 7 + k);
        other.start().wait();
      }
    }
    g.barrier().wait();
  });
}

TEST(PersistentCallsOfRanks, RanksThatStartDifferentCallsGetMismatch) {
  run_ranks(Ranks::threads, 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    std::vector<float> in(8), out(8);
    PersistentCall sum = g.make_all_reduce(in, out);
    PersistentCall most = g.make_all_reduce(in, out, {.op = ReduceOp::max});
    sum.start().wait();
    const Error e = error_of([&] { (r.rank == 1 ? most : sum).start().wait(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_THAT(e.what(), HasSubstr("all_reduce f32 x8 sum [call 1]"));
    EXPECT_THAT(e.what(), HasSubstr("all_reduce f32 x8 max [call 1]"));
    EXPECT_EQ(error_of([&] { sum.start().wait(); }).code(), ErrorCode::mismatch);
  });
}

TEST(PersistentCallsOfRanks, ARankThatDiesIsNamedToWhoeverStarts) {
  for (const bool between : {false, true}) {
    SCOPED_TRACE(between ? "between two starts" : "within one");
    RankProcesses ranks(3, [=](Rank& r) {
      ProcessGroup& g = r.group();
      std::vector<float> in(1000, 1.f), out(1000);
      PersistentCall p = g.make_all_reduce(in, out);
      for (int k = 0; k < 5; ++k) p.start().wait();
      if (r.rank == 2) {
        Work work = between ? Work() : p.start();
        ::raise(SIGKILL);
      }
      const Error e = error_of([&] {
        for (int k = 0; k < 3; ++k) p.start().wait();
      });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost);
      EXPECT_THAT(e.ranks(), ElementsAre(2));
      EXPECT_EQ(error_of([&] { p.start().wait(); }).code(), ErrorCode::peer_lost);
    });
    ranks.finish({2});
  }
}

TEST(PersistentCallsOfRanks, AnInterruptEndsTheWaitForAStart) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    ProcessGroup& g = r.group();
    std::vector<float> in(8), out(8);
    PersistentCall p = g.make_all_reduce(in, out);
    p.start().wait();
    if (r.rank == 0) {
      Interrupt interrupt;
      const Interruptible here(interrupt);
      Work work = p.start();
      interrupt.raise();
      const Error e = error_of([&] { work.wait(); });
      EXPECT_EQ(e.code(), ErrorCode::aborted);
      EXPECT_THAT(e.what(), HasSubstr("rank 0 was interrupted while it waited"));
    } else {
      r.meet("the other has given up");
      EXPECT_EQ(error_of([&] {
                  p.start().wait();  // may end well: the other has done its part
                  p.start().wait();
                }).code(),
                ErrorCode::aborted);
      return;
    }
    r.meet("the other has given up");
  });
}

}  // namespace
}  // namespace weft::test::persistent_call_test
