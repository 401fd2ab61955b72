// Exchanges over shared memory inside the transport: the way in which bytes are copied, and the memory of
// pairs of ranks. exchange_test.cpp tests the results of exchanges, and tests/mesh/window_ways_test.cpp tests
// them through windows.
#include "backends/shm/exchange/exchanges.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "host/arena.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"

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
        pairs_(group_),
        exchanges_(group_, pairs_) {}
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
  /// Rows of `parts` elements, by these numbers; empty: as they lie.
  std::unique_ptr<PlannedExchange> plan(const std::vector<std::int64_t>& from,
                                        const std::vector<std::int64_t>& into, std::int64_t rows,
                                        std::int64_t parts) const {
    ExchangePlan plan;
    plan.fields = {DType::f64};
    plan.sends = {{other(), {{0, 0, {rows, parts}, {parts, 1}, from}}}};
    plan.receives = {{other(), {{0, 0, {rows, parts}, {parts, 1}, into}}}};
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
  shm::PairMemory pairs_;
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
  // Whether the elements of the other rank have arrived.
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

// The receiver takes rows from their place in the sender's memory, by the list of either side, if the
// sender's list fits a slot. A list with one step is none.
TEST(ShmExchange, IndicesAreSentWithThePlacesIfASlotHoldsThem) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    End end(r, "g");
    constexpr auto kMost = static_cast<std::int64_t>(shm::kListNumbers);
    for (const std::int64_t rows : {std::int64_t{5000}, kMost, kMost + 1}) {
      constexpr std::int64_t kParts = 16;
      std::vector<std::int64_t> shuffled, behind;
      for (std::int64_t i = 0; i < rows; ++i) {
        shuffled.push_back(i * 7919 % rows);
        behind.push_back(rows - 1 - i);
      }
      const auto at = [](const std::vector<std::int64_t>& list, std::int64_t i) {
        return list.empty() ? i : list[static_cast<std::size_t>(i)];
      };
      const std::vector<std::int64_t> none;
      using Lists = std::vector<const std::vector<std::int64_t>*>;
      for (const auto* list : Lists{&none, &shuffled, &behind})
        for (const auto* to : Lists{&none, &shuffled}) {
          const Fields fields(r, 1, rows * kParts, Memory::shared);
          const auto planned = end.plan(*list, *to, rows, kParts);
          end.run(*planned, fields.list, 3);  // segments are mapped
          const auto sent = end.run(*planned, fields.list, 5);
          EXPECT_EQ(sent[list == &shuffled && rows > kMost ? 0 : 1], 5U);
          for (std::int64_t i = 0; i < rows * kParts; ++i) {
            const std::int64_t from = at(*list, i / kParts) * kParts + i % kParts;
            const std::int64_t place = at(*to, i / kParts) * kParts + i % kParts;
            ASSERT_EQ(fields.out[0].as<double>()[static_cast<std::size_t>(place)],
                      static_cast<double>(1000 * end.other() + from % 997));
          }
        }
    }
    r.meet("over");
  });
}

// Packed bytes of one exchange take the place of another's indices in the slots: these are written anew.
TEST(ShmExchange, IndicesAndPackedBytesShareTheSlots) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    End end(r, "g");
    constexpr std::int64_t kRows = 500, kParts = 16;
    std::vector<std::int64_t> shuffled;
    for (std::int64_t i = 0; i < kRows; ++i) shuffled.push_back(i * 7 % kRows);
    const Fields shared(r, 1, kRows * kParts, Memory::shared), local(r, 1, kRows * kParts, Memory::local);
    const std::vector<std::int64_t> none;
    const auto listed = end.plan(shuffled, none, kRows, kParts), packed = end.plan(none, none, kRows, kParts);
    for (int round = 0; round < 40; ++round) {
      std::memset(shared.out[0].data(), 0, static_cast<std::size_t>(shared.out[0].bytes()));
      // A plan that is made anew each time has the same boxes, and another number.
      const auto again = end.plan(shuffled, none, kRows, kParts);
      end.run(round % 2 == 0 ? *listed : *again, shared.list, 1);
      for (std::int64_t i = 0; i < kRows * kParts; ++i)
        ASSERT_EQ(
            shared.out[0].as<double>()[static_cast<std::size_t>(i)],
            static_cast<double>(1000 * end.other() +
                                (shuffled[static_cast<std::size_t>(i / kParts)] * kParts + i % kParts) % 997))
            << round;
      end.run(*packed, local.list, 1 + round % 3);
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

// The memory of a pair is allocated at its first exchange, and freed when both ranks have left the group: the
// rank that left first frees it at its next use of such memory.
TEST(ShmExchange, TheMemoryOfAPairIsMadeAtItsFirstUseAndGivenBack) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const auto in_use = [&] { return arena_of(r.context).counters().in_use_bytes; };
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

// Each rank sends 100 elements to the other.
ExchangePlan swap(const Rank& r) {
  ExchangePlan plan;
  plan.fields = {DType::f64};
  plan.sends = plan.receives = {{1 - r.rank, {{0, 0, {100}, {1}}}}};
  return plan;
}

// Groups that are made and destroyed reuse the same memory, even in a program that allocates no shared memory
// itself.
TEST(ShmExchange, GroupsOneAfterAnotherUseTheSameMemory) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const Fields fields(r, 1, 100, Memory::local);
    for (int i = 0; i < 20; ++i) {
      auto group = ProcessGroup::create(r.context, "shm", r.membership("g" + std::to_string(i)));
      group.exchange(swap(r), fields.list).wait();
    }
    const Arena::Counters all = arena_of(r.context).counters();
    EXPECT_EQ(all.quarantined_bytes, 0U);
    EXPECT_LE(all.in_use_bytes + all.cached_bytes, 3 * (sizeof(shm::Ring) + 4096));
    r.meet("over");
  });
}

// Takes the rest of the arena's first segment, so that the memory of a pair lies in a segment that the other
// rank has not mapped yet.
RankOptions small_segments() {
  RankOptions options;
  options.context.segment_bytes = std::size_t{1} << 20;
  options.deadline = 5s;
  return options;
}
Tensor fill_segment(Rank& r) {
  return {r.context, Shape{std::int64_t{900} << 10}, DType::u8, Memory::shared};
}

// An exchange that is done on one rank reaches the other rank, even if the process of the first has ended.
TEST(ShmExchange, WhatIsSentArrivesAfterTheSenderHasEnded) {
  RankProcesses ranks(
      2,
      [](Rank& r) {
        ProcessGroup& group = r.group();
        ExchangePlan plan = swap(r);
        (r.rank == 0 ? plan.sends : plan.receives).clear();
        const Fields fields(r, 1, 100, Memory::local);
        if (r.rank == 1) {
          const Tensor fill = fill_segment(r);
          group.exchange(plan, fields.list).wait();
          return;
        }
        r.store->get("late", Deadline::after(10s));
        group.exchange(plan, fields.list).wait();
        fields.expect(1, 1, 100, 100);
      },
      small_segments());
  std::this_thread::sleep_for(500ms);
  ranks.store().set("late", "");
  ranks.finish();
}

// The receiver maps the memory while it waits in another call, and the sender goes on.
TEST(ShmExchange, ARankThatWaitsElsewhereMapsTheMemory) {
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        ProcessGroup& group = r.group();
        ExchangePlan plan = swap(r);
        (r.rank == 0 ? plan.sends : plan.receives).clear();
        const Fields fields(r, 1, 100, Memory::local);
        const Tensor fill = fill_segment(r);
        const TensorView view = r.rank == 1 ? fields.in[0].view() : fields.out[0].view();
        if (r.rank == 1) {
          group.exchange(plan, fields.list).wait();
          group.send(view, 0).wait();
        } else {
          group.recv(view, 1).wait();
          group.exchange(plan, fields.list).wait();
          fields.expect(1, 1, 100, 100);
        }
        r.meet("over");
      },
      small_segments());
}

Error error_of_exchange(Rank& r) {
  const Fields fields(r, 1, 100, Memory::local);
  return error_of([&] { r.group().exchange(swap(r), fields.list).wait(); });
}

TEST(ShmExchange, ARankWithoutSharedMemoryForAPairSaysSo) {
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        std::optional<Tensor> fill;
        if (r.rank == 1) {
          fill = fill_segment(r);
          std::signal(SIGXFSZ, SIG_IGN);
          rlimit limit{};
          ::getrlimit(RLIMIT_FSIZE, &limit);
          limit.rlim_cur = 0;
          ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
        }
        const Error e = error_of_exchange(r);
        EXPECT_EQ(e.code(), ErrorCode::system);
        EXPECT_THAT(e.what(),
                    testing::HasSubstr("exchange: rank 1 has no " + std::to_string(sizeof(shm::Ring)) +
                                       " bytes of shared memory for the data that it sends to rank 0"));
        r.meet("over");
      },
      small_segments());
}

// Limits of a receiver that come after the group is made.
TEST(ShmExchange, ARankThatCannotMapTheMemorySaysSo) {
  if (!kProcesses || !kThreadsInForks) GTEST_SKIP() << "sanitizers need addresses";
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        const Tensor fill = fill_segment(r);
        if (r.rank == 0) {  // no segment is mapped into the last quarter
          std::size_t pages = 0;
          FileIn("/proc/self/statm") >> pages;
          const rlim_t bytes = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) / 10 * 12;
          const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
          ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
        }
        const Error e = error_of_exchange(r);
        EXPECT_EQ(e.code(), ErrorCode::system);
        EXPECT_THAT(e.what(), testing::HasSubstr("exchange: rank 0 cannot map the segment of rank 1 that "
                                                 "holds the data sent to it; the log says why"));
        r.meet("over");
      },
      small_segments());
}

TEST(ShmExchange, ARankWithoutDescriptorsSaysWhatItWaitsFor) {
  if (!kTypesWithoutDescriptors) GTEST_SKIP() << kNoTypesWithoutDescriptors;
  RankOptions options = small_segments();
  options.deadline = 1500ms;
  run_ranks(
      Ranks::processes, 2,
      [](Rank& r) {
        r.group().barrier().wait();
        const Tensor fill = fill_segment(r);
        ExchangePlan plan = swap(r);
        (r.rank == 0 ? plan.sends : plan.receives).clear();
        std::vector<int> taken;
        if (r.rank == 0) {
          const rlimit few{256, 256};
          ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
          for (int fd = 0; (fd = ::dup(0)) >= 0;) taken.push_back(fd);
        }
        const Fields fields(r, 1, 100, Memory::local);
        // The deadline of rank 0 is to pass first: the first error is that of all ranks.
        if (r.rank == 1) std::this_thread::sleep_for(500ms);
        const Error e = error_of([&] { r.group().exchange(plan, fields.list).wait(); });
        for (const int fd : taken) ::close(fd);
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        if (r.rank == 0) {
          EXPECT_THAT(e.what(), testing::HasSubstr("rank 0 cannot map the memory of rank 1 now"));
        }
        r.meet("over");
      },
      options);
}

}  // namespace
}  // namespace weft::test::shm_exchange_test
