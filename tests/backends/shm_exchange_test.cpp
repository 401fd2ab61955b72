// Exchanges over shared memory as the transport makes them: which way bytes go, and the memory of pairs of
// ranks. exchange_test.cpp tests the results of exchanges, and tests/mesh/window_ways_test.cpp tests them
// through windows.
#include "backends/shm/exchange/exchanges.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "host/arena.hpp"
#include "support/run_ranks.hpp"

namespace weft::test::shm_exchange_test {
namespace {

using namespace std::chrono_literals;

/// One rank of a group of two, without the layers above the transport. Each exchange is with the other rank.
class End {
 public:
  End(Rank& r, const std::string& name)
      : group_(shm::init_group({.context = r.context,
                                .store = r.store,
                                .token = name,
                                .name = name,
                                .rank = r.rank,
                                .size = r.size,
                                .process_rank = r.rank,
                                .deadline = Deadline::after(20s)})),
        exchanges_(group_) {}
  ~End() {
    group_.mine().left.store(shm::kLeft);
    group_.wake_all();
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  const shm::Group& group() const { return group_; }
  int other() const { return 1 - group_.rank; }
  std::unique_ptr<PlannedExchange> plan(std::int64_t runs, std::int64_t run, std::int64_t step,
                                        int fields) const {
    ExchangePlan plan;
    ExchangePart part{other(), {}};
    for (int f = 0; f < fields; ++f) {
      plan.fields.push_back(DType::f64);
      part.boxes.push_back({f, 0, {runs, run}, {step, 1}});
    }
    plan.sends = plan.receives = {part};
    return exchanges_.plan(plan);
  }
  /// Runs it that often, to the end. Returns how many sends of each Holds went to the other rank meanwhile.
  std::array<std::uint64_t, 3> run(PlannedExchange& planned, const std::vector<ExchangeField>& fields,
                                   int times) {
    const auto before = exchanges_.sent_to(other());
    for (int i = 0; i < times; ++i) {
      const ExchangeCall call{&planned, fields.data(), 1};
      OpState s;
      s.op = Op::exchange;
      s.call = call_++;
      s.exchange = &call;
      exchanges_.post(s);
      const Deadline limit = Deadline::after(20s);
      Step step = Step::pending;
      while ((step = exchanges_.poll(s)) != Step::done && step != Step::failed && !limit.passed())
        sched_yield();
      EXPECT_EQ(step, Step::done);
      if (step != Step::done) break;
    }
    const auto after = exchanges_.sent_to(other());
    return {after[0] - before[0], after[1] - before[1], after[2] - before[2]};
  }

 private:
  const shm::Group group_;
  shm::Exchanges exchanges_;
  std::uint64_t call_ = 0;
};

// Fields of `count` elements each, and where they lie.
struct Fields {
  Fields(Rank& r, int n, std::int64_t count, Memory memory) {
    for (int f = 0; f < n; ++f) {
      in.emplace_back(Tensor::zeros(r.context, Shape{count}, DType::f64, memory));
      out.emplace_back(Tensor::zeros(r.context, Shape{count}, DType::f64, memory));
      for (std::int64_t i = 0; i < count; ++i)
        in.back().as<double>()[static_cast<std::size_t>(i)] =
            static_cast<double>(1000 * r.rank + i % 997 + f);
      list.push_back({in.back().data(), out.back().data()});
    }
  }
  // Whether the other rank's elements are there.
  void expect(int other, std::int64_t runs, std::int64_t run, std::int64_t step) const {
    for (std::size_t f = 0; f < out.size(); ++f)
      for (std::int64_t i = 0; i < runs; ++i)
        for (std::int64_t j = 0; j < run; ++j) {
          const std::int64_t at = i * step + j;
          ASSERT_EQ(out[f].as<double>()[static_cast<std::size_t>(at)],
                    static_cast<double>(1000 * other + at % 997 + static_cast<std::int64_t>(f)));
        }
  }
  std::vector<Tensor> in, out;
  std::vector<ExchangeField> list;
};

constexpr int kAllWays = static_cast<int>(shm::kWays * shm::Ways::kTries) + 1;

// More than a few bytes are not packed if ranks share the memory: the receiver copies them from their
// place.
TEST(ShmExchange, SharedMemoryIsCopiedOnce) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    End end(r, "g");
    for (const std::int64_t columns : {200, 5000, 300'000}) {
      const Fields fields(r, 3, columns, Memory::shared);
      const auto planned = end.plan(1, columns, columns, 3);
      end.run(*planned, fields.list, 3);  // segments are mapped
      const bool packed = end.group().oversubscribed && 24 * columns <= shm::kPackedOnSharedCores;
      EXPECT_EQ(end.run(*planned, fields.list, 20)[packed ? 0 : 1], 20U) << columns;
      fields.expect(end.other(), 1, columns, columns);
    }
    r.meet("over");
  });
}

// Elements far apart in shared memory: packing is tried, too, and measured.
TEST(ShmExchange, ScatteredElementsOfSharedMemoryGoBothWaysAtFirst) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    End end(r, "g");
    constexpr std::int64_t kRuns = 4096, kStep = 16;
    const Fields fields(r, 1, kRuns * kStep, Memory::shared);
    const auto planned = end.plan(kRuns, 1, kStep, 1);
    const auto sent = end.run(*planned, fields.list, kAllWays + 3);
    EXPECT_GE(sent[0], shm::Ways::kTries);
    EXPECT_GE(sent[1], shm::Ways::kTries / 2);
    fields.expect(end.other(), kRuns, 1, kStep);
    r.meet("over");
  });
}

// If the memory is not shared, long runs are packed and copied by the kernel at first, so that each is
// measured; short runs are packed alone.
TEST(ShmExchange, OtherMemoryGoesEachWayAtFirst) {
  for (const bool off : {false, true}) {
    if (off) ::setenv("WEFT_SINGLE_COPY", "off", 1);
    run_ranks(Ranks::processes, 2, [&](Rank& r) {
      End end(r, "g");
      EXPECT_FALSE(off && end.group().may_pull);
      constexpr std::int64_t kColumns = 8192;
      const Fields rows(r, 1, kColumns, Memory::local), columns(r, 1, 4 * kColumns, Memory::local);
      const auto one_run = end.plan(1, kColumns, kColumns, 1), many_runs = end.plan(kColumns, 1, 4, 1);
      const auto sent = end.run(*one_run, rows.list, kAllWays);
      rows.expect(end.other(), 1, kColumns, kColumns);
      EXPECT_GE(sent[0], 4U);
      EXPECT_EQ(sent[1], 0U);
      EXPECT_GE(sent[2], end.group().may_pull ? 4U : 0U);
      EXPECT_EQ(sent[0] + sent[2], static_cast<std::uint64_t>(kAllWays));
      EXPECT_EQ(end.run(*many_runs, columns.list, kAllWays),
                (std::array<std::uint64_t, 3>{static_cast<std::uint64_t>(kAllWays), 0, 0}));
      columns.expect(end.other(), kColumns, 1, 4);
      r.meet("over");
    });
    ::unsetenv("WEFT_SINGLE_COPY");
  }
}

// The memory of a pair is made at its first exchange, and given back when both ranks have left the group:
// the rank that left first gives it back at its next use of such memory.
TEST(ShmExchange, TheMemoryOfAPairIsMadeAtItsFirstUseAndGivenBack) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const auto in_use = [&] { return r.context.arena().counters().in_use_bytes; };
    const Fields fields(r, 1, 100, Memory::local);
    std::size_t before = 0;
    for (int round = 0; round < 4; ++round) {
      std::optional<End> end(std::in_place, r, "g" + std::to_string(round));
      const std::size_t made = in_use();
      if (round == 0) before = made;
      const auto planned = end->plan(1, 100, 100, 1);
      end->run(*planned, fields.list, 2);
      fields.expect(end->other(), 1, 100, 100);
      EXPECT_GE(in_use(), before + sizeof(shm::Ring));
      EXPECT_LT(in_use(), before + 2 * sizeof(shm::Ring)) << "that of the round before was not given back";
      r.meet("exchanged " + std::to_string(round));
      if (round % 2 == r.rank) end.reset();
      r.meet("one has left " + std::to_string(round));
      end.reset();
      r.meet("both have left " + std::to_string(round));
    }
  });
}

}  // namespace
}  // namespace weft::test::shm_exchange_test
