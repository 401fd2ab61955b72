// The group's own part of every call, over a backend without communication: the arguments that submit()
// passes on, numbers, deadlines, the full ring, Works and handles that outlive each other, processes that
// fork.
#include "weft/group/process_group.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "backends/plugins/forwarding_backend.hpp"
#include "base/text/plain_streams.hpp"
#include "group/group_state.hpp"
#include "support/processes.hpp"
#include "support/recorded_group.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::process_group_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

const Fate kNever{.kind = Fate::never};

class Group : public RecordedGroup {
 protected:
  Error create_error(const std::function<void(Membership&)>& change) {
    Membership m = membership();
    change(m);
    return error_of([&] { ProcessGroup::create(context, recording.factory(), m); });
  }
};

struct Handed {
  Op op;
  const void *in, *out;
  std::int64_t in_count, out_count;
  DType dtype = DType::f32;
  int root = -1, peer = -1, tag = 0;
};

void expect_handed(const OpState& s, const Handed& h) {
  SCOPED_TRACE(name(h.op));
  EXPECT_EQ(s.op, h.op);
  EXPECT_EQ(static_cast<const void*>(s.in), h.in);
  EXPECT_EQ(static_cast<const void*>(s.out), h.out);
  EXPECT_EQ(s.in_count, h.in_count);
  EXPECT_EQ(s.out_count, h.out_count);
  EXPECT_EQ(s.dtype, h.dtype);
  EXPECT_EQ(s.root, h.root);
  EXPECT_EQ(s.peer, h.peer);
  EXPECT_EQ(s.tag, h.tag);
}

TEST_F(Group, TheBackendIsHandedExactlyTheCall) {
  ProcessGroup g = make();
  std::vector<std::int16_t> i(12);
  g.all_reduce(view(a.data(), 12), view(b.data(), 12), {.op = ReduceOp::max, .order = Order::canonical})
      .wait();
  g.all_gather(view(a.data(), 4), view(b.data(), 12)).wait();
  g.reduce_scatter(view(a.data(), 12), view(b.data(), 4), {.op = ReduceOp::avg}).wait();
  g.broadcast(view(a.data(), 5), view(b.data(), 5), 0).wait();
  g.broadcast(view(a.data(), 7), view(b.data(), 5), 2).wait();  // elsewhere `in` is ignored
  g.barrier().wait();
  g.send(view(i.data(), 3), 1, {.tag = 7}).wait();
  g.recv(view(i.data(), 2), 2, {.tag = 2147483647}).wait();
  const std::vector<OpState> posted = recording.posted();
  ASSERT_EQ(posted.size(), 8u);
  expect_handed(posted[0], {Op::all_reduce, a.data(), b.data(), 12, 12});
  EXPECT_EQ(posted[0].reduce, ReduceOp::max);
  EXPECT_EQ(posted[0].order, Order::canonical);
  expect_handed(posted[1], {Op::all_gather, a.data(), b.data(), 4, 12});
  expect_handed(posted[2], {Op::reduce_scatter, a.data(), b.data(), 12, 4});
  EXPECT_EQ(posted[2].reduce, ReduceOp::avg);
  EXPECT_EQ(posted[2].order, Order::native);
  expect_handed(posted[3], {Op::broadcast, a.data(), b.data(), 5, 5, DType::f32, 0});
  expect_handed(posted[4], {Op::broadcast, nullptr, b.data(), 0, 5, DType::f32, 2});
  expect_handed(posted[5], {Op::barrier, nullptr, nullptr, 0, 0, DType::u8});
  expect_handed(posted[6], {Op::send, i.data(), nullptr, 3, 0, DType::i16, -1, 1, 7});
  expect_handed(posted[7], {Op::recv, nullptr, i.data(), 0, 2, DType::i16, -1, 2, 2147483647});
}

TEST_F(Group, CollectivesAndMessagesAreNumberedApart) {
  ProcessGroup g = make();
  for (int k = 0; k < 3; ++k) {
    g.barrier().wait();
    g.send(view(a), 1).wait();
    g.all_reduce(view(a), view(a)).wait();
    g.recv(view(a), 2).wait();
  }
  error_of([&] { g.all_gather(view(a), view(a)).wait(); });  // a call that is refused takes no number
  g.barrier().wait();
  std::vector<std::uint64_t> collectives, messages;
  for (const OpState& s : recording.posted())
    (s.op == Op::send || s.op == Op::recv ? messages : collectives).push_back(s.call);
  EXPECT_THAT(collectives, ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(messages, ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_F(Group, TheGroupInitIsHandedToTheFactory) {
  Membership m = membership(3, 1);
  m.process_rank = 5;
  const ProcessGroup first = ProcessGroup::create(context, recording.factory(), m);
  const ProcessGroup second = ProcessGroup::create(context, recording.factory(), m);
  EXPECT_EQ(first.rank(), 1);
  EXPECT_EQ(first.size(), 3);
  EXPECT_EQ(first.name(), "x");
  EXPECT_EQ(first.backend(), "recording");
  EXPECT_EQ(&first.context(), &context);
  const auto made = recording.made();
  ASSERT_EQ(made.size(), 2u);
  EXPECT_EQ(made[0].name, "x");
  EXPECT_EQ(made[0].rank, 1);
  EXPECT_EQ(made[0].size, 3);
  EXPECT_EQ(made[0].process_rank, 5);
  EXPECT_NE(made[0].token, made[1].token);  // the same name again is another group
}

TEST_F(Group, CollectivesOfOneRankNeverReachABackend) {
  ProcessGroup g = make(1);
  g.all_reduce(view(a), view(b), {.op = ReduceOp::avg}).wait();
  EXPECT_EQ(b, a);
  b.assign(12, 3.f);
  Work w = g.all_gather(view(b), view(a));
  EXPECT_TRUE(w.done());
  EXPECT_EQ(a, b);
  g.reduce_scatter(view(a), view(a)).wait();
  g.broadcast(view(a), view(a), 0).wait();
  g.barrier().wait();
  EXPECT_TRUE(recording.posted().empty());
  EXPECT_EQ(recording.polls(), 0);
  g.send(view(a), 0).wait();  // a message to itself does
  EXPECT_EQ(recording.posted().size(), 1u);
  g.abort("enough");
  const Error e = error_of([&] { g.barrier().wait(); });
  EXPECT_STREQ(e.what(), "barrier: aborted by rank 0: enough [group \"x\", rank 0]");
}

TEST_F(Group, ADeadlineNamesOpCallAndRanks) {
  ProcessGroup g = make();
  for (int k = 0; k < 3; ++k) g.barrier().wait();
  g.send(view(a), 1).wait();
  recording.decide(kNever);
  recording.miss({1, 2}, "ranks 1, 2 had not arrived");
  Work w = g.all_reduce(view(a), view(a), {.deadline = 100ms});
  const auto began = Clock::now();
  const Error e = error_of([&] { w.wait(); });
  EXPECT_GE(Clock::now() - began, 95ms);
  EXPECT_LT(Clock::now() - began, 5s);
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_EQ(e.op(), Op::all_reduce);
  EXPECT_EQ(e.call(), 3u);
  EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(1, 2));
  EXPECT_TRUE(e.quiesced());
  EXPECT_STREQ(
      e.what(),
      "all_reduce: not finished within 0.1 s: ranks 1, 2 had not arrived [group \"x\", rank 0, call 3]");
  EXPECT_FALSE(w.valid());  // spent
  ASSERT_EQ(recording.failed().size(), 1u);
  // Later calls fail with the same cause and reach no backend.
  const std::size_t posted = recording.posted().size();
  EXPECT_STREQ(error_of([&] { g.barrier().wait(); }).what(), e.what());
  EXPECT_STREQ(error_of([&] { g.send(view(a), 1).wait(); }).what(), e.what());
  EXPECT_EQ(recording.posted().size(), posted);
}

TEST_F(Group, TheClockStartsAtTheFirstPolls) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.barrier({.deadline = 150ms});
  std::this_thread::sleep_for(300ms);
  EXPECT_FALSE(w.done());
  const auto began = Clock::now();
  EXPECT_EQ(error_of([&] { w.wait(); }).code(), ErrorCode::timeout);
  EXPECT_GE(Clock::now() - began, 145ms);
}

TEST_F(Group, TheGroupsDeadlineHoldsWhereTheCallHasNone) {
  Membership m = membership();
  m.deadline = 50ms;
  ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
  recording.decide(kNever);
  Work patient = g.recv(view(a), 1, {.deadline = 1h});
  const Error e = error_of([&] { g.recv(view(b), 1).wait(); });
  EXPECT_THAT(e.what(), HasSubstr("recv: not finished within 0.05 s"));
  EXPECT_EQ(e.call(), 1u);
  EXPECT_STREQ(error_of([&] { patient.wait(); }).what(), e.what());  // the group has failed for all
}

TEST_F(Group, TheLongestDeadlineDoesNotPass) {
  Membership m = membership();
  m.deadline = Duration::max();
  ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
  recording.decide({.polls = 410});
  g.barrier({.deadline = Duration::max()}).wait();
  recording.decide({.polls = 410});
  EXPECT_TRUE(g.barrier().wait_for(Duration::max()));
}

TEST_F(Group, ABackendsFailureIsToldWithTheTail) {
  ProcessGroup g = make(3, 2);
  recording.decide({.kind = Fate::fail,
                    .polls = 3,
                    .why = {.code = ErrorCode::peer_lost,
                            .text = "broadcast: rank 1 fell over",
                            .op = Op::broadcast,
                            .call = 0,
                            .ranks = {1}}});
  recording.set_quiet(false);
  Work first = g.broadcast({}, view(b), 1), second = g.barrier();
  const Error e = error_of([&] { first.wait(); });
  EXPECT_EQ(e.code(), ErrorCode::peer_lost);
  EXPECT_STREQ(e.what(), "broadcast: rank 1 fell over [group \"x\", rank 2, call 0]");
  EXPECT_FALSE(e.quiesced());
  EXPECT_STREQ(error_of([&] { second.wait(); }).what(), e.what());
  EXPECT_FALSE(g.quiesce(1ms));
  const auto exposed = recording.exposed();
  ASSERT_EQ(exposed.size(), 1u);  // `out` of the broadcast; a barrier has none
  EXPECT_EQ(static_cast<void*>(exposed[0].data), static_cast<void*>(b.data()));
  EXPECT_EQ(exposed[0].bytes, 48u);
  recording.set_quiet(true);
  EXPECT_TRUE(g.quiesce(1ms));
  EXPECT_TRUE(error_of([&] { g.barrier().wait(); }).quiesced());
}

// Every call of the backend fails, and its failure() throws.
class Speechless final : public Backend {
 public:
  const Traits& traits() const noexcept override { return *known_traits("shm"); }
  void post(OpState&) noexcept override {}
  Step poll(OpState&) noexcept override { return Step::failed; }
  bool healthy() noexcept override { return true; }
  std::vector<int> missing(const OpState&, std::string&) noexcept override { return {}; }
  void fail(const Failure&) noexcept override {}
  Failure failure() const override { throw 42; }
  bool quiet() const noexcept override { return true; }
  bool quiesce(Deadline, std::span<const MemoryRange>) noexcept override { return true; }
  void announce_sleep(bool) noexcept override {}
};

TEST_F(Group, ABackendThatCannotSayWhyFailsTheCall) {
  ProcessGroup g = ProcessGroup::create(
      context, [](const GroupInit&) { return std::make_unique<Speechless>(); }, membership());
  EXPECT_EQ(error_text([&] { g.barrier().wait(); }),
            "system: barrier: backend shm cannot say why: failure() threw: an exception of type int "
            "[group \"x\", rank 0, call 0]");
}

TEST_F(Group, AnUnhealthyBackendFailsWhoWaits) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.barrier();
  EXPECT_FALSE(w.wait_for(5ms));
  recording.lose({.code = ErrorCode::peer_lost, .text = "rank 2 died", .ranks = {2}});
  const auto began = Clock::now();
  EXPECT_STREQ(error_of([&] { w.wait(); }).what(), "barrier: rank 2 died [group \"x\", rank 0, call 0]");
  EXPECT_LT(Clock::now() - began, 1s);
}

TEST_F(Group, AFullRingDrivesUntilASlotIsFree) {
  ProcessGroup g = make();
  std::vector<Work> works;
  recording.decide({.polls = 20});
  for (int k = 0; k < 200; ++k) works.push_back(g.barrier());
  EXPECT_EQ(recording.posted().size(), 200u);
  for (Work& w : works) w.wait();
}

TEST_F(Group, AFullRingTimesOut) {
  ProcessGroup g = make();
  recording.decide(kNever);
  std::vector<Work> works;
  for (std::uint32_t k = 0; k < Ring::kSlots; ++k) works.push_back(k % 2 ? g.barrier() : g.send(view(a), 1));
  const auto began = Clock::now();
  const Error e = error_of([&] { g.recv(view(a), 1, {.deadline = 100ms}).wait(); });
  EXPECT_GE(Clock::now() - began, 95ms);
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_EQ(e.op(), Op::recv);
  EXPECT_EQ(e.call(), kNoCall);
  EXPECT_STREQ(e.what(), "recv: 64 calls in flight and none finished within 0.1 s [group \"x\", rank 0]");
  // Nothing was posted and nothing has failed, so the call proceeds once a slot is free.
  EXPECT_EQ(recording.posted().size(), 64u);
  recording.decide(Fate{});
  recording.let_go();
  g.recv(view(a), 1, {.deadline = 5s}).wait();
  for (Work& w : works) w.wait();
}

// Several threads wait for a slot, some asleep, while another frees them.
TEST_F(Group, AFullRingServesManyThreads) {
  ProcessGroup g = make();
  constexpr int kThreads = 6, kCalls = 400;
  recording.decide({.polls = 150});
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      std::vector<Work> works;
      for (int k = 0; k < kCalls; ++k) {
        works.push_back(g.send(view(a), 1));
        if (works.size() == 40) {
          for (Work& w : works) w.wait();
          works.clear();
        }
      }
      for (Work& w : works) w.wait();
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(recording.posted().size(), static_cast<std::size_t>(kThreads * kCalls));
}

// Another thread frees slots at the last moment before the waiting thread falls asleep.
TEST_F(Group, ASlotFreedWhileFallingAsleepIsTaken) {
  ProcessGroup g = make();
  recording.decide(kNever);
  std::vector<Work> works;
  for (std::uint32_t k = 0; k < Ring::kSlots; ++k) works.push_back(g.send(view(a), 1));
  std::atomic<bool> asleep{false}, freed{false};
  std::thread other([&] {
    while (!asleep) std::this_thread::yield();
    recording.let_go();
    EXPECT_TRUE(works[0].done());  // and all others with it
    freed = true;
  });
  recording.on_sleep([&] {
    asleep = true;
    while (!freed) std::this_thread::yield();
  });
  recording.decide(Fate{});
  g.barrier({.deadline = 5s}).wait();
  other.join();
  recording.on_sleep({});
  for (Work& w : works) w.wait();
}

TEST_F(Group, WaitForLeavesACallPending) {
  ProcessGroup g = make();
  recording.decide(kNever);
  Work w = g.barrier();
  const auto began = Clock::now();
  EXPECT_FALSE(w.wait_for(30ms));
  EXPECT_GE(Clock::now() - began, 30ms);
  EXPECT_FALSE(w.wait_for(0ns));
  EXPECT_TRUE(w.valid());
  recording.let_go();
  EXPECT_TRUE(w.wait_for(5s));
  EXPECT_FALSE(w.valid());
  EXPECT_TRUE(w.wait_for(0ns));  // already waited for
  w.wait();
}

TEST_F(Group, DonePollsOnceAndNeverBlocks) {
  ProcessGroup g = make();
  recording.decide({.polls = 2});
  Work w = g.barrier();
  EXPECT_FALSE(w.done());
  EXPECT_EQ(recording.polls(), 1);
  EXPECT_FALSE(w.done());
  EXPECT_TRUE(w.done());
  EXPECT_EQ(recording.polls(), 3);
  EXPECT_TRUE(w.done());
  EXPECT_EQ(recording.polls(), 3);
}

// Collectives end in order; messages do not wait for them.
TEST_F(Group, ALaterCollectiveIsNotPolledBeforeTheEarlier) {
  ProcessGroup g = make();
  recording.decide([](const OpState& s) { return s.op == Op::all_reduce ? kNever : Fate{}; });
  Work first = g.all_reduce(view(a), view(a)), second = g.barrier(), message = g.send(view(b), 1);
  EXPECT_TRUE(message.done());
  EXPECT_FALSE(second.wait_for(10ms));
  recording.let_go();
  second.wait();
  EXPECT_TRUE(first.done());
}

TEST_F(Group, WaitingOnOneGroupDrivesTheOthersOfTheRank) {
  ProcessGroup g = make(), h = make();
  recording.decide([](const OpState& s) { return s.op == Op::barrier ? kNever : Fate{.polls = 3}; });
  Work mine = g.barrier(), other = h.send(view(a), 1);
  EXPECT_FALSE(mine.wait_for(200ms));
  const int before = recording.polls();
  EXPECT_TRUE(other.done());
  EXPECT_EQ(recording.polls(), before);  // it was done already: nothing had to be polled
  recording.let_go();
  mine.wait();
}

TEST_F(Group, WorksMove) {
  ProcessGroup g = make();
  recording.decide({.polls = 2});
  Work w = g.barrier();
  Work moved = std::move(w);
  EXPECT_FALSE(w.valid());  // NOLINT: what a moved-from Work says is promised
  EXPECT_TRUE(w.done());
  EXPECT_TRUE(moved.valid());
  w = std::move(moved);
  w.wait();
  EXPECT_TRUE(recording.failed().empty());
  Work none;
  EXPECT_FALSE(none.valid());
  none.wait();
}

TEST_F(Group, AssigningOverAnUnfinishedWorkAborts) {
  ProcessGroup g = make(3, 1);
  recording.decide(kNever);
  Work w = g.all_reduce(view(a), view(a));
  w = Work();
  ASSERT_EQ(recording.failed().size(), 1u);
  EXPECT_EQ(recording.failed()[0].code, ErrorCode::aborted);
  EXPECT_STREQ(error_of([&] { g.barrier().wait(); }).what(),
               "all_reduce: rank 1 dropped the Work of a call in flight [group \"x\", rank 1, call 0]");
}

TEST_F(Group, ADroppedWorkThatIsDoneIsFine) {
  ProcessGroup g = make();
  { const Work w = g.barrier(); }  // done at the poll that dropping makes
  EXPECT_TRUE(recording.failed().empty());
  g.barrier().wait();
}

TEST_F(Group, AWorkOutlivesItsHandle) {
  recording.decide({.polls = 5});
  Work w;
  {
    ProcessGroup g = make();
    w = g.all_reduce(view(a), view(a));
  }
  EXPECT_EQ(recording.destroyed(), 0);
  w.wait();
  EXPECT_EQ(recording.destroyed(), 1);
  EXPECT_TRUE(recording.failed().empty());
}

TEST_F(Group, HandlesMove) {
  ProcessGroup g = make();
  ProcessGroup h = std::move(g);
  EXPECT_FALSE(g);  // NOLINT: what a moved-from handle says is promised
  EXPECT_TRUE(h);
  h.barrier().wait();
  h = make(2);
  EXPECT_EQ(h.size(), 2);
  EXPECT_EQ(recording.destroyed(), 1);
}

TEST_F(Group, AGroupWithFailedCallsIsDestroyed) {
  {
    ProcessGroup g = make();
    recording.decide(kNever);
    Work w = g.barrier();
    g.abort("over");
    EXPECT_STREQ(error_of([&] { w.wait(); }).what(),
                 "barrier: aborted by rank 0: over [group \"x\", rank 0, call 0]");
    EXPECT_EQ(recording.failed()[0].ranks, std::vector<int>{0});
  }
  EXPECT_EQ(recording.destroyed(), 1);
}

// A group whose peers may still write into exposed memory keeps that memory, and itself, forever. (A separate
// process keeps the leak out of this one.)
TEST(Groups, OneThatCannotQuiesceIsKept) {
  const ProcessResult result = run_in_child([] {
    std::string logged;
    Context context(ContextOptions{.log_sink = [&](LogLevel, std::string_view text) { logged += text; }});
    Recording recording;
    Membership m;
    m.store = make_local_store();
    m.size = 2;
    m.name = "x";
    Tensor t(context, Shape{100}, DType::f32, Memory::shared);
    const std::byte* const lent = t.data();
    {
      ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
      recording.decide(kNever);
      recording.set_quiet(false);
      Work w = g.all_reduce(t, t);
      g.abort("over");
      EXPECT_EQ(error_of([&] { w.wait(); }).code(), ErrorCode::aborted);
    }
    EXPECT_EQ(recording.destroyed(), 0);
    EXPECT_THAT(logged, HasSubstr("group \"x\": a peer may still touch buffers of a failed call"));
    t = Tensor();
    for (int k = 0; k < 20; ++k) {
      const Tensor fresh(context, Shape{100}, DType::f32, Memory::shared);
      EXPECT_NE(fresh.data(), lent);
    }
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

TEST_F(Group, AForkedChildIsToldAtItsFirstCall) {
  ProcessGroup g = make();
  ProcessGroup alone = make(1);
  recording.decide(kNever);
  Work w = g.barrier();
  const int parent = getpid();
  const ProcessResult result = run_in_child([&] {
    const auto text = [&](const char* what) {
      return std::string(what) + ": this process was forked from process " + std::to_string(parent) +
             " after its Context was made; make a new Context in the child, or fork before the first one";
    };
    const auto expect = [&](const char* what, const std::function<void()>& call) {
      const Error e = error_of(call);
      EXPECT_EQ(e.code(), ErrorCode::unsupported);
      EXPECT_EQ(e.what(), text(what));
    };
    expect("all_reduce", [&] { g.all_reduce(view(a), view(a)).wait(); });
    expect("barrier", [&] { alone.barrier().wait(); });
    expect("send", [&] { g.send(view(a), 1).wait(); });
    const int ranks[] = {0, 1};
    expect("subgroup", [&] { g.subgroup("s", ranks); });
    expect("abort", [&] { g.abort("why"); });
    expect("quiesce", [&] { g.quiesce(1ms); });
    expect("ProcessGroup::create", [&] { make(); });
    expect("wait", [&] { w.wait(); });
    // Dropping handles does nothing there: the backend is the parent's.
    g = ProcessGroup();
    alone = ProcessGroup();
    EXPECT_EQ(recording.destroyed(), 0);
    EXPECT_TRUE(recording.failed().empty());
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
  recording.let_go();  // in the parent nothing has happened
  w.wait();
}

// weft composes no reductions of a device's memory, so such a transport cannot add in canonical order.
TEST_F(Group, CanonicalOrderOnADevice) {
  class OnADevice final : public ForwardingBackend {
   public:
    explicit OnADevice(std::unique_ptr<Backend> inner)
        : ForwardingBackend(std::move(inner)), traits_(this->inner().traits()) {
      traits_.name = "gpu";
      traits_.device = true;
      traits_.native_is_canonical = false;
    }
    const Traits& traits() const noexcept override { return traits_; }

   private:
    Traits traits_;
  };
  const auto factory = [inner = recording.factory()](const GroupInit& init) {
    return std::make_unique<OnADevice>(inner(init));
  };
  Membership m = membership(1);
  EXPECT_EQ(ProcessGroup::create(context, factory, m).order(), Order::native);
  m.order = Order::canonical;
  expect_error(ErrorCode::unsupported,
               "group \"x\": order is canonical, but backend gpu adds in an order of its own, and weft "
               "composes no reductions of memory of a device",
               [&] { ProcessGroup::create(context, factory, m); });
}

TEST_F(Group, CreateSaysWhatIsWrong) {
  const auto expect = [&](const char* text, const std::function<void(Membership&)>& change) {
    const Error e = create_error(change);
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_STREQ(e.what(), text);
  };
  expect("group \"x\": size is 0; expected 1 or more", [](Membership& m) { m.size = 0; });
  expect("group \"x\": rank is 3; expected 0 to 2 (size 3)", [](Membership& m) { m.rank = 3; });
  expect("group \"x\": rank is -1; expected 0 to 2 (size 3)", [](Membership& m) { m.rank = -1; });
  expect("group \"x\": store is null; ranks need it to find each other",
         [](Membership& m) { m.store = nullptr; });
  expect("group \"x\": deadline is 0 ns; expected more than 0", [](Membership& m) { m.deadline = 0s; });
  expect("group \"x\": deadline is -5 ns; expected more than 0", [](Membership& m) { m.deadline = -5ns; });
  expect("group \"x\": order is 2; expected 0 (native) or 1 (canonical)",
         [](Membership& m) { m.order = static_cast<Order>(2); });
  expect_error(ErrorCode::bad_argument,
               "group \"x\": the factory is empty; expected a function that makes a backend",
               [&] { ProcessGroup::create(context, BackendFactory(), membership()); });
  EXPECT_TRUE(recording.made().empty());
  const Error e = error_of([&] { ProcessGroup::create(context, "carrier-pigeon", membership()); });
  EXPECT_EQ(e.code(), ErrorCode::unsupported);
  EXPECT_THAT(e.what(), testing::HasSubstr("backend \"carrier-pigeon\" was not found"));
}

// Doorbells are few and only shared memory needs them; without one, a transport of thousands of ranks still
// works.
TEST_F(Group, ARankMayHaveAnyNumber) {
  Membership m = membership(3000, 2000);
  EXPECT_EQ(ProcessGroup::create(context, recording.factory(), m).rank(), 2000);
  m.process_rank = 1'000'000;
  m.name = "y";
  EXPECT_EQ(ProcessGroup::create(context, recording.factory(), m).size(), 3000);
}

TEST_F(Group, WhatAFactoryThrowsIsTheCallersToSee) {
  const BackendFactory refuses = [](const GroupInit&) -> std::unique_ptr<Backend> {
    throw Error(ErrorCode::system, "no wires");
  };
  EXPECT_STREQ(error_of([&] { ProcessGroup::create(context, refuses, membership()); }).what(), "no wires");
  make().barrier().wait();  // the context is none the worse
}

// Then this rank throws an Error, too, and the other ranks need not wait for it.
TEST_F(Group, AFactoryMayThrowAnything) {
  const BackendFactory refuses = [](const GroupInit& init) -> std::unique_ptr<Backend> {
    if (init.rank == 0) throw 42;
    join(init, "x", {}, 0);
    return nullptr;
  };
  std::string said;
  std::jthread other(
      [&] { said = error_text([&] { ProcessGroup::create(context, refuses, membership(2, 1)); }); });
  EXPECT_EQ(error_text([&] { ProcessGroup::create(context, refuses, membership(2, 0)); }),
            "system: group \"x\": an exception of type int [rank 0]");
  other.join();
  EXPECT_EQ(said, "system: group \"x\": rank 0 cannot make it: an exception of type int [rank 1]");
}

TEST_F(Group, SubgroupSaysWhatIsWrong) {
  ProcessGroup g = make(4, 2);
  const auto expect = [&](const std::string& text, std::vector<int> ranks) {
    const Error e = error_of([&] { g.subgroup("s", ranks); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    EXPECT_EQ(e.what(), "subgroup \"s\": " + text + " [group \"x\", rank 2]");
  };
  expect("ranks is empty", {});
  expect("ranks holds 4; expected 0 to 3", {2, 4});
  expect("ranks holds -1; expected 0 to 3", {2, -1});
  expect("ranks holds 3 twice", {3, 2, 3});
  expect("ranks 0, 1 do not include this rank, 2; only members may call it", {0, 1});
}

TEST_F(Group, ASubgroupIsMadeByTheSameFactory) {
  ProcessGroup g = make(4, 2);
  const int ranks[] = {3, 2, 0}, other[] = {2, 3};
  ProcessGroup s = g.subgroup("s", ranks);
  EXPECT_EQ(s.rank(), 1);
  EXPECT_EQ(s.size(), 3);
  EXPECT_EQ(s.name(), "s");
  const ProcessGroup again = g.subgroup("s", ranks), third = g.subgroup("s", other);
  const ProcessGroup inner = s.subgroup("s", {1, 0});
  EXPECT_EQ(inner.rank(), 0);
  const auto made = recording.made();
  ASSERT_EQ(made.size(), 5u);
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].process_rank, 2);  // the rank's place in its process stays
    for (std::size_t k = 0; k < i; ++k) EXPECT_NE(made[i].token, made[k].token);
  }
  s.barrier().wait();
  EXPECT_EQ(recording.posted().back().call, 0u);  // numbered on its own
}

// If the handle was made by default or moved from, every function throws an Error, and none crashes.
TEST_F(Group, AnEmptyHandleIsRefusedByEveryFunction) {
  ProcessGroup made = make(), moved = std::move(made);
  ProcessGroup none;
  const int ranks[] = {0};
  const std::vector<std::int64_t> counts = {1, 1, 1};
  for (ProcessGroup* const g : {&none, &made}) {
    EXPECT_FALSE(*g);
    const auto refused = [](std::string_view what, const auto& f) {
      const Error e = error_of(f);
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_EQ(e.what(),
                std::string(what) +
                    ": empty ProcessGroup: it was made by default, moved from, left, or is of a rank without "
                    "a color in split()");
    };
    refused("rank", [&] { g->rank(); });
    refused("size", [&] { g->size(); });
    refused("name", [&] { g->name(); });
    refused("context", [&] { g->context(); });
    refused("backend", [&] { g->backend(); });
    refused("traits", [&] { g->traits(); });
    refused("all_reduce", [&] { g->all_reduce(view(a), view(b)).wait(); });
    refused("reduce", [&] { g->reduce(view(a), view(b), 0).wait(); });
    refused("broadcast", [&] { g->broadcast(view(a), view(b), 0).wait(); });
    refused("all_gather", [&] { g->all_gather(view(a), view(b)).wait(); });
    refused("all_gather_v", [&] { g->all_gather_v(view(a), view(b), {counts}).wait(); });
    refused("reduce_scatter", [&] { g->reduce_scatter(view(a), view(b)).wait(); });
    refused("reduce_scatter_v", [&] { g->reduce_scatter_v(view(a), view(b), {counts}).wait(); });
    refused("gather", [&] { g->gather(view(a), view(b), 0).wait(); });
    refused("scatter", [&] { g->scatter(view(a), view(b), 0).wait(); });
    refused("all_to_all", [&] { g->all_to_all(view(a), view(b)).wait(); });
    refused("all_to_all_v", [&] { g->all_to_all_v(view(a), view(b), {counts}, {counts}).wait(); });
    refused("barrier", [&] { g->barrier().wait(); });
    refused("send", [&] { g->send(view(a), 1).wait(); });
    refused("recv", [&] { g->recv(view(a), 1).wait(); });
    refused("coalesced", [&] { g->send_recv(view(a), 1, view(b), 1).wait(); });
    refused("coalesced", [&] { g->coalesced({call::barrier()}).wait(); });
    refused("coalesced", [&] { g->coalesced(std::span<const Call>()).wait(); });
    refused("subgroup", [&] { g->subgroup("s", ranks); });
    refused("split", [&] { g->split(0); });
    refused("duplicate", [&] { g->duplicate(); });
    refused("shrink", [&] { g->shrink(); });
    refused("parent_ranks", [&] { g->parent_ranks(); });
    refused("abort", [&] { g->abort("why"); });
    refused("quiesce", [&] { g->quiesce(1s); });
    refused("trace_json", [&] { g->trace_json(); });
    refused("trace_chrome", [&] { g->trace_chrome(); });
  }
  EXPECT_EQ(moved.size(), 3);
}

TEST_F(Group, AFactoryThatReturnsNullIsRefused) {
  const Error e = error_of([&] {
    ProcessGroup::create(
        context, [](const GroupInit&) { return std::unique_ptr<Backend>(); }, membership(1));
  });
  EXPECT_EQ(e.code(), ErrorCode::unsupported);
  EXPECT_STREQ(e.what(), "group \"x\": the transport's factory (a plug-in's `make`) returned null [rank 0]");
}

// Segments of weft's own, and those of the others that are mapped here, leave the program most of a limit.
TEST(AddressLimit, MuchOfItStaysFreeWhileRanksShareMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space that this test takes away";
#endif
  const auto child = run_in_child([] {
    std::size_t pages = 0;
    FileIn("/proc/self/statm") >> pages;
    const rlim_t bytes = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t{640} << 20);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    run_ranks(Ranks::processes, 3, [](Rank& r) {
      Tensor x(r.context, {1 << 16}, DType::f32, Memory::shared);
      std::fill(x.f32().begin(), x.f32().end(), 1.0f);
      r.group().all_reduce(x).wait();
      EXPECT_EQ(x.f32()[0], 3.0f);
      void* const block = std::malloc(std::size_t{150} << 20);  // of the 640 MiB
      EXPECT_NE(block, nullptr);
      std::free(block);
    });
    return 0;
  });
  EXPECT_TRUE(child.ok()) << to_string(child);
}

}  // namespace
}  // namespace weft::test::process_group_test
