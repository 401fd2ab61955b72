// After its first run, a step on gradients allocates no large block; its results do not depend on the number
// of threads.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <new>

#include "base/text/plain_streams.hpp"
#include "dp/loops.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"

namespace {

// Allocations above this many bytes are counted, on all threads, while `counting`.
constexpr std::size_t kLarge = 4096;
std::atomic<bool> counting{false};
std::atomic<int> large_ones{0};
std::atomic<std::size_t> largest{0};

void note(std::size_t bytes) {
  if (bytes <= kLarge || !counting.load()) return;
  large_ones.fetch_add(1);
  largest.store(bytes);
}
void* counted(void* p, std::size_t bytes) {
  note(bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(std::size_t n) { return counted(std::malloc(n == 0 ? 1 : n), n); }
void* operator new(std::size_t n, std::align_val_t a) {
  const auto align = static_cast<std::size_t>(a);
  return counted(std::aligned_alloc(align, (n + align - 1) / align * align), n);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace weft {
namespace {

using test::Rank;
using test::Ranks;

// So many gradients that lists of them would be large, each in memory of its own.
struct ManyGradients {
  static constexpr std::size_t kCount = 1200;
  ManyGradients(const DeviceMesh& mesh, const Placements& placements) : values(kCount * 40, 1.0f) {
    const LayoutRef layout = make_layout(mesh, placements, {40});
    names.reserve(kCount);
    for (std::size_t i = 0; i < kCount; ++i) names.push_back("layers." + std::to_string(i) + ".weight");
    for (std::size_t i = 0; i < kCount; ++i)
      list.push_back({names[i], view(values.data() + i * 40, 40), layout});
    at_first = list;
  }
  void renew() {
    std::fill(values.begin(), values.end(), 1.0f);
    std::copy(at_first.begin(), at_first.end(), list.begin());
  }
  std::vector<float> values;
  std::vector<std::string> names;
  std::vector<Gradient> list, at_first;
};

TEST(DpMemory, AStepAllocatesNoLargeBlock) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    Compute compute(rank.context, 2);
    ManyGradients sums(mesh, {Partial{}}), replicas(mesh, {Replicate{}});
    std::vector<float> large(300000), bound(70000);
    std::vector<BucketEntry> entries = {{"large", 300000}, {"bound", 70000}};
    for (std::size_t i = 0; i < 1000; ++i) entries.push_back({"slot", 40});
    BucketReducer reducer(mesh, entries, {.bucket_bytes = 1 << 20, .compute = &compute});
    reducer.bind(0, view(large));
    reducer.bind(1, view(bound));
    for (int step = 0; step < 4; ++step) {
      sums.renew();
      replicas.renew();
      rank.meet("step " + std::to_string(step));
      if (step == 2 && rank.rank == 0) counting = true;
      rank.meet("counting " + std::to_string(step));
      for (std::size_t i = 0; i < reducer.size(); ++i) reducer.ready(i);
      reducer.finish();
      average_gradients(sums.list, mesh["dp"], &compute);
      sync_replicated_gradients(replicas.list, mesh["dp"], {.tolerance = 0, .compute = &compute});
      if (rank.rank == 1) replicas.values[7] += 0x1p-22f;  // an average is taken
      sync_replicated_gradients(replicas.list, mesh["dp"], {.on_drift = OnDrift::average});
      EXPECT_NEAR(grad_norm(sums.list, 2, &compute), 2 * std::sqrt(40.0 * 1200), 1e-3);
      clip_grad_norm(replicas.list, 0.5, 2, NonFinite::error, &compute);
      rank.meet("counted " + std::to_string(step));
      if (rank.rank == 0) counting = false;
    }
  });
  EXPECT_EQ(large_ones, 0) << "the last of them of " << largest << " bytes";
}

template <class T>
std::vector<T> numbers(std::size_t count) {
  std::vector<float> x(count);
  RandomStream(3, "numbers").normal(0, static_cast<std::int64_t>(count), x.data());
  std::vector<T> v;
  for (std::size_t i = 0; i < count; ++i) v.push_back(T(std::ldexp(x[i], static_cast<int>(i % 13) - 6)));
  return v;
}

// Blocks of different sizes, and the remainder of a block; each of several threads gets different blocks
// every time.
TEST(DpMemory, TheNumberOfThreadsChangesNoBit) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    struct Result {
      std::vector<double> norms;
      std::vector<float> f32;
      std::vector<bf16> b16;
      std::vector<f16> h16;
      std::vector<double> f64;
    };
    const auto run = [&](Compute* compute) {
      Result r{{},
               numbers<float>(3 * 65536 + 17),
               numbers<bf16>(70001),
               numbers<f16>(65537),
               numbers<double>(100001)};
      std::vector<float> tiny(5, 1e-30f);
      const auto layout = [&](std::size_t n) {
        return make_layout(mesh, {Partial{}}, {static_cast<std::int64_t>(n)});
      };
      std::vector<Gradient> g = {{"f32", view(r.f32), layout(r.f32.size())},
                                 {"b16", view(r.b16), layout(r.b16.size())},
                                 {"tiny", view(tiny), layout(5)},
                                 {"h16", view(r.h16), layout(r.h16.size())},
                                 {"f64", view(r.f64), layout(r.f64.size())}};
      average_gradients(g, mesh, compute);
      for (const double p : {1.0, 2.0, 3.0, 9.0, std::numeric_limits<double>::infinity()})
        r.norms.push_back(grad_norm(g, p, compute));
      r.norms.push_back(clip_grad_norm(g, 1, 2, NonFinite::error, compute));
      return r;
    };
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    const Result alone = run(nullptr);
    for (const int threads : {1, 2, 3}) {
      Compute compute(rank.context, threads);
      for (int again = 0; again < 3; ++again) {
        const Result r = run(&compute);
        EXPECT_TRUE(same(r.norms, alone.norms)) << threads << " threads";
        EXPECT_TRUE(same(r.f32, alone.f32) && same(r.b16, alone.b16) && same(r.h16, alone.h16) &&
                    same(r.f64, alone.f64))
            << threads << " threads";
      }
    }
    EXPECT_NEAR(alone.norms[1], alone.norms[5], 0);
  });
}

// The sum of many blocks is that of a plain loop, up to rounding.
TEST(DpMemory, BlocksAddUp) {
  const std::vector<float> x = numbers<float>(200000);
  double ones = 0, squares = 0, most = 0;
  for (const float v : x) {
    ones += std::abs(static_cast<double>(v));
    squares += static_cast<double>(v) * static_cast<double>(v);
    most = std::max(most, std::abs(static_cast<double>(v)));
  }
  std::vector<float> memory = x;
  const Gradient g[] = {{"x", view(memory)}};
  EXPECT_NEAR(grad_norm(g, 1) / ones, 1, 1e-12);
  EXPECT_NEAR(grad_norm(g) / std::sqrt(squares), 1, 1e-12);
  EXPECT_EQ(grad_norm(g, std::numeric_limits<double>::infinity()), most);
  memory[199999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(grad_norm(g)));
  EXPECT_TRUE(std::isnan(grad_norm(g, std::numeric_limits<double>::infinity())));
}

TEST(DpMemory, SixteenBitNumbersAreConvertedAsEverywhere) {
  std::vector<f16> halves(65536);
  std::vector<bf16> brains(65536), again(65536);
  std::vector<float> of_halves(65536), of_brains(65536);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    halves[bits] = f16::from_bits(static_cast<std::uint16_t>(bits));
    brains[bits] = bf16::from_bits(static_cast<std::uint16_t>(bits));
  }
  dp::loops::widen(halves.data(), of_halves.data(), halves.size());
  dp::loops::widen(brains.data(), of_brains.data(), brains.size());
  const auto same = [](float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
           (std::isnan(a) && std::isnan(b));
  };
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    ASSERT_TRUE(same(of_halves[bits], static_cast<float>(halves[bits]))) << bits;
    ASSERT_TRUE(same(of_brains[bits], static_cast<float>(brains[bits]))) << bits;
    of_brains[bits] *= 1.0f + 0x1p-9f;  // between two of them, and ties
  }
  dp::loops::narrow(of_brains.data(), again.data(), again.size());
  for (std::size_t i = 0; i < again.size(); ++i) ASSERT_EQ(again[i].bits, bf16(of_brains[i]).bits) << i;
}

// If the system refuses threads, a rank works with the threads that it has.
TEST(DpMemory, GoesOnWithFewerThreads) {
  if (!test::kPlainMemory) GTEST_SKIP() << test::kNoPlainMemory;
  const auto work = [] {
    Context context;
    Compute compute(context, 64);
    const std::vector<float> w(std::size_t{1} << 20, 1.0f);
    const std::vector<Gradient> list = {{"w",
                                         {reinterpret_cast<std::byte*>(const_cast<float*>(w.data())),
                                          DType::f32,
                                          {},
                                          Dims::line(1 << 20),
                                          Dims::line(1)}}};
    std::size_t pages = 0;
    FileIn("/proc/self/statm") >> pages;
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = pages * 4096 + (std::size_t{40} << 20);  // some stacks of 8 MiB
    ::setrlimit(RLIMIT_AS, &limit);
    std::_Exit(grad_norm(list, 2, &compute) == 1024 ? 0 : 1);
  };
  EXPECT_EXIT(
      work(), testing::ExitedWithCode(0),
      "compute: thread [0-9]+ of 64 cannot be made: Resource temporarily unavailable; continuing with [0-9]+ "
      "\\(limits: ulimit -u, the cgroup's pids.max, ulimit -v\\)");
}

}  // namespace
}  // namespace weft
