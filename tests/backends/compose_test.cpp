// Tests of composition except for results, which the conformance suite tests: the order of inner calls, texts
// of failures, and that nothing is left behind.
#include "backends/compose/compose.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "support/counting_allocator.hpp"
#include "support/masked_backend.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::compose_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

// ---- Order: over a backend that ends its calls on request

class Fake final : public Backend {
 public:
  explicit Fake(const Mask& mask) : traits_(traits_of(mask)) {}
  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override {
    std::erase(ended, &s);
    posted.push_back(&s);
  }
  Step poll(OpState& s) noexcept override {
    return std::find(ended.begin(), ended.end(), &s) != ended.end() ? Step::done : Step::pending;
  }
  bool healthy() noexcept override { return true; }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    story = "rank " + std::to_string(s.peer) + " of call " + std::to_string(s.call);
    return {s.peer};
  }
  void fail(const Failure& why) noexcept override { cause = why; }
  Failure failure() const override { return cause; }
  bool quiet() const noexcept override { return true; }
  bool quiesce(Deadline, std::span<const MemoryRange>) noexcept override { return true; }
  void announce_sleep(bool) noexcept override {}
  void batch(bool begin) noexcept override { batches += begin; }
  bool wait_on(OpState&, Stream) noexcept override { return true; }

  void end_all() { ended = posted; }
  std::vector<Op> ops() const {
    std::vector<Op> all;
    for (const OpState* s : posted) all.push_back(s->op);
    return all;
  }

  std::vector<OpState*> posted, ended;
  Failure cause;
  int batches = 0;

 private:
  Traits traits_;
};

// Rank 0 of two.
class InnerCalls : public testing::Test {
 protected:
  void over(const Mask& mask) {
    auto fake = std::make_unique<Fake>(mask);
    inner = fake.get();
    composed = compose(context, std::move(fake), 0, 2);
  }
  OpState call(Op op, std::uint64_t number) {
    OpState s{};
    s.op = op;
    s.call = number;
    s.in = in.data();
    s.out = out.data();
    s.in_count = s.out_count = 16;
    s.root = 0;
    s.peer = 1;
    return s;
  }
  std::array<std::byte, 64> in{}, out{};
  Context context;
  Fake* inner = nullptr;
  std::unique_ptr<Backend> composed;
};

TEST_F(InnerCalls, LaterCollectivesWaitUntilTheLastStepIsPosted) {
  over(messages_only());
  OpState sum = call(Op::all_reduce, 0), cast = call(Op::broadcast, 1), message = call(Op::send, 0);
  composed->post(sum);
  composed->post(cast);
  EXPECT_THAT(inner->ops(), ElementsAre(Op::recv, Op::send));  // the slices of `in`
  composed->post(message);
  EXPECT_THAT(inner->ops(), ElementsAre(Op::recv, Op::send, Op::send));  // the user's own goes at once
  EXPECT_EQ(inner->posted.back(), &message);
  EXPECT_EQ(composed->poll(sum), Step::pending);
  inner->end_all();
  EXPECT_EQ(composed->poll(sum), Step::advanced);
  EXPECT_THAT(inner->ops(), ElementsAre(Op::recv, Op::send, Op::send,  // the slices of `out`
                                        Op::recv, Op::send,            // and then the root's data
                                        Op::send));
  EXPECT_EQ(composed->poll(sum), Step::pending);
  inner->end_all();
  EXPECT_EQ(composed->poll(sum), Step::done);
  EXPECT_EQ(inner->batches, 3);
}

TEST_F(InnerCalls, MessagesHaveTagsThatUsersNeverHave) {
  over(messages_only());
  for (std::uint64_t k = 0; k < kComposedTags + 3; ++k) {
    OpState cast = call(Op::broadcast, k);
    inner->posted.clear();
    composed->post(cast);
    ASSERT_EQ(inner->posted.size(), 1u);
    ASSERT_LT(inner->posted[0]->tag, 0);
    ASSERT_GE(inner->posted[0]->tag, -kComposedTags);
    inner->end_all();
    while (composed->poll(cast) != Step::done) {}
  }
}

TEST_F(InnerCalls, InnerCollectivesAreNumberedWithoutGaps) {
  over(some());
  OpState product = call(Op::all_reduce, 0), cast = call(Op::broadcast, 1), sum = call(Op::all_reduce, 2);
  product.reduce = ReduceOp::prod;
  composed->post(product);
  inner->end_all();
  composed->poll(product);
  inner->end_all();
  EXPECT_EQ(composed->poll(product), Step::done);
  inner->posted.clear();
  composed->post(cast);
  composed->post(sum);
  ASSERT_THAT(inner->ops(), ElementsAre(Op::broadcast, Op::all_reduce));
  EXPECT_EQ(inner->posted[0]->call, 0u);
  EXPECT_EQ(inner->posted[1]->call, 1u);
}

TEST_F(InnerCalls, AStreamMayWaitForMovesButNotForArithmetic) {
  over(messages_only());
  OpState cast = call(Op::broadcast, 0), sum = call(Op::all_reduce, 1), message = call(Op::recv, 0);
  cast.in = cast.out;  // nothing to copy
  composed->post(cast);
  composed->post(sum);
  composed->post(message);
  EXPECT_TRUE(composed->wait_on(cast, {}));
  EXPECT_FALSE(composed->wait_on(sum, {}));
  EXPECT_TRUE(composed->wait_on(message, {}));
}

TEST_F(InnerCalls, WhatIsMissingIsToldOfTheUsersCall) {
  over(messages_only());
  OpState sum = call(Op::all_reduce, 7), cast = call(Op::broadcast, 8);
  composed->post(sum);
  composed->post(cast);
  std::string story;
  EXPECT_THAT(composed->missing(sum, story), ElementsAre(1));
  EXPECT_EQ(story, "rank 1 has not done its part (by messages)");
  EXPECT_THAT(composed->missing(cast, story), ElementsAre(1));
  EXPECT_EQ(story, "it comes after all_reduce [call 7]: rank 1 has not done its part (by messages)");
}

TEST_F(InnerCalls, FailuresComeBackAsTheyWereTold) {
  over(messages_only());
  OpState sum = call(Op::all_reduce, 7);
  composed->post(sum);
  composed->fail({.code = ErrorCode::timeout, .text = "late", .op = Op::all_reduce, .call = 7, .ranks = {1}});
  const Failure f = composed->failure();
  EXPECT_EQ(f.op, Op::all_reduce);
  EXPECT_EQ(f.call, 7u);
  EXPECT_EQ(f.text, "late");
  EXPECT_THAT(f.ranks, ElementsAre(1));
}

// ---- Over shm with a part hidden

RankOptions over(const Mask& mask, Duration deadline = 20s) {
  RankOptions options;
  options.factory = masked(mask);
  options.deadline = deadline;
  return options;
}

// Staging memory comes from the allocator of the program, and is given back, even by calls that have failed.
TEST(Staging, ComesFromTheProgramsAllocator) {
  CountingAllocator memory;
  RankOptions options = over(messages_only());
  options.context.allocator = memory.functions();
  run_ranks(
      Ranks::threads, 3,
      [&](Rank& r) {
        std::vector<float> x(999, static_cast<float>(r.rank)), y(999);
        r.group().all_reduce(x, y).wait();
        for (const float f : y) ASSERT_EQ(f, 3.0f);
        r.group().barrier().wait();
        EXPECT_GT(memory.asked(), 0);
      },
      options);
  EXPECT_EQ(memory.blocks(), 0u);
}

TEST(Staging, WithoutMemoryTheCallFailsOnAllRanks) {
  for (const auto fault : {CountingAllocator::Fault::gives_none, CountingAllocator::Fault::throws}) {
    CountingAllocator memory;
    RankOptions options = over(messages_only());
    options.context.allocator = memory.functions();
    run_ranks(
        Ranks::threads, 3,
        [&](Rank& r) {
          std::vector<float> x(999), y(999);
          r.group().all_reduce(x, y).wait();
          r.meet("all have one");
          memory.fail_after(0, fault);
          const Error e = error_of([&] { r.group().all_reduce(x, y).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
          EXPECT_EQ(e.op(), Op::all_reduce);
          EXPECT_EQ(e.call(), 1u);
          EXPECT_THAT(e.what(),
                      StartsWith("all_reduce: 3996 bytes of local memory cannot be allocated: the host's "
                                 "allocator, asked for 4032 bytes aligned to 64, "));
          EXPECT_THAT(e.what(), HasSubstr(fault == CountingAllocator::Fault::gives_none
                                              ? "64, gave none"
                                              : "64, threw: the pool is closed"));
          EXPECT_TRUE(r.group().quiesce(5s));
        },
        options);
    EXPECT_EQ(memory.blocks(), 0u);
  }
}

class Failures : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Failures, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

TEST_P(Failures, AnAbsentRankIsNamedWithTheUsersCall) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        const Tensor t(r.context, Shape{1000}, DType::f32, Memory::local);
        for (std::int64_t i = 0; i < 1000; ++i) store(t, i, 1);
        r.group().all_reduce(t, t).wait();
        if (r.rank == 2) {
          r.store->get("they gave up", Deadline::after(20s));
          return;
        }
        const Error e = error_of([&] { r.group().all_reduce(t, t).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_EQ(e.op(), Op::all_reduce);
        EXPECT_EQ(e.call(), 1u);
        EXPECT_THAT(e.ranks(), ElementsAre(2));
        EXPECT_THAT(e.what(), StartsWith("all_reduce: not finished within 0.5 s: rank 2 has not done its "
                                         "part (by messages)"));
        EXPECT_THAT(e.what(), HasSubstr("call 1]"));
        EXPECT_TRUE(r.group().quiesce(5s));
        if (r.store->add("done", 1) == 2) r.store->set("they gave up", "1");
      },
      over(messages_only(), 500ms));
}

TEST_P(Failures, AMismatchBetweenMessagesIsTheUsersCall) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        const Tensor t(r.context, Shape{100}, DType::f32, Memory::local);
        r.group().barrier().wait();
        r.group().broadcast(t, t, 0).wait();
        const std::int64_t count = r.rank == 0 ? 10 : 20;
        const Tensor in = t.slice_flat(0, Shape{count});
        const Tensor out(r.context, Shape{2 * count}, DType::f32, Memory::local);
        const Error e = error_of([&] { r.group().all_gather(in, out).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_EQ(e.op(), Op::all_gather) << e.what();
        EXPECT_EQ(e.call(), 2u) << e.what();
      },
      over(messages_only()));
}

// Each would combine by its own rule.
TEST_P(Failures, DifferentReductionsNeverMeet) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        const Tensor t(r.context, Shape{100}, DType::f32, Memory::local);
        for (std::int64_t i = 0; i < 100; ++i) store(t, i, 1);
        r.group().all_reduce(t, t).wait();
        const ReduceOp op = r.rank == 0 ? ReduceOp::min : ReduceOp::max;
        const Error e = error_of([&] { r.group().all_reduce(t, t, {.op = op}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_EQ(e.op(), Op::all_reduce);
      },
      over(messages_only(), 300ms));
}

TEST_F(InnerCalls, TransportsThatCompareCallsSeeThatReductionsDiffer) {
  CallRecord records[2];
  for (const int k : {0, 1}) {
    over(all_to_all_v_only());
    OpState sum = call(Op::all_reduce, 0);
    sum.reduce = k == 0 ? ReduceOp::min : ReduceOp::max;
    composed->post(sum);
    ASSERT_THAT(inner->ops(), ElementsAre(Op::all_to_all_v));
    records[k] = record_of(*inner->posted[0], 2);
  }
  EXPECT_EQ(records[0].op, Op::all_reduce) << "what ranks tell each other is the user's call";
  EXPECT_NE(records[0], records[1]);
}

// The inner backend counts its own calls only, and two of the user's calls went as messages: the two counts
// differ.
TEST_P(Failures, AMismatchOfNativeCallsHasTheUsersNumbers) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        const Tensor t(r.context, Shape{100}, DType::f32, Memory::local);
        for (std::int64_t i = 0; i < 100; ++i) store(t, i, 1);
        r.group().all_reduce(t, t, {.op = ReduceOp::prod}).wait();
        r.group().all_reduce(t, t, {.op = ReduceOp::premul_sum(2)}).wait();
        const Error e = error_of(
            [&] { r.group().all_reduce(t, t, {.op = r.rank ? ReduceOp::min : ReduceOp::max}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_EQ(e.op(), Op::all_reduce);
        EXPECT_EQ(e.call(), 2u);
        EXPECT_THAT(e.what(), HasSubstr("[call 2]"));
        EXPECT_THAT(e.what(), testing::Not(HasSubstr("[call 0]")));
      },
      over(some()));
}

TEST(KilledRanks, AreNamed) {
  RankProcesses ranks(
      3,
      [](Rank& r) {
        const Tensor t(r.context, Shape{300000}, DType::bf16, Memory::local);
        std::memset(t.data(), 0, static_cast<std::size_t>(t.bytes()));
        r.group().all_reduce(t, t).wait();
        r.store->add("ready", 1);
        if (r.rank == 1) r.store->get("never", Deadline::after(60s));
        const Error e = error_of([&] { r.group().all_reduce(t, t).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(e.ranks(), ElementsAre(1));
        EXPECT_THAT(e.what(), HasSubstr("rank 1 (process"));
        EXPECT_TRUE(r.group().quiesce(5s));
      },
      over(messages_only()));
  while (ranks.store().add("ready", 0) < 3) {}
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

// A large call that is aborted halfway leaves nothing behind that disturbs the next group.
TEST_P(Failures, AnAbortedCallLeavesTheNextGroupAlone) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        const Tensor t(r.context, Shape{500000}, DType::f32, Memory::local);
        for (std::int64_t i = 0; i < 500000; ++i) store(t, i, value(r.rank, i));
        {
          ProcessGroup first = r.group().duplicate();
          Work a = first.all_reduce(t, t, {.op = ReduceOp::prod});
          if (r.rank == 0) first.abort("enough");
          const Error e = error_of([&] {
            a.wait();
            first.barrier().wait();
          });
          EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
          EXPECT_TRUE(first.quiesce(5s));
        }
        for (std::int64_t i = 0; i < 500000; ++i) store(t, i, value(r.rank, i));
        r.group().all_reduce(t, t).wait();
        for (std::int64_t i = 0; i < 500000; ++i)
          ASSERT_EQ(load(t, i), value(0, i) + value(1, i) + value(2, i));
      },
      over(messages_only()));
}

}  // namespace
}  // namespace weft::test::compose_test
