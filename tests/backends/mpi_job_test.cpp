// Ranks that an mpirun started, over the MPI it belongs to: `mpirun.openmpi -n 2 this`. WEFT_TEST_BACKEND
// names the plug-in. Every rank runs all tests; mpi_test tests failures of a group.
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "support/random_calls.hpp"
#include "support/run_ranks.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test::mpi_job_test {
namespace {

using namespace std::chrono_literals;

class MpiJob : public testing::Test {
 protected:
  void SetUp() override {
    const char* const name = std::getenv("WEFT_TEST_BACKEND");
    if (name == nullptr) GTEST_SKIP() << "WEFT_TEST_BACKEND is not set; ctest starts this with mpirun";
    options_.backend = name;
  }
  void run(const std::function<void(Rank&)>& body) const {
    run_ranks(Ranks::job, job_size(), body, options_);
  }

  // The reductions that MPI performs itself; the others are composed.
  static Variety native() {
    return {.dtypes = {DType::f32, DType::i32, DType::f64, DType::u8, DType::c64, DType::i16},
            .reductions = {ReduceOp::sum}};
  }
  RankOptions options_;
};

std::mt19937 of_all() { return std::mt19937(11); }
std::mt19937 of_rank(const Rank& r) { return std::mt19937(static_cast<unsigned>(100 + r.rank)); }

TEST_F(MpiJob, CallsAtRandom) {
  run([&](Rank& r) {
    Variety v = native();
    v.many = {1009, 5003, 40009, 150001};  // the last takes several rounds
    calls_at_random(r, r.group(), 100, of_all(), of_rank(r), v, Memory::local);
  });
}

// As if MPI could count only to 7: every operation takes several rounds, and every message several pieces.
TEST_F(MpiJob, CountsBeyondTheLimitOfMpi) {
  options_.hooks.max_count = 7;
  run([&](Rank& r) { calls_at_random(r, r.group(), 150, of_all(), of_rank(r), native(), Memory::local); });
}

TEST_F(MpiJob, WithoutSafeBuffers) {
  for (const std::int64_t limit : {0, 7}) {
    options_.hooks.max_count = limit;
    run([&](Rank& r) {
      ::setenv("WEFT_MPI_SAFE_BUFFERS", "off", 1);
      const ProcessGroup made = ProcessGroup::create(r.context, options_.backend, r.membership());
      ::unsetenv("WEFT_MPI_SAFE_BUFFERS");
      EXPECT_FALSE(made.traits().guarantees.quiesces);
      ProcessGroup& g = const_cast<ProcessGroup&>(made);
      Variety v = native();
      if (limit == 0) v.many = {1009, 40009};
      calls_at_random(r, g, 100, of_all(), of_rank(r), v, Memory::local);
    });
  }
}

TEST_F(MpiJob, WithoutComparison) {
  run([&](Rank& r) {
    ::setenv("WEFT_MPI_CHECK", "off", 1);
    ProcessGroup g = ProcessGroup::create(r.context, options_.backend, r.membership());
    ::unsetenv("WEFT_MPI_CHECK");
    EXPECT_FALSE(g.traits().guarantees.checks_calls);
    calls_at_random(r, g, 100, of_all(), of_rank(r), native(), Memory::local);
  });
}

TEST_F(MpiJob, EveryNativeReduction) {
  run([&](Rank& r) {
    const Traits& traits = *known_traits(options_.backend);
    for (int k = 0; k < kReduceKindCount; ++k) {
      for (int d = 0; d < kDTypeCount; ++d) {
        const ReduceOp op = reduction(static_cast<ReduceOp::Kind>(k));
        const auto dtype = static_cast<DType>(d);
        if (!traits.reduces_itself(op.kind, dtype)) continue;
        const std::int64_t count = 37;
        const Tensor in(r.context, Shape{count}, dtype), out(r.context, Shape{count}, dtype);
        for (std::int64_t i = 0; i < count; ++i) store(in, i, input(op, dtype, r.rank, i));
        r.group().all_reduce(in, out, {.op = op}).wait();
        for (std::int64_t i = 0; i < count; ++i)
          ASSERT_EQ(load(out, i), combined(op, dtype, r.size, i))
              << name(dtype) << " " << name(op) << " [" << i << "]";
      }
    }
  });
}

// MPI leaves these open; its operation for them is ours.
TEST_F(MpiJob, MinAndMaxKnowNanAndSignedZeros) {
  run([&](Rank& r) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> in{r.rank == 1 ? nan : 1.0f, r.rank == 0 ? nan : 2.0f,
                                r.rank == 0 ? 0.0f : -0.0f, r.rank == 0 ? -0.0f : 0.0f};
    std::vector<float> low(4), high(4);
    r.group().all_reduce(view(in), view(low), {.op = ReduceOp::min}).wait();
    r.group().all_reduce(view(in), view(high), {.op = ReduceOp::max}).wait();
    for (const auto* out : {&low, &high}) {
      EXPECT_TRUE(std::isnan((*out)[0]));
      EXPECT_TRUE(std::isnan((*out)[1]));
    }
    for (const std::size_t i : {2, 3}) {
      EXPECT_TRUE(std::signbit(low[i])) << i;
      EXPECT_FALSE(std::signbit(high[i])) << i;
    }
  });
}

// The libraries' own get these wrong: MPICH 4.0 compares unsigned as signed, Open MPI 4.1 saturates sums.
TEST_F(MpiJob, IntegersAreUnsignedWhereTheySaySoAndSumsWrap) {
  run([&](Rank& r) {
    const auto all_reduce = [&]<class T>(ReduceOp op, T mine) {
      const std::vector<T> in(100, mine);  // long enough for vector code
      std::vector<T> out(100);
      r.group().all_reduce(view(in), view(out), {.op = op}).wait();
      EXPECT_EQ(out, std::vector<T>(100, out[0]));
      return out[0];
    };
    const auto of = [&]<class T>(T zero) {
      const T large = static_cast<T>(~zero);  // -1, were it signed
      const T mine = r.rank == 0 ? large : T{1};
      EXPECT_EQ(all_reduce(ReduceOp::max, mine), large);
      EXPECT_EQ(all_reduce(ReduceOp::min, mine), r.size == 1 ? large : T{1});
      EXPECT_EQ(all_reduce(ReduceOp::sum, mine), static_cast<T>(r.size - 2));
    };
    of(std::uint8_t{});
    of(std::uint16_t{});
    of(std::uint32_t{});
    of(std::uint64_t{});
    EXPECT_EQ(all_reduce(ReduceOp::sum, std::int8_t{100}), static_cast<std::int8_t>(100 * r.size));
    EXPECT_EQ(all_reduce(ReduceOp::sum, std::int16_t{30000}), static_cast<std::int16_t>(30000 * r.size));
  });
}

// A root that has run ahead leaves, and calls MPI no more: its announcements still reach the others.
TEST_F(MpiJob, WhatWasCalledArrivesThoughItsRankHasLeft) {
  run([&](Rank& r) {
    Membership m = r.membership("left early");
    m.deadline = 5s;
    ProcessGroup g = ProcessGroup::create(r.context, r.options.backend, m);
    std::vector<std::uint8_t> x(64);
    if (r.rank != 0) std::this_thread::sleep_for(100ms);
    for (int k = 0; k < 300; ++k) g.broadcast(view(x), view(x), 0).wait();
    g = ProcessGroup();
    r.meet("all have left");  // by the store
  });
}

TEST_F(MpiJob, MessagesOfAnyTagAndSizeInAnyOrder) {
  run([&](Rank& r) {
    ProcessGroup& g = r.group();
    const int next = (r.rank + 1) % r.size, before = (r.rank + r.size - 1) % r.size;
    // Large messages in both directions, sends first, tags at both ends, received in the opposite order.
    const std::vector<int> tags{0, 1, 32767, 32768, 2147483647};
    std::vector<std::vector<std::int32_t>> out, in;
    std::vector<Work> works;
    for (std::size_t i = 0; i < tags.size(); ++i) {
      const auto count = static_cast<std::size_t>(i % 2 ? 500000 : 5);
      out.emplace_back(count, r.rank * 100 + tags[i] % 7 + static_cast<int>(i));
      in.emplace_back(count, -1);
    }
    for (std::size_t i = 0; i < tags.size(); ++i)
      works.push_back(g.send(view(out[i]), next, {.tag = tags[i]}));
    for (std::size_t i = tags.size(); i-- > 0;)
      works.push_back(g.recv(view(in[i]), before, {.tag = tags[i]}));
    for (Work& w : works) w.wait();
    for (std::size_t i = 0; i < tags.size(); ++i)
      for (const std::int32_t x : in[i]) ASSERT_EQ(x, before * 100 + tags[i] % 7 + static_cast<int>(i));
    // Small and large messages of a rank to itself arrive in the order in which those of one tag were sent.
    for (const std::size_t count : {std::size_t{3}, std::size_t{100000}}) {
      std::vector<std::int32_t> a(count, 1), b(count, 2), x(count), y(count);
      Work sends[] = {g.send(view(a), r.rank, {.tag = 5}), g.send(view(b), r.rank, {.tag = 5})};
      Work recvs[] = {g.recv(view(x), r.rank, {.tag = 5}), g.recv(view(y), r.rank, {.tag = 5})};
      for (Work& w : sends) w.wait();
      for (Work& w : recvs) w.wait();
      EXPECT_EQ(x, a);
      EXPECT_EQ(y, b);
    }
  });
}

// More messages than MPI buffers for a rank that makes no progress.
class Flood {
 public:
  static constexpr int kGroups = 12, kEach = 60;  // of 64 calls in flight

  Flood(Rank& r, const std::string& name) : r_(r), name_(name) {
    for (int i = 0; i < kGroups; ++i) groups_.push_back(r.group().duplicate());
    r.group().barrier().wait();
  }
  ProcessGroup& group() { return groups_[0]; }
  void send() {
    for (ProcessGroup& g : groups_)
      for (int k = 0; k < kEach; ++k) works_.push_back(g.send(view(std::as_const(bytes_)), 1));
    tell("posted");
  }
  void wait() {
    for (Work& w : works_) w.wait();
    tell("sent");
  }
  void receive() {
    for (ProcessGroup& g : groups_)
      for (int k = 0; k < kEach; ++k) g.recv(view(bytes_), 0, {.deadline = 5s}).wait();
  }
  // The ranks synchronise through the store, so no rank calls MPI meanwhile.
  void tell(const std::string& what) { r_.store->set(name_ + what, "1"); }
  void hear(const std::string& what) { r_.store->get(name_ + what, Deadline::after(20s)); }
  // If all is well it does not come.
  void perhaps_hear(const std::string& what) {
    try {
      r_.store->get(name_ + what, Deadline::after(300ms));
    } catch (const Error&) {}
  }

 private:
  Rank& r_;
  const std::string name_;
  std::vector<ProcessGroup> groups_;
  std::vector<std::uint8_t> bytes_ = std::vector<std::uint8_t>(1024);
  std::vector<Work> works_;
};

// A rank whose sends are done does other things, and calls MPI no more.
TEST_F(MpiJob, WhatIsSentArrivesThoughItsRankDoesOtherThings) {
  run([&](Rank& r) {
    Flood flood(r, "flood ");
    if (r.rank == 0) {
      flood.send();
      flood.wait();
      flood.hear("received");
    } else if (r.rank == 1) {
      flood.hear("posted");
      flood.perhaps_hear("sent");
      flood.receive();
      flood.tell("received");
    }
    r.meet("all is there");
  });
}

// Likewise of a rank whose last collective is done.
TEST_F(MpiJob, WhatIsCalledArrivesThoughItsRankDoesOtherThings) {
  for (const bool rooted : {false, true}) {
    run([&](Rank& r) {
      Flood flood(r, rooted ? "rooted " : "not rooted ");
      std::vector<std::uint8_t> nothing;
      const auto call = [&] {
        const CallOptions options{.deadline = 5s};
        return rooted ? flood.group().broadcast(view(nothing), view(nothing), 0, options)
                      : flood.group().barrier(options);
      };
      if (r.rank == 0) {
        flood.send();
        call().wait();
        flood.tell("through");
        flood.hear("called");
        flood.wait();
      } else if (r.rank == 1) {
        flood.hear("posted");
        Work work = call();
        flood.perhaps_hear("through");
        work.wait();
        flood.tell("called");
        flood.receive();
      } else {
        call().wait();
      }
      r.meet("all are there");
    });
  }
}

// The root of a broadcast waits for no other rank.
TEST_F(MpiJob, ARootRunsAhead) {
  run([&](Rank& r) {
    ProcessGroup& g = r.group();
    g.barrier().wait();
    std::vector<float> x(4, static_cast<float>(r.rank));
    if (r.rank == 0) {
      for (int i = 0; i < 16; ++i) {
        x.assign(4, static_cast<float>(i));
        g.broadcast(view(std::as_const(x)), view(x), 0).wait();
      }
      r.store->set("root is through", "1");
    } else {
      r.store->get("root is through", Deadline::after(20s));
      for (int i = 0; i < 16; ++i) {
        g.broadcast(view(std::as_const(x)), view(x), 0).wait();
        ASSERT_EQ(x[3], static_cast<float>(i));
      }
    }
  });
}

TEST_F(MpiJob, SubgroupsAndManyGroupsOneAfterAnother) {
  run([&](Rank& r) {
    for (int i = 0; i < 60; ++i) {
      ProcessGroup half = r.group().split(r.rank % 2, -r.rank);
      std::vector<std::int32_t> mine{r.rank}, sum{0};
      half.all_reduce(view(mine), view(sum)).wait();
      int expected = 0;
      for (int other = r.rank % 2; other < r.size; other += 2) expected += other;
      ASSERT_EQ(sum[0], expected);
    }
  });
}

TEST_F(MpiJob, TwoGroupsOfTheSameRanksFromTwoThreads) {
  run([&](Rank& r) {
    ProcessGroup a = r.group().duplicate(), b = r.group().duplicate();
    const auto use = [&](ProcessGroup& g, unsigned seed) {
      calls_at_random(r, g, 60, std::mt19937(seed), std::mt19937(seed + static_cast<unsigned>(r.rank)),
                      native(), Memory::local);
    };
    std::thread other([&] { use(b, 2); });
    use(a, 1);
    other.join();
  });
}

// Threads make groups at the same time, in no common order between ranks.
TEST_F(MpiJob, GroupsAreMadeByTwoThreadsAtOnce) {
  run([&](Rank& r) {
    std::vector<int> everybody(static_cast<std::size_t>(r.size));
    std::iota(everybody.begin(), everybody.end(), 0);
    ProcessGroup& world = r.group();
    const auto make = [&](const std::string& name) {
      for (int i = 0; i < 10; ++i) {
        ProcessGroup g = world.subgroup(name, everybody);
        g.barrier().wait();
      }
    };
    const std::string names[] = {"x", "y"};
    std::thread other([&] { make(names[r.rank % 2]); });
    make(names[(r.rank + 1) % 2]);
    other.join();
  });
}

TEST_F(MpiJob, TraitsAreTheTable) {
  run([&](Rank& r) {
    const Traits& known = *known_traits(options_.backend);
    EXPECT_EQ(r.group().traits().name, known.name);
    EXPECT_EQ(r.group().traits().guarantees, known.guarantees);
    EXPECT_EQ(r.group().traits().reduces, known.reduces);
    EXPECT_FALSE(known.reduces_itself(ReduceOp::Kind::sum, DType::bf16));
  });
}

TEST_F(MpiJob, SwitchesAreOnOrOff) {
  if (job_size() < 2) GTEST_SKIP() << "needs two ranks";
  run([&](Rank& r) {
    const auto create = [&](const char* name) {
      Membership m = r.membership(name);
      return ProcessGroup::create(r.context, options_.backend, m);
    };
    ::setenv("WEFT_MPI_CHECK", "perhaps", 1);
    EXPECT_STREQ(error_of([&] { create("a"); }).what(), "WEFT_MPI_CHECK is \"perhaps\"; expected on or off");
    ::setenv("WEFT_MPI_CHECK", r.rank == 1 ? "off" : "on", 1);
    const Error e = error_of([&] { create("b"); });
    ::unsetenv("WEFT_MPI_CHECK");
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    if (r.rank == 0) {
      EXPECT_STREQ(
          e.what(),
          "group \"b\": WEFT_MPI_CHECK is off on rank 1, on on rank 0; expected the same on all ranks "
          "[rank 0]");
    }
  });
}

}  // namespace
}  // namespace weft::test::mpi_job_test
