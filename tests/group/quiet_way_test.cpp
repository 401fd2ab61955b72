// A blocking call whose peers have arrived does not allocate and does not wait in the kernel, for a lock or
// anything else. Counted, not timed.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "host/cores/usable_cores.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/tensor.hpp"

namespace {

thread_local bool counting = false;
thread_local long allocations = 0;

void* counted(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
  if (counting) ++allocations;
  bytes = (bytes + alignment - 1) / alignment * alignment;
  if (void* p =
          alignment > alignof(std::max_align_t) ? std::aligned_alloc(alignment, bytes) : std::malloc(bytes))
    return p;
  throw std::bad_alloc();
}

}  // namespace

// The library's, too: it takes these from the program. If the compiler inlines only one of a pair, it
// takes them for a mismatch.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void* operator new(std::size_t bytes, std::align_val_t a) {
  return counted(bytes, static_cast<std::size_t>(a));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace weft::test {
namespace {

#if defined(__x86_64__)

// The system calls of a wait: futexes, yields and sleeps. After trap_system_calls() the kernel does not
// perform those of this thread, which are counted. The waiter polls again, as after a spurious wake-up, so
// that the process ends well.
std::atomic<long> trapped{0};
std::atomic<int> last_number{-1};

void on_trap(int, siginfo_t* info, void* context) {
  trapped.fetch_add(1, std::memory_order_relaxed);
  last_number.store(info->si_syscall, std::memory_order_relaxed);
  auto* const c = static_cast<ucontext_t*>(context);
  c->uc_mcontext.gregs[REG_RAX] = -EAGAIN;
}

void trap_system_calls() {
  struct sigaction action {};
  action.sa_sigaction = on_trap;
  action.sa_flags = SA_SIGINFO;
  ASSERT_EQ(::sigaction(SIGSYS, &action, nullptr), 0);
#define WEFT_TRAP(number) \
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP)
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      WEFT_TRAP(SYS_futex),
      WEFT_TRAP(SYS_sched_yield),
      WEFT_TRAP(SYS_nanosleep),
      WEFT_TRAP(SYS_clock_nanosleep),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
#undef WEFT_TRAP
  const sock_fprog filter = {.len = std::size(program), .filter = program};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0), 0);
}

// `bound`: each rank to a core of its own, as launchers do.
struct Place {
  Memory memory;
  bool bound;
};

// The core with that index among the cores that this process may use.
void bind_to(int number) {
  cpu_set_t usable, one;
  CPU_ZERO(&usable);
  CPU_ZERO(&one);
  ASSERT_EQ(::sched_getaffinity(0, sizeof usable, &usable), 0);
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &usable) && number-- == 0) CPU_SET(core, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
}

class QuietWay : public testing::TestWithParam<Place> {};
INSTANTIATE_TEST_SUITE_P(Shm, QuietWay,
                         testing::Values(Place{Memory::shared, false}, Place{Memory::local, false},
                                         Place{Memory::shared, true}),
                         [](const auto& place) {
                           return std::string(place.param.memory == Memory::shared ? "shared" : "foreign") +
                                  (place.param.bound ? "_bound" : "");
                         });

TEST_P(QuietWay, NeitherAllocatesNorAsksTheKernel) {
  if (usable_cores() < 2) GTEST_SKIP() << "two ranks on one core have to yield";
  ::setenv("WEFT_SINGLE_COPY", "off", 1);  // which is a system call, of course
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    if (GetParam().bound) bind_to(r.rank);
    ProcessGroup g = r.group().duplicate();
    const std::int64_t counts[] = {2, 500, 10000, 200000};
    std::vector<Tensor> in, out;
    for (const std::int64_t n : counts) {
      in.emplace_back(r.context, Shape{n}, DType::f32, GetParam().memory);
      out.emplace_back(r.context, Shape{n}, DType::f32, GetParam().memory);
      for (float& x : in.back().as<float>()) x = 1.0f;
    }
    std::vector<PersistentCall> started;
    std::vector<std::vector<std::int64_t>> halves;
    for (std::size_t i = 0; i < in.size(); ++i) {
      const std::int64_t n = counts[i];
      halves.push_back({n / 2, n - n / 2});
      started.push_back(g.make_all_reduce(in[i], out[i]));
      started.push_back(g.make_all_gather_v(
          view(in[i].as<float>().data(), halves[i][static_cast<std::size_t>(r.rank)]), out[i], {halves[i]}));
    }
    const auto calls = [&](std::size_t i) {
      for (const std::size_t k : {2 * i, 2 * i + 1}) started[k].start().wait();
      const std::int64_t n = counts[i];
      const auto part = [&](const Tensor& t) { return TensorView(view(t.as<float>().data(), n / 2)); };
      g.all_reduce(in[i], out[i]).wait();
      g.all_gather(part(in[i]), out[i]).wait();
      g.reduce_scatter(in[i], part(out[i])).wait();
      g.broadcast(in[i], out[i], 0).wait();
      g.all_to_all(in[i], out[i]).wait();
      g.barrier().wait();
    };
    for (std::size_t i = 0; i < in.size(); ++i) calls(i);
    trap_system_calls();
    // The best of many: a rank whose core is another program's for a while has to be waited for, by whatever
    // means.
    long least_calls = -1, least_allocations = -1;
    for (int round = 0; round < 300; ++round) {
      trapped = 0;
      allocations = 0;
      counting = true;
      for (std::size_t i = 0; i < in.size(); ++i) calls(i);
      counting = false;
      if (least_calls < 0 || trapped < least_calls) least_calls = trapped;
      if (least_allocations < 0 || allocations < least_allocations) least_allocations = allocations;
    }
    EXPECT_EQ(least_calls, 0) << "system call " << last_number;
    EXPECT_EQ(least_allocations, 0);
    // The counters count.
    trapped = allocations = 0;
    counting = true;
    delete new int(1);
    counting = false;
    std::this_thread::yield();
    EXPECT_EQ(allocations, 1);
    EXPECT_EQ(trapped, 1);
  });
  ::unsetenv("WEFT_SINGLE_COPY");
}

#endif

}  // namespace
}  // namespace weft::test
