// WEFT_SINGLE_COPY: the kernel copies between processes. Results have the same bits as with staging. All
// ranks agree on its use. It is not used, with a log line, if the system forbids it. Its behaviour with a
// dead, a stopped and a faulty peer is tested, too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "backends/shm/control.hpp"
#include "backends/shm/paths.hpp"
#include "host/cores/usable_cores.hpp"
#include "reduce/staging.hpp"
#include "support/random_calls.hpp"
#include "support/sanitizers.hpp"
#include "support/seccomp.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::single_copy_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

class Setting {
 public:
  explicit Setting(const char* value) { ::setenv("WEFT_SINGLE_COPY", value, 1); }
  ~Setting() { ::setenv("WEFT_SINGLE_COPY", "pull", 1); }  // as the tests begin
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
};

class SingleCopies : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_SINGLE_COPY", "pull", 1);  // what auto means depends on the processor
    if (!kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
  }
  void TearDown() override { ::unsetenv("WEFT_SINGLE_COPY"); }
};

// Sums that are not exact, so that another order of adding would show.
float inexact(int rank, std::int64_t i) {
  return static_cast<float>((i * 2654435761u + static_cast<unsigned>(rank) * 40503u) % 100003) * 1e-3f + 0.1f;
}

TEST_F(SingleCopies, GiveTheBitsThatStagingGives) {
  const Setting push("push");
  for (const int n : {2, 3, 4}) {
    run_ranks(Ranks::processes, n, [](Rank& r) {
      const auto group = [&](const char* path) {
        const ScopedTestHooks hooks(r.context, r.rank, {.path = path});
        return ProcessGroup::create(r.context, "shm", r.membership(std::string("by ") + path));
      };
      ProcessGroup single = group("single"), staged = group("staged");
      for (const std::int64_t count : {0, 1, 13, 1009, 16411, 65536, 200003, 524309}) {
        for (const ReduceOp op : {ReduceOp(ReduceOp::sum), ReduceOp(ReduceOp::avg), ReduceOp(ReduceOp::min),
                                  ReduceOp::premul_sum(0.3)}) {
          std::vector<float> in(static_cast<std::size_t>(count)), a(in.size(), -1.0f), b(in.size(), -2.0f);
          for (std::int64_t i = 0; i < count; ++i) in[static_cast<std::size_t>(i)] = inexact(r.rank, i);
          std::vector<float> c = in;  // in place
          single.all_reduce(view(std::as_const(in)), view(a), {.op = op}).wait();
          staged.all_reduce(view(std::as_const(in)), view(b), {.op = op}).wait();
          single.all_reduce(view(c), view(c), {.op = op}).wait();
          ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0) << count << " " << name(op.kind);
          ASSERT_EQ(std::memcmp(a.data(), c.data(), a.size() * 4), 0) << count << " " << name(op.kind);
        }
      }
    });
  }
}

// The data that a reduction reads from its peers has room in 256 KiB, however many ranks there are. A group
// that has not reduced in this way has no such memory.
TEST_F(SingleCopies, TakeLittleMemoryAndAtFirstUse) {
  const Setting push("push");
  run_ranks(Ranks::processes, 12, [](Rank& r) {
    const auto allocated = [] {
      const struct mallinfo2 now = ::mallinfo2();
      return static_cast<std::int64_t>(now.hblkhd + now.uordblks);
    };
    const auto group = [&](const char* name) {
      const ScopedTestHooks hooks(r.context, r.rank, {.path = "single"});
      return ProcessGroup::create(r.context, "shm", r.membership(name));
    };
    ProcessGroup first = group("first");  // with what a process allocates once
    std::vector<float> in(12 * 12345, 1.0f), out(12345);
    first.reduce_scatter(view(std::as_const(in)), view(out)).wait();
    constexpr std::int64_t kPieces = 256 << 10, kGroup = 256 << 10;
    std::int64_t before = allocated();
    ProcessGroup second = group("second");
    EXPECT_LT(allocated() - before, kGroup);
    before = allocated();
    for (int k = 0; k < 3; ++k) second.reduce_scatter(view(std::as_const(in)), view(out)).wait();
    for (const float sum : out) ASSERT_EQ(sum, 12);
    EXPECT_LT(allocated() - before, kPieces + (64 << 10));
    r.meet("end");
  });
}

// Hundreds of calls of all operations, in shared, foreign and mixed memory.
TEST_F(SingleCopies, AllOperationsInterleaved) {
  const Setting push("push");
  for (const char* path : {"single", ""}) {
    for (const int n : {2, 3, 5}) {
      RankOptions options;
      options.hooks.path = path;
      run_ranks(
          Ranks::processes, n,
          [&](Rank& r) {
            Variety variety;
            variety.reductions.push_back(ReduceOp::premul_sum(3));
            variety.many = {0, 1, 13, 513, 5003, 40009, 100003};
            calls_at_random(r, r.group(), 200, std::mt19937(static_cast<unsigned>(11 * n)),
                            std::mt19937(static_cast<unsigned>(100 + r.rank)), variety, std::nullopt);
          },
          options);
    }
  }
}

// If no setting forces it, it is used only where it is faster. The hook of a copy in peers' memory is not
// called by staging.
TEST_F(SingleCopies, AreTakenWhereTheyPay) {
  for (const char* setting : {"push", "pull", "off"}) {
    const Setting chosen(setting);
    run_ranks(Ranks::processes, 2, [&](Rank& r) {
      RankOptions options = r.options;
      int copies = 0;
      options.hooks.in_chunk = [&](std::uint64_t) { ++copies; };
      Rank me(r.rank, r.size, r.context, r.store, options);
      const std::string set = setting;
      const auto expect = [&](Op op, bool allowed, const std::function<void(std::int64_t)>& call) {
        const shm::SizeRange pays = shm::profitable_single_copy(op, 2);
        ASSERT_LT(pays.from, 1 << 20);
        ASSERT_GT(pays.to, 1 << 20);
        for (const std::int64_t bytes : {pays.from - 8, std::int64_t{1} << 20}) {
          copies = 0;
          call(bytes / 4);
          EXPECT_EQ(copies > 0, allowed && pays.has(bytes)) << name(op) << ", " << bytes << " bytes, " << set;
        }
      };
      std::vector<float> v(1 << 18, 1.0f), w(1 << 18);
      expect(Op::all_reduce, set == "push", [&](std::int64_t n) {
        me.group().all_reduce(view(std::as_const(v).data(), n), view(w.data(), n)).wait();
      });
      expect(Op::reduce_scatter, set != "off", [&](std::int64_t n) {
        me.group().reduce_scatter(view(std::as_const(v).data(), n), view(w.data(), n / 2)).wait();
      });
      expect(Op::all_gather, set != "off", [&](std::int64_t n) {
        me.group().all_gather(view(std::as_const(v).data(), n / 2), view(w.data(), n)).wait();
      });
      // No arrival says how much an all_to_all_v moves.
      const std::vector<std::int64_t> counts(2, 100000);
      std::vector<float> a(200000, 1.0f), b(200000);
      copies = 0;
      me.group().all_to_all_v(view(std::as_const(a)), view(b), {counts}, {counts}).wait();
      EXPECT_EQ(copies, 0);
    });
  }
}

TEST_F(SingleCopies, TheSettingIsOneOfTwo) {
  const Setting wrong("both");
  Context context;
  Membership m;
  m.store = make_local_store();
  const Error e = error_of([&] { ProcessGroup::create(context, "shm", m); });
  EXPECT_EQ(e.code(), ErrorCode::bad_argument);
  EXPECT_THAT(e.what(), HasSubstr("WEFT_SINGLE_COPY is \"both\"; expected auto, off, pull or push"));
}

// "auto" is the default, also for ranks of a host that set nothing; it is off if staging is faster.
TEST_F(SingleCopies, AutoIsOffWhereStagingIsFaster) {
  for (const char* setting : {"auto", ""}) {
    const Setting automatic(setting);
    run_ranks(Ranks::processes, 2, [](Rank& r) {
      RankOptions options = r.options;
      int copies = 0;
      options.hooks.in_chunk = [&](std::uint64_t) { ++copies; };
      Rank me(r.rank, r.size, r.context, r.store, options);
      std::vector<float> in(1 << 18, static_cast<float>(r.rank)), out(2 << 18);
      me.group().all_gather(view(std::as_const(in)), view(out)).wait();
      EXPECT_EQ(copies > 0, !staging_beats_kernel_copies());
      EXPECT_EQ(out[0], 0);
      EXPECT_EQ(out[1 << 18], 1);
    });
  }
}

TEST_F(SingleCopies, RanksThatAreSetDifferentlySaySo) {
  run_ranks(Ranks::processes, 3, [](Rank& r) {
    ::setenv("WEFT_SINGLE_COPY", r.rank == 1 ? "push" : "off", 1);
    const Error e = error_of([&] { r.group(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    if (r.rank == 1) {
      EXPECT_THAT(e.what(), HasSubstr("rank 0 has WEFT_SINGLE_COPY=off, rank 1 has push"));
    } else {
      EXPECT_THAT(e.what(),
                  HasSubstr("rank 1 has WEFT_SINGLE_COPY=push, rank " + std::to_string(r.rank) + " has off"));
    }
    r.meet("end");
  });
}

// One of three ranks must not use it. Then no rank does, all ranks log the reason once, and the results are
// right.
TEST_F(SingleCopies, AreLeftAloneWhereTheSystemForbidsThem) {
  struct Forbidden {
    unsigned number;
    const char* setting;
    bool pulls;
    std::string line;
  };
  for (const Forbidden& f :
       {Forbidden{
            SYS_process_vm_readv, "push", false,
            "WEFT_SINGLE_COPY=push: the system does not let rank 1 read the memory of rank 0 (Operation not "
            "permitted); calls on foreign memory copy twice [group \"world\", rank "},
        Forbidden{
            SYS_process_vm_readv, "pull", false,
            "WEFT_SINGLE_COPY=pull: the system does not let rank 1 read the memory of rank 0 (Operation not "
            "permitted); calls on foreign memory copy twice [group \"world\", rank "},
        Forbidden{
            SYS_process_vm_writev, "push", true,
            "WEFT_SINGLE_COPY=push: the system does not let rank 1 write the memory of rank 0 (Operation not "
            "permitted); all_reduce and reduce of foreign memory copy twice [group \"world\", rank "}}) {
    const Setting setting(f.setting);
    run_ranks(Ranks::processes, 3, [&](Rank& r) {
      if (r.rank == 1) forbid(f.number);
      std::mutex mutex;
      std::vector<std::string> lines;
      Context context({.log_level = LogLevel::info, .log_sink = [&](LogLevel, std::string_view line) {
                         const std::lock_guard lock(mutex);
                         lines.emplace_back(line);
                       }});
      RankOptions options = r.options;
      int copies = 0;
      options.hooks.in_chunk = [&](std::uint64_t) { ++copies; };
      Rank me(r.rank, r.size, context, r.store, options);
      std::vector<float> v(600000, static_cast<float>(r.rank + 1)), w(1800000);
      me.group().all_reduce(view(v), view(v)).wait();
      EXPECT_EQ(std::count(v.begin(), v.end(), 6.0f), 600000);
      EXPECT_EQ(copies, 0);
      EXPECT_TRUE(me.group().traits().guarantees.quiesces);
      me.group().all_gather(view(std::as_const(v)), view(w)).wait();
      EXPECT_EQ(std::count(w.begin(), w.end(), 6.0f), 1800000);
      EXPECT_EQ(copies > 0, f.pulls);
      ProcessGroup second = me.group().duplicate();
      second.all_reduce(view(v), view(v)).wait();
      const std::lock_guard lock(mutex);
      std::erase_if(lines, [](const std::string& l) { return l.find("SINGLE_COPY") == std::string::npos; });
      ASSERT_EQ(lines.size(), 1u);
      EXPECT_THAT(lines[0], HasSubstr(f.line + std::to_string(r.rank)));
    });
  }
}

// A rank is killed during its copy, and between its arrival and the copies of the others from its memory.
TEST_F(SingleCopies, AKilledRankIsNamedWithinASecond) {
  const Setting push("push");
  RankProcesses ranks(3, [](Rank& r) {
    RankOptions options = r.options;
    options.hooks.in_chunk = [&](std::uint64_t call) {
      if (call != 2) return;
      if (r.rank == 2) raise(SIGKILL);
      std::this_thread::sleep_for(200ms);  // rank 2 has gone when the kernel is asked
    };
    Rank me(r.rank, r.size, r.context, r.store, options);
    std::vector<float> v(300007, 1.0f);
    for (int k = 0; k < 2; ++k) me.group().all_reduce(view(v), view(v), {.op = ReduceOp::max}).wait();
    const auto began = Clock::now();
    const Error e = error_of([&] { me.group().all_reduce(view(v), view(v), {.op = ReduceOp::max}).wait(); });
    EXPECT_LT(Clock::now() - began, 1200ms);
    EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
    EXPECT_THAT(e.what(), HasSubstr("all_reduce: rank 2 (process "));
    EXPECT_THAT(e.what(), HasSubstr(") died"));
    EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(2));
    EXPECT_EQ(e.call(), 2u);
    EXPECT_TRUE(me.group().quiesce(1s));
  });
  ranks.finish({2});
  EXPECT_EQ(ranks[2].wait(1s), (ExitStatus{-1, SIGKILL}));
}

// Memory is unmapped while peers may access it: some of it can be copied, then no more.
TEST_F(SingleCopies, MemoryThatIsGoneIsASystemErrorThatNamesItsOwner) {
  const Setting push("push");
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    constexpr std::size_t kBytes = 1 << 20;
    void* const in = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(in, MAP_FAILED);
    RankOptions options = r.options;
    options.hooks.in_chunk = [&, first = true](std::uint64_t) mutable {
      if (!std::exchange(first, false)) return;
      if (r.rank == 1) {
        ::munmap(static_cast<std::byte*>(in) + 5 * 4096, 4096);  // in rank 0's half
        r.meet("gone");
        std::this_thread::sleep_for(100ms);  // rank 0 finds it out first
      } else {
        r.meet("gone");
      }
    };
    Rank me(r.rank, r.size, r.context, r.store, options);
    std::vector<float> out(kBytes / 4);
    const Error e = error_of([&] {
      me.group().all_reduce(view(static_cast<const float*>(in), kBytes / 4), view(out)).wait();
      me.group().barrier().wait();
    });
    EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
    EXPECT_THAT(e.what(), HasSubstr("all_reduce: rank 0 cannot read the memory of rank 1 (process "));
    EXPECT_THAT(e.what(), HasSubstr("): Bad address; WEFT_SINGLE_COPY=off avoids this"));
    EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(1));
    ::munmap(in, kBytes);
  });
}

// Memory that the kernel copies for its owner alone, such as some memory of drivers.
class SecretMemory {
 public:
  explicit SecretMemory(std::size_t bytes) : bytes_(bytes) {
    const int fd = static_cast<int>(::syscall(447, 0));  // memfd_secret
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return;
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (at != MAP_FAILED) data_ = static_cast<float*>(at);
  }
  ~SecretMemory() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  SecretMemory(const SecretMemory&) = delete;
  SecretMemory& operator=(const SecretMemory&) = delete;
  float* data() const { return data_; }

 private:
  std::size_t bytes_;
  float* data_ = nullptr;
};

// If one rank has such memory, no rank copies through the kernel, and no call fails.
TEST_F(SingleCopies, MemoryThatTheKernelDoesNotCopyIsStaged) {
  if (SecretMemory(4096).data() == nullptr) GTEST_SKIP() << "no memfd_secret here: " << std::strerror(errno);
  const Setting push("push");
  for (const int n : {2, 3}) {
    run_ranks(Ranks::processes, n, [&](Rank& r) {
      RankOptions options = r.options;
      int copies = 0;
      options.hooks.in_chunk = [&](std::uint64_t) { ++copies; };
      Rank me(r.rank, r.size, r.context, r.store, options);
      const std::int64_t part = (2 << 20) / 4 / n, all = part * n;
      SecretMemory secret_in(static_cast<std::size_t>(all) * 4),
          secret_out(static_cast<std::size_t>(all) * 4);
      std::vector<float> plain_in(static_cast<std::size_t>(all)), plain_out(plain_in.size());
      for (const int who : {-1, 0, n - 1}) {  // rank -1: nobody
        float* const in = r.rank == who ? secret_in.data() : plain_in.data();
        float* const out = r.rank == who ? secret_out.data() : plain_out.data();
        ASSERT_NE(in, nullptr);
        ASSERT_NE(out, nullptr);
        const auto expect = [&](Op op, bool copied, std::int64_t ins, std::int64_t outs,
                                const std::function<void()>& call, const std::function<float(int)>& result) {
          for (std::int64_t i = 0; i < ins; ++i) in[i] = static_cast<float>(r.rank + i / part * 10);
          std::fill_n(out, outs, -1.0f);
          copies = 0;
          call();
          EXPECT_EQ(copies > 0, copied) << name(op) << ", secret on rank " << who;
          for (std::int64_t i = 0; i < outs; ++i)
            ASSERT_EQ(out[i], result(static_cast<int>(i / part))) << name(op) << " " << i;
        };
        const auto of = [&](float* p, std::int64_t count) { return view(p, count); };
        ProcessGroup& group = me.group();
        const int sum = n * (n - 1) / 2;
        const bool lent = who < 0;
        expect(
            Op::all_reduce, lent, all, all, [&] { group.all_reduce(of(in, all), of(out, all)).wait(); },
            [&](int b) { return static_cast<float>(sum + 10 * b * n); });
        expect(
            Op::reduce_scatter, lent, all, part,
            [&] { group.reduce_scatter(of(in, all), of(out, part)).wait(); },
            [&](int) { return static_cast<float>(sum + 10 * r.rank * n); });
        expect(
            Op::all_gather, lent, part, all, [&] { group.all_gather(of(in, part), of(out, all)).wait(); },
            [](int b) { return static_cast<float>(b); });
        expect(
            Op::all_to_all, lent, all, all, [&] { group.all_to_all(of(in, all), of(out, all)).wait(); },
            [&](int b) { return static_cast<float>(b + 10 * r.rank); });
        // A message concerns two ranks alone.
        const int to = (r.rank + 1) % n, from = (r.rank + n - 1) % n;
        expect(
            Op::send, from != who, part, part,
            [&] {
              Work send = group.send(of(in, part), to);
              group.recv(of(out, part), from).wait();
              send.wait();
            },
            [&](int) { return static_cast<float>(from); });
      }
    });
  }
}

// Its row of the guarantees: true if all have left, false while a stopped rank may still write. Only the end
// or the return of that rank changes this. Memory that is shared still gets other pages.
TEST_F(SingleCopies, AStoppedRankHoldsUpQuiesce) {
  EXPECT_FALSE(shm_single_copy_traits().guarantees.quiesces);
  const Setting push("push");
  for (const Memory memory : {Memory::local, Memory::shared}) {
    RankProcesses ranks(3, [&](Rank& r) {
      RankOptions options = r.options;
      options.deadline = 400ms;
      if (r.rank == 1)
        options.hooks.in_chunk = [](std::uint64_t call) {
          if (call == 1) raise(SIGSTOP);
        };
      Rank me(r.rank, r.size, r.context, r.store, options);
      EXPECT_FALSE(me.group().traits().guarantees.quiesces);
      const std::int64_t count = shm::profitable_single_copy(Op::all_reduce, 3).from / 4 + 100003;
      const Tensor t(r.context, Shape{count}, DType::f32, memory);
      for (float& x : t.as<float>()) x = 1.0f;
      me.group().all_reduce(t, t).wait();
      const auto began = Clock::now();
      const Error e = error_of([&] { me.group().all_reduce(t, t).wait(); });
      EXPECT_LT(Clock::now() - began, 1400ms);
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(1));
      EXPECT_THAT(e.what(), HasSubstr("rank 1 has not finished its part"));
      EXPECT_FALSE(e.quiesced());
      EXPECT_EQ(me.group().quiesce(100ms), memory == Memory::shared);
      r.store->set("asked " + std::to_string(r.rank), "1");
      r.store->get("rank 1 has ended", Deadline::after(20s));
      EXPECT_TRUE(me.group().quiesce(1s));
    });
    for (const char* who : {"asked 0", "asked 2"}) ranks.store().get(who, Deadline::after(20s));
    ranks[1].kill(SIGKILL);
    EXPECT_TRUE(ranks[1].wait(5s));
    ranks.store().set("rank 1 has ended", "1");
    ranks.finish({1});
  }
}

// Large messages are read where they lie, but not from a sender that has died.
TEST_F(SingleCopies, MessagesAreReadWhereTheyLie) {
  for (const char* setting : {"pull", "off"}) {
    const Setting chosen(setting);
    run_ranks(Ranks::processes, 2, [&](Rank& r) {
      RankOptions options = r.options;
      int copies = 0;
      options.hooks.in_chunk = [&](std::uint64_t) { ++copies; };
      Rank me(r.rank, r.size, r.context, r.store, options);
      std::vector<float> v(100003), w(100003);
      for (std::size_t i = 0; i < v.size(); ++i)
        v[i] = static_cast<float>(i % 977) + static_cast<float>(r.rank);
      Work send = me.group().send(view(std::as_const(v)), 1 - r.rank);
      me.group().recv(view(w), 1 - r.rank).wait();
      send.wait();
      for (std::size_t i = 0; i < w.size(); ++i)
        ASSERT_EQ(w[i], static_cast<float>(i % 977) + static_cast<float>(1 - r.rank));
      EXPECT_EQ(copies > 0, std::string(setting) == "pull");
    });
  }
  const Setting pull("pull");
  for (const std::int64_t bytes : {shm::kHelpFrom / 4, 2 * shm::kHelpFrom}) {  // of the latter both copy
    RankProcesses ranks(2, [&](Rank& r) {
      RankOptions options = r.options;
      options.hooks.in_chunk = [&](std::uint64_t) {
        r.store->set("reads", "1");
        r.store->get("rank 0 has ended", Deadline::after(20s));
      };
      Rank me(r.rank, r.size, r.context, r.store, options);
      std::vector<float> v(static_cast<std::size_t>(bytes) / 4);
      const Error e = error_of([&] {
        if (r.rank == 0) me.group().send(view(std::as_const(v)), 1).wait();
        me.group().recv(view(v), 0).wait();
      });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("recv: rank 0 (process "));
      EXPECT_THAT(e.what(), HasSubstr(") died"));
      EXPECT_TRUE(me.group().quiesce(1s));
    });
    ranks.store().get("reads", Deadline::after(20s));
    ranks[0].kill(SIGKILL);
    EXPECT_TRUE(ranks[0].wait(5s));
    ranks.store().set("rank 0 has ended", "1");
    ranks.finish({0});
  }
}

// Both ranks copy a very large message: the sender copies while it waits, so the receiver copies less.
TEST_F(SingleCopies, ASenderThatWaitsHelps) {
  if (usable_cores() < 2) GTEST_SKIP() << "two ranks on one core do not help each other";
  const std::int64_t pieces = 40, count = pieces * static_cast<std::int64_t>(shm::kStreamBytes) / 4 - 13;
  ASSERT_GE(count * 4, shm::kHelpFrom);
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    RankOptions options = r.options;
    int copies = 0;
    options.hooks.in_chunk = [&](std::uint64_t) {
      ++copies;
      std::this_thread::sleep_for(1ms);  // two chunks are there by then
    };
    Rank me(r.rank, r.size, r.context, r.store, options);
    std::vector<float> v(static_cast<std::size_t>(count));
    for (int round = 0; round < 3; ++round) {
      const bool waits = round != 1;
      const std::string received = "received " + std::to_string(round);
      copies = 0;
      if (r.rank == 0) {
        for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 8191);
        Work send = me.group().send(view(std::as_const(v)), 1);
        if (!waits) r.meet(received);  // it does other things until then
        send.wait();
        if (waits) r.meet(received);
      } else {
        std::fill(v.begin(), v.end(), -1.0f);
        me.group().recv(view(v), 0).wait();
        r.meet(received);
        for (std::size_t i = 0; i < v.size(); ++i) ASSERT_EQ(v[i], static_cast<float>(i % 8191)) << i;
        if (waits) {
          EXPECT_LE(copies, pieces - 2);
        } else {
          EXPECT_EQ(copies, pieces);
        }
      }
    }
  });
}

// Messages that both copy, that the receiver alone reads, that are streamed and that are small, in both
// directions at once. A chunk that arrived too late for its message belongs to no other message.
TEST_F(SingleCopies, MessagesOfAllKindsInterleaved) {
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    const SecretMemory secret(4 << 20);
    std::mt19937 same(5), own(static_cast<unsigned>(r.rank));
    const int peer = 1 - r.rank;
    for (int round = 0; round < 25; ++round) {
      struct Message {
        std::int64_t count;
        bool streamed;
        std::vector<float> in, out;
        Work send, recv;
      };
      std::vector<Message> messages(1 + same() % 3);
      for (std::size_t k = 0; k < messages.size(); ++k) {
        Message& m = messages[k];
        m.count = same() % 4 == 0 ? 1 + same() % 3000 : 300000 + same() % 700000;
        m.streamed = same() % 3 == 0 && k == 0 && secret.data() != nullptr;
        m.in.resize(static_cast<std::size_t>(m.count));
        m.out.resize(m.in.size());
        for (std::size_t i = 0; i < m.in.size(); ++i)
          m.in[i] = static_cast<float>((i + k * 17 + static_cast<std::size_t>(round + 31 * r.rank)) % 4093);
        if (m.streamed) std::copy(m.in.begin(), m.in.end(), secret.data());
        const float* const from = m.streamed ? secret.data() : m.in.data();
        m.send = r.group().send(view(from, m.count), peer, {.tag = static_cast<int>(k)});
      }
      for (std::size_t k = 0; k < messages.size(); ++k) {
        Message& m = messages[k];
        if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
        m.recv = r.group().recv(view(m.out), peer, {.tag = static_cast<int>(k)});
        if (own() % 2 == 0) m.recv.wait();
      }
      for (Message& m : messages) {
        m.send.wait();
        m.recv.wait();
      }
      for (std::size_t k = 0; k < messages.size(); ++k) {
        const Message& m = messages[k];
        for (std::size_t i = 0; i < m.out.size(); ++i)
          ASSERT_EQ(m.out[i],
                    static_cast<float>((i + k * 17 + static_cast<std::size_t>(round + 31 * peer)) % 4093))
              << "round " << round << ", message " << k << " [" << i << "]";
      }
    }
  });
}

}  // namespace
}  // namespace weft::test::single_copy_test
