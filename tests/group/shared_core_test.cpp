// Two ranks that may use two cores, and therefore spin, run on one core. Neither may waste the time of the
// other by spinning.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <ctime>
#include <vector>

#include "host/cores/usable_cores.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {
namespace {

// Binds this thread to the first of its cores.
void bind_to_first() {
  cpu_set_t usable, one;
  CPU_ZERO(&usable);
  CPU_ZERO(&one);
  ASSERT_EQ(::sched_getaffinity(0, sizeof usable, &usable), 0);
  int core = 0;
  while (!CPU_ISSET(core, &usable)) ++core;
  CPU_SET(core, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
}

double processor_microseconds() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) / 1e3;
}

class SharedCore : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(Shm, SharedCore, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

// In processor time, which other programs on the machine do not change. Spinning for as long as ranks on
// separate cores do takes some 100 µs a wait, and a call has one to three waits.
TEST_P(SharedCore, RanksYieldToEachOther) {
  if (usable_cores() < 2) GTEST_SKIP() << "on one core ranks never spin";
  run_ranks(GetParam(), 2, [](Rank& r) {
    ProcessGroup& g = r.group();
    bind_to_first();
    for (const std::int64_t count : {2, 8192}) {
      std::vector<float> x(static_cast<std::size_t>(count), 1.0f);
      const auto call = [&] { g.all_reduce(x).wait(); };
      for (int i = 0; i < 20; ++i) call();
      std::vector<double> times;
      for (int i = 0; i < 200; ++i) {
        const double began = processor_microseconds();
        call();
        times.push_back(processor_microseconds() - began);
      }
      std::nth_element(times.begin(), times.begin() + 100, times.end());
      EXPECT_LT(times[100], 30) << count << " elements";
    }
  });
}

}  // namespace
}  // namespace weft::test
