// Works: tickets for calls in flight, one by one and coalesced. Tests of the group alone run over the
// recording backend; tests that need peers run over shm. The rest of a Work's life is in process_group_test.
#include "weft/group/work.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "group/group_state.hpp"
#include "support/recorded_group.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::work_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

const Fate kNever{.kind = Fate::never};

// ---- the group's part, over a backend that goes nowhere ----

class Coalesced : public RecordedGroup {
 protected:
  Call add() { return call::all_reduce(view(a), view(b)); }
  // Each writes memory of its own.
  std::vector<Call> adds(std::size_t n) {
    sums.resize(std::max(sums.size(), n * a.size()));
    std::vector<Call> calls;
    for (std::size_t i = 0; i < n; ++i)
      calls.push_back(call::all_reduce(a, std::span(sums).subspan(i * a.size(), a.size())));
    return calls;
  }

  std::vector<float> sums;
};

TEST_F(Coalesced, CallsArePostedInOrderWithinOneBatch) {
  ProcessGroup g = make();
  std::vector<float> c(12);
  g.coalesced({add(), call::barrier(), call::send(view(a), 1), call::recv(view(c), 2)}).wait();
  std::vector<Op> ops;
  for (const OpState& s : recording.posted()) ops.push_back(s.op);
  EXPECT_THAT(ops, ElementsAre(Op::all_reduce, Op::barrier, Op::send, Op::recv));
  EXPECT_THAT(recording.batches(), ElementsAre(0, 4));
}

TEST_F(Coalesced, NothingIsDoneAtOnce) {
  ProcessGroup g = make();
  Work w = g.coalesced(std::span<const Call>{});
  EXPECT_FALSE(w.valid());
  EXPECT_TRUE(w.done());
  w.wait();
}

TEST_F(Coalesced, OfOneRankIsDoneAtOnce) {
  ProcessGroup g = make(1);
  Work w = g.coalesced(adds(3));
  EXPECT_FALSE(w.valid());
  EXPECT_EQ(sums[3 * 12 - 1], 1.f);
}

TEST_F(Coalesced, AnArgumentWrongInTheLastThrowsBeforeTheFirstIsSent) {
  ProcessGroup g = make();
  std::vector<Call> calls = adds(5);
  calls.push_back(call::send(view(a), 3));
  const Error e = error_of([&] { g.coalesced(calls).wait(); });
  EXPECT_EQ(e.code(), ErrorCode::bad_argument);
  EXPECT_THAT(e.what(), HasSubstr("send: "));
  EXPECT_TRUE(recording.posted().empty());
  EXPECT_TRUE(recording.batches().empty());
  g.barrier().wait();
}

// No call may use memory that another call writes, since chance would decide which of the two is first.
TEST_F(Coalesced, MemoryOfAnotherCallIsRefused) {
  ProcessGroup g = make();
  std::vector<float> x(24), y(24);
  const auto part = [](std::vector<float>& v, std::size_t from, std::size_t n) {
    return std::span(v).subspan(from, n);
  };
  const auto said = [&](const std::vector<Call>& calls) {
    return std::string(error_of([&] { g.coalesced(calls).wait(); }).what());
  };
  const std::string expected = "; expected memory that no other call of the list uses [group \"x\", rank 0]";
  EXPECT_EQ(error_of([&] { g.send_recv(x, 1, x, 1).wait(); }).code(), ErrorCode::bad_argument);
  EXPECT_EQ(said({call::send(x, 1), call::recv(x, 1)}),
            "coalesced: out of call 1 (recv) overlaps in of call 0 (send)" + expected);
  EXPECT_EQ(said({call::recv(part(x, 0, 13), 1), call::send(part(x, 12, 2), 1)}),
            "coalesced: out of call 0 (recv) overlaps in of call 1 (send)" + expected);
  EXPECT_EQ(said({call::all_reduce(y, x), call::barrier(), call::broadcast(part(x, 3, 1), 1)}),
            "coalesced: out of call 2 (broadcast) overlaps out of call 0 (all_reduce)" + expected);
  // Conflicts among many calls, behind a call that reaches further, and of a block with its offset.
  std::vector<Call> many = adds(100);
  many.push_back(call::all_gather(part(x, 0, 4), part(y, 0, 12)));
  many.push_back(call::send(part(y, 2, 1), 1));
  EXPECT_EQ(said(many), "coalesced: out of call 100 (all_gather) overlaps in of call 101 (send)" + expected);
  const std::int64_t counts[] = {2, 2, 2}, even[] = {0, 8, 16}, odd[] = {2, 10, 18}, both[] = {4, 9, 20};
  EXPECT_EQ(said({call::all_gather_v(part(x, 0, 2), y, {counts, even}),
                  call::all_gather_v(part(x, 0, 2), y, {counts, both})}),
            "coalesced: out of call 1 (all_gather_v) overlaps out of call 0 (all_gather_v)" + expected);
  EXPECT_EQ(
      said({call::all_to_all_v(x, part(y, 0, 6), {counts, even}, {counts}), call::recv(part(x, 17, 1), 2)}),
      "coalesced: out of call 1 (recv) overlaps in of call 0 (all_to_all_v)" + expected);
  EXPECT_TRUE(recording.posted().empty()) << "before the first is sent";
  // These calls do not conflict. Their memory does not overlap, or is only read. Interleaved blocks,
  // neighbours, in place, no elements.
  g.coalesced({call::all_gather_v(part(y, 0, 2), y, {counts, even}),
               call::all_gather_v(part(x, 0, 2), y, {counts, odd}), call::send(part(y, 4, 4), 1),
               call::send(part(y, 4, 4), 2), call::send(x, 1), call::recv(part(y, 5, 0), 1)})
      .wait();
  g.coalesced({call::all_reduce(part(x, 0, 12)), call::all_reduce(part(x, 12, 12)),
               call::all_gather(part(y, 0, 8), y)})
      .wait();
}

// Random lists of few and many calls, sorted and unsorted, compared with a plain implementation of the rule.
TEST_F(Coalesced, MemoryIsJudgedAsByThePlainRule) {
  ProcessGroup g = make();
  constexpr std::size_t kBytes = 4096;
  std::vector<std::uint8_t> memory(kBytes);
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  std::array<int, 2> seen{};
  for (int trial = 0; trial < 400; ++trial) {
    struct Part {
      std::size_t at, n;
      bool written;
    };
    std::vector<Part> parts;
    std::vector<Call> calls;
    const std::size_t n = 2 + below(70);
    for (std::size_t i = 0; i < n; ++i) {
      // Each call gets a separate place, except one in ten, which may begin or end in a neighbouring
      // place.
      Part p{i * 56, 1 + below(56), below(2) == 0};
      if (below(10 * n) < 5) p = {below(kBytes - 200), below(200), below(2) == 0};
      parts.push_back(p);
    }
    if (trial % 2 == 0) std::shuffle(parts.begin(), parts.end(), random);
    for (const Part& p : parts) {
      const auto buffer = std::span(memory).subspan(p.at, p.n);
      calls.push_back(p.written ? call::recv(buffer, 1) : call::send(buffer, 1));
    }
    bool meet = false;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < i; ++k)
        meet |= (parts[i].written || parts[k].written) && parts[i].n > 0 && parts[k].n > 0 &&
                parts[i].at < parts[k].at + parts[k].n && parts[k].at < parts[i].at + parts[i].n;
    ++seen[meet ? 1 : 0];
    if (meet) {
      EXPECT_THAT(error_of([&] { g.coalesced(calls).wait(); }).what(), HasSubstr(" overlaps ")) << trial;
    } else {
      EXPECT_NO_THROW(g.coalesced(calls).wait()) << trial;
    }
  }
  EXPECT_GT(seen[0], 50);
  EXPECT_GT(seen[1], 50);
}

TEST_F(Coalesced, DoneWhenAllAre) {
  ProcessGroup g = make();
  recording.decide([](const OpState& s) { return s.op == Op::send ? kNever : Fate{}; });
  for (const std::size_t last : {0u, 1u, 2u}) {  // wherever the one that is not done stands
    std::vector<Call> calls = adds(3);
    calls[last] = call::send(view(a), 1);
    Work w = g.coalesced(calls);
    EXPECT_FALSE(w.done());
    EXPECT_FALSE(w.done());
    EXPECT_FALSE(w.wait_for(5ms));
    EXPECT_TRUE(w.valid());
    recording.let_go();
    EXPECT_TRUE(w.wait_for(5s));
    EXPECT_FALSE(w.valid());
    EXPECT_TRUE(w.done());
    EXPECT_TRUE(w.wait_for(0ns));
  }
}

TEST_F(Coalesced, WorksOfManyCallsMove) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.coalesced(adds(3));
  Work moved = std::move(w);
  EXPECT_FALSE(w.valid());  // NOLINT(bugprone-use-after-move): that it is empty is the point
  EXPECT_TRUE(w.done());
  EXPECT_FALSE(moved.done());
  recording.let_go();
  w = std::move(moved);
  w.wait();
  EXPECT_TRUE(recording.failed().empty());
}

// More calls than the ring holds: the batch is passed on to make room, and continues.
TEST_F(Coalesced, MoreThanTheRingHolds) {
  ProcessGroup g = make();
  recording.decide({.polls = 3});
  g.coalesced(adds(150)).wait();
  EXPECT_EQ(recording.posted().size(), 150u);
  const auto batches = recording.batches();
  EXPECT_EQ(batches[1], Ring::kSlots) << "handed on when the ring was full";
  EXPECT_EQ(batches.back(), 150u);
  EXPECT_EQ(batches.size() % 2, 0u) << "begun as often as ended";
}

TEST_F(Coalesced, AVeryLongChainNeedsNoStack) {
  ProcessGroup g = make();
  g.coalesced(adds(100'000)).wait();
  Work w = g.coalesced(adds(100'000));
  EXPECT_TRUE(w.wait_for(60s));
  recording.decide([&](const OpState& s) { return s.call == 299'999 ? kNever : Fate{}; });
  { const Work dropped = g.coalesced(adds(100'000)); }
  EXPECT_EQ(recording.failed().size(), 1u);
}

// Some calls were sent and the next finds no slot: peers would wait for a call that never comes.
TEST_F(Coalesced, WhatCannotBeSentWholeFailsTheGroup) {
  ProcessGroup g = make();
  recording.decide(kNever);
  std::vector<Call> calls = adds(100);
  for (std::size_t i = 64; i < 100; ++i) calls[i].options.deadline = 50ms;
  const Error e = error_of([&] { static_cast<void>(g.coalesced(calls)); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_STREQ(e.what(),
               "coalesced: rank 0 sent 64 of 100 calls: all_reduce: 64 calls in flight and none finished "
               "within 0.05 s [group \"x\", rank 0]");
  ASSERT_EQ(recording.failed().size(), 1u);
  EXPECT_THAT(recording.failed()[0].ranks, ElementsAre(0));
  EXPECT_EQ(recording.batches().size() % 2, 0u) << "the batch is ended";
  EXPECT_EQ(error_of([&] { static_cast<void>(g.barrier()); }).code(), ErrorCode::timeout);
}

TEST_F(Coalesced, WhoHoldsUpTheCallsInFlightIsToBlameForThat) {
  ProcessGroup g = make();
  recording.decide(kNever);
  recording.miss({1, 2}, "ranks 1, 2 had not arrived");
  std::vector<Call> calls = adds(100);
  for (std::size_t i = 64; i < 100; ++i) calls[i].options.deadline = 50ms;
  const Error e = error_of([&] { static_cast<void>(g.coalesced(calls)); });
  EXPECT_THAT(e.what(),
              HasSubstr("coalesced: rank 0 sent 64 of 100 calls: all_reduce: 64 calls in flight and "
                        "none finished within 0.05 s: ranks 1, 2 had not arrived"));
  EXPECT_THAT(e.ranks(), ElementsAre(1, 2));
  ASSERT_EQ(recording.failed().size(), 1u);
  EXPECT_THAT(recording.failed()[0].ranks, ElementsAre(1, 2));
}

TEST_F(Coalesced, AFullRingBeforeTheFirstFailsNobody) {
  ProcessGroup g = make();
  recording.decide(kNever);
  std::vector<Work> works;
  for (std::uint32_t k = 0; k < Ring::kSlots; ++k) works.push_back(g.send(view(a), 1));
  std::vector<float> c(12);
  const std::vector<Call> calls{call::recv(view(b), 1, {.deadline = 50ms}), call::recv(view(c), 1)};
  EXPECT_STREQ(error_of([&] { static_cast<void>(g.coalesced(calls)); }).what(),
               "recv: 64 calls in flight and none finished within 0.05 s [group \"x\", rank 0]");
  EXPECT_TRUE(recording.failed().empty());
  EXPECT_EQ(recording.batches().size() % 2, 0u);
  recording.let_go();
  for (Work& w : works) w.wait();
  recording.decide(Fate{});
  g.coalesced(calls).wait();
}

TEST_F(Coalesced, TheFirstThatFailsIsTold) {
  for (const int failing : {0, 1, 2}) {
    Recording own;
    Membership m;
    m.store = store;
    m.size = 2;
    m.name = fmt::format("x{}", failing);
    ProcessGroup g = ProcessGroup::create(context, own.factory(), m);
    own.set_quiet(false);
    own.decide([&](const OpState& s) {
      if (s.call != static_cast<std::uint64_t>(failing)) return Fate{.polls = 1};
      return Fate{
          .kind = Fate::fail,
          .polls = 1,
          .why = {
              .code = ErrorCode::peer_lost, .text = "rank 1 died", .op = s.op, .call = s.call, .ranks = {}}};
    });
    {
      Work w = g.coalesced(adds(3));
      EXPECT_EQ(error_of([&] { w.wait(); }).what(),
                fmt::format("rank 1 died [group \"x{0}\", rank 0, call {0}]", failing));
      EXPECT_FALSE(w.valid()) << "spent, with all that came after";
      EXPECT_TRUE(w.done());
    }
    EXPECT_EQ(own.quiesces(), 0) << "quiescing is the caller's to ask for";
    own.set_quiet(true);
  }
}

TEST_F(Coalesced, DroppingItFailsTheGroupOnceAndWaitsOnce) {
  ProcessGroup g = make();
  recording.decide(kNever);
  recording.set_quiet(false);
  {
    const Work coalesced = g.coalesced(adds(30));
    const Work single = g.barrier();
  }
  ASSERT_EQ(recording.failed().size(), 1u);
  EXPECT_THAT(recording.failed()[0].text, HasSubstr("rank 0 dropped the Work of a call in flight"));
  EXPECT_EQ(recording.quiesces(), 1) << "31 Works";
  EXPECT_EQ(recording.batches().size(), 2u);
  recording.set_quiet(true);
  EXPECT_TRUE(g.quiesce(1s));
}

TEST_F(Coalesced, AStreamIsOfTheGroupsDevice) {
  ProcessGroup g = make();
  const Stream elsewhere = Device{DeviceKind::cuda, 1};
  const std::string text = "barrier: stream is of cuda:1; expected cpu (the device of the group)";
  EXPECT_THAT(error_of([&] { g.barrier({.stream = elsewhere}).wait(); }).what(), HasSubstr(text));
  const Call calls[] = {call::barrier(), call::barrier({.stream = elsewhere})};
  EXPECT_THAT(error_of([&] { g.coalesced(calls).wait(); }).what(), HasSubstr(text));
  g.barrier().wait();
}

TEST_F(Coalesced, WaitOnAHostBackendWaitsForAll) {
  ProcessGroup g = make();
  recording.decide({.polls = 5});
  Work w = g.coalesced(adds(3));
  w.wait_on({});
  EXPECT_TRUE(w.done());
  recording.decide([](const OpState& s) {
    return Fate{.kind = Fate::fail,
                .why = {.code = ErrorCode::peer_lost, .text = "gone", .op = s.op, .ranks = {}}};
  });
  Work failing = g.coalesced(adds(2));
  EXPECT_EQ(error_of([&] { failing.wait_on({}); }).code(), ErrorCode::peer_lost);
  EXPECT_FALSE(failing.valid());
}

// Two threads in batches of their own, and a third without a batch. The calls of the backend alternate
// correctly (the recording backend checks that), and its last call ends a batch.
TEST_F(Coalesced, BatchesOfSeveralThreads) {
  ProcessGroup g = make();
  recording.decide({.polls = 2});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int k = 0; k < 200; ++k) {
        if (t == 3) {
          g.send(view(a), 1).wait();
        } else {
          const std::vector<Call> calls(k % 10 == 0 ? 80 : 3, call::send(view(a), 1));
          g.coalesced(calls).wait();
        }
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(recording.posted().size(), 200u + 3 * (20 * 80 + 180 * 3));
  EXPECT_EQ(recording.batches().size() % 2, 0u);
  EXPECT_EQ(recording.batches().back() <= recording.posted().size(), true);
}

// ---- with peers ----

class Works : public testing::TestWithParam<Ranks> {
 protected:
  void run(int n, const std::function<void(Rank&)>& body) {
    const RankOptions options;
    run_ranks(GetParam(), n, body, options);
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, Works, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

Tensor filled(Rank& rank, std::int64_t count, float value) {
  Tensor t(rank.context, Shape{count}, DType::f32);
  std::fill(t.f32().begin(), t.f32().end(), value);
  return t;
}

// Each of the many steps of the call moves data.
TEST_P(Works, WaitForEndsInTheMiddleOfACallThatMoves) {
  RankOptions options;
  options.hooks.in_chunk = [](std::uint64_t) { std::this_thread::sleep_for(20ms); };
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        const Tensor t(r.context, Shape{4 << 20}, DType::u8, Memory::shared);
        std::memset(t.data(), 1, static_cast<std::size_t>(t.bytes()));
        Work w = r.group().all_reduce(t, t);
        EXPECT_FALSE(w.wait_for(30ms));  // eight chunks
        EXPECT_TRUE(w.wait_for(20s));
        EXPECT_EQ(t.as<std::uint8_t>().back(), 2);
      },
      options);
}

TEST_P(Works, WaitForLeavesACallPending) {
  run(2, [](Rank& rank) {
    const Tensor t = filled(rank, 100'000, static_cast<float>(rank.rank + 1));
    ProcessGroup& g = rank.group();
    if (rank.rank == 1) rank.store->get("rank 0 has seen it pending", Deadline::after(20s));
    Work w = g.all_reduce(t, t);
    if (rank.rank == 0) {
      EXPECT_FALSE(w.wait_for(10ms));
      EXPECT_FALSE(w.done());
      EXPECT_TRUE(w.valid());
      rank.store->set("rank 0 has seen it pending", "");
    }
    EXPECT_TRUE(w.wait_for(20s));
    EXPECT_EQ(t.f32()[99'999], 3.f);
  });
}

// Calls as many as the ring holds, waited for from the last to the first; then many more than it holds, kept.
TEST_P(Works, ManyOutstanding) {
  run(3, [](Rank& rank) {
    ProcessGroup& g = rank.group();
    for (const int count : {static_cast<int>(Ring::kSlots), 65, 300}) {
      std::vector<Tensor> tensors;
      std::vector<Work> works;
      for (int k = 0; k < count; ++k) {
        tensors.push_back(filled(rank, k % 16 == 0 ? 70'000 : 5, static_cast<float>(rank.rank + k)));
        works.push_back(g.all_reduce(tensors.back(), tensors.back()));
      }
      for (int k = count - 1; k >= 0; --k) {
        works[static_cast<std::size_t>(k)].wait();
        EXPECT_EQ(tensors[static_cast<std::size_t>(k)].f32()[4], static_cast<float>(3 + 3 * k));
      }
    }
  });
}

TEST_P(Works, CoalescedMoreThanTheRingHolds) {
  run(2, [](Rank& rank) {
    std::vector<Tensor> tensors;
    std::vector<Call> calls;
    for (int k = 0; k < 200; ++k) {
      tensors.push_back(filled(rank, k % 20 == 0 ? 70'000 : 7, static_cast<float>(rank.rank + k)));
      calls.push_back(call::all_reduce(tensors.back(), tensors.back()));
    }
    rank.group().coalesced(calls).wait();
    for (int k = 0; k < 200; ++k)
      EXPECT_EQ(tensors[static_cast<std::size_t>(k)].f32()[6], static_cast<float>(1 + 2 * k));
  });
}

// Every rank to every other at once, large enough that a send waits for its match.
TEST_P(Works, CoalescedMessagesOfAllPairs) {
  run(4, [](Rank& rank) {
    constexpr std::int64_t kCount = 50'000;
    std::vector<Tensor> in;
    std::vector<Call> calls;
    const Tensor out = filled(rank, kCount, static_cast<float>(rank.rank));
    for (int peer = 0; peer < rank.size; ++peer) {
      in.push_back(filled(rank, kCount, -1));
      if (peer != rank.rank) calls.push_back(call::send(out, peer));
    }
    for (int peer = 0; peer < rank.size; ++peer)
      if (peer != rank.rank) calls.push_back(call::recv(in[static_cast<std::size_t>(peer)], peer));
    Work w = rank.group().coalesced(calls);
    while (!w.done()) std::this_thread::yield();
    for (int peer = 0; peer < rank.size; ++peer)
      if (peer != rank.rank) {
        EXPECT_EQ(in[static_cast<std::size_t>(peer)].f32()[kCount - 1], static_cast<float>(peer));
      }
  });
}

TEST_P(Works, CoalescedWaitedForInOppositeOrders) {
  run(2, [](Rank& rank) {
    ProcessGroup a = rank.group().duplicate(), b = rank.group().duplicate();
    for (int round = 0; round < 10; ++round) {
      std::vector<Tensor> tensors;
      std::vector<Call> calls[2];
      for (int k = 0; k < 10; ++k) {
        tensors.push_back(filled(rank, k % 3 == 0 ? 100'000 : 9, static_cast<float>(rank.rank)));
        calls[k % 2].push_back(call::all_reduce(tensors.back(), tensors.back()));
      }
      Work on_a = a.coalesced(calls[0]), on_b = b.coalesced(calls[1]);
      (rank.rank == 0 ? on_a : on_b).wait();
      (rank.rank == 0 ? on_b : on_a).wait();
      for (const Tensor& t : tensors) EXPECT_EQ(t.f32()[8], 1.f);
    }
  });
}

// Threads that share one group, each with batches of messages of its own tag.
TEST_P(Works, CoalescedFromSeveralThreads) {
  run(2, [](Rank& rank) {
    ProcessGroup& g = rank.group();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        for (int k = 0; k < 40; ++k) {
          const Tensor out = filled(rank, 3000, static_cast<float>(100 * t + k));
          const Tensor in = filled(rank, 3000, -1);
          g.coalesced({call::send(out, 1 - rank.rank, {.tag = t}), call::recv(in, 1 - rank.rank, {.tag = t})})
              .wait();
          ASSERT_EQ(in.f32()[2999], static_cast<float>(100 * t + k));
        }
      });
    for (std::thread& t : threads) t.join();
  });
}

void expect_no_source(const Work& w, const std::string& text) {
  const Error e = error_of([&] { return w.source(); });
  EXPECT_EQ(e.code(), ErrorCode::bad_argument);
  EXPECT_EQ(std::string(e.what()), text);
}
void expect_no_sources(const Work& w, const std::string& text) {
  const Error e = error_of([&] { return w.sources(); });
  EXPECT_EQ(e.code(), ErrorCode::bad_argument);
  EXPECT_EQ(std::string(e.what()), text);
}

TEST_P(Works, ASourceIsOfARecvThatIsDone) {
  run(2, [](Rank& rank) {
    const std::string none =
        "source: the Work is of no recv, or of one that has failed; expected one that is done";
    const std::string single =
        "sources: the Work is not of coalesced calls, or of some that have failed; call source()";
    ProcessGroup& g = rank.group();
    const int other = 1 - rank.rank;
    expect_no_source(Work(), none);
    expect_no_sources(Work(), single);
    int in = rank.rank, a = -1, b = -1, c = -1;
    Work barrier = g.barrier();
    expect_no_source(barrier, none);
    barrier.wait();
    expect_no_source(barrier, none);

    Work any = g.recv(a, any_source, {.tag = 1}), named = g.recv(b, other, {.tag = 2});
    Work many = g.coalesced({call::recv(c, any_source, {.tag = 3}), call::barrier()});
    expect_no_source(any, "source: the recv is not done yet");
    expect_no_sources(any, single);
    EXPECT_EQ(named.source(), other);  // it names its source itself
    expect_no_source(many, "source: the Work is of coalesced calls; expected one recv, or call sources()");
    expect_no_sources(many, "sources: recv 0 from any_source is not done yet");
    rank.meet("asked");
    for (int tag = 1; tag <= 3; ++tag) {
      Work sent = g.send(in, other, {.tag = tag});
      expect_no_source(sent, none);
      sent.wait();
      expect_no_source(sent, none);
    }
    wait_all(any, named, many);
    EXPECT_EQ(any.source(), other);
    EXPECT_EQ(named.source(), other);
    EXPECT_THAT(many.sources(), ElementsAre(other));
    expect_no_source(many, "source: the Work is of coalesced calls; expected one recv, or call sources()");
    Work without = g.coalesced({call::barrier(), call::barrier()});
    EXPECT_THAT(without.sources(), ElementsAre());
    without.wait();

    Work fails = g.recv(a, any_source), several = g.coalesced({call::recv(b, any_source), call::barrier()});
    rank.meet("in flight");
    g.abort("enough");
    EXPECT_EQ(error_of([&] { fails.wait(); }).code(), ErrorCode::aborted);
    EXPECT_EQ(error_of([&] { several.wait(); }).code(), ErrorCode::aborted);
    expect_no_source(fails, none);
    expect_no_sources(several, single);
  });
}

// If a rank destroys the Work of a batch half-way, the batches of its peers fail with the reason.
TEST_P(Works, DroppingACoalescedWorkIsToldToPeers) {
  run(2, [](Rank& rank) {
    const Tensor t = filled(rank, 1000, 1), other = filled(rank, 1000, 0);
    ProcessGroup& g = rank.group();
    if (rank.rank == 0) {
      const Work dropped = g.coalesced({call::recv(t, 1, {.tag = 1}), call::recv(other, 1, {.tag = 2})});
    }
    const Error e = error_of([&] { g.barrier().wait(); });
    EXPECT_EQ(e.code(), ErrorCode::aborted);
    EXPECT_THAT(e.what(), HasSubstr("recv: rank 0 dropped the Work of a call in flight"));
    EXPECT_TRUE(g.quiesce(5s));
  });
}

}  // namespace
}  // namespace weft::test::work_test
