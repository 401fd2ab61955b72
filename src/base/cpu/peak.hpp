// The peak of a core, multiply-adds on registers alone, and of the memory. For programs that say what share
// of it they reach: each compiles it for itself. Any thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "base/cpu/isa.hpp"
#include "weft/base/dtype.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {

#if defined(__x86_64__)
namespace peak_loops {

// The number of sums that do not wait for each other: more than the units' latency times the number of
// units.
inline constexpr int kSums = 12;

inline volatile float sink;

// Each function runs kSums multiply-adds of a whole register the given number of times. The sums have
// different initial values, because the compiler would compute equal sums only once.

inline __attribute__((target("avx512f"))) void f32_512(std::int64_t times) {
  __m512 sum[kSums];
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
#pragma GCC unroll 12
  for (int k = 0; k < kSums; ++k) sum[k] = _mm512_set1_ps(static_cast<float>(k));
  for (std::int64_t t = 0; t < times; ++t) {
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm512_fmadd_ps(s, x, y);
  }
  for (int k = 1; k < kSums; ++k) sum[0] = _mm512_add_ps(sum[0], sum[k]);
  sink = _mm512_cvtss_f32(sum[0]);
}

inline __attribute__((target("avx2,fma"))) void f32_256(std::int64_t times) {
  __m256 sum[kSums];
  const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
#pragma GCC unroll 12
  for (int k = 0; k < kSums; ++k) sum[k] = _mm256_set1_ps(static_cast<float>(k));
  for (std::int64_t t = 0; t < times; ++t) {
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm256_fmadd_ps(s, x, y);
  }
  for (int k = 1; k < kSums; ++k) sum[0] = _mm256_add_ps(sum[0], sum[k]);
  sink = _mm256_cvtss_f32(sum[0]);
}

inline __attribute__((target("avx512f,avx512bf16,avx512vl"))) void bf16_512(std::int64_t times) {
  __m512 sum[kSums];
  const auto x = (__m512bh)_mm512_set1_epi32(0x3a803a80);  // small, and not subnormal
#pragma GCC unroll 12
  for (int k = 0; k < kSums; ++k) sum[k] = _mm512_set1_ps(static_cast<float>(k));
  for (std::int64_t t = 0; t < times; ++t) {
#pragma GCC unroll 12
    for (auto& s : sum) s = _mm512_dpbf16_ps(s, x, x);
  }
  for (int k = 1; k < kSums; ++k) sum[0] = _mm512_add_ps(sum[0], sum[k]);
  sink = _mm512_cvtss_f32(sum[0]);
}

// Four sums, as the products have (nn/kernels/gemm/matrix_tiles.hpp).
inline void bf16_amx(std::int64_t times) {
  struct {
    std::uint8_t palette = 1, first_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const configuration;
  __asm__ volatile(
      "ldtilecfg %0\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
      "tilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7"
      :
      : "m"(configuration));
  for (std::int64_t t = 0; t < times; ++t)
    __asm__ volatile(
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3"
        :
        :);
  __asm__ volatile("tilerelease" : :);
}

inline double best(void (*run)(std::int64_t), double flops) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kTimes = 20000;
  double gflops = 0;
  for (int k = 0; k < 10; ++k) {
    const auto start = Clock::now();
    for (int i = 0; i < 5; ++i) run(kTimes);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    gflops = std::max(gflops, 5 * kTimes * kSums * flops / seconds * 1e-9);
  }
  return gflops;
}

}  // namespace peak_loops

/// Returns the GFLOP/s of the calling thread in f32 or bf16 (with sums in f32), with the widest vector
/// instructions of this CPU. If the CPU has no bf16 instructions, returns the value of f32 for bf16. The
/// result is the best of several runs of about 2 ms. Returns 0 if weft does not know this kind of CPU.
inline double peak_gflops(DType dtype) {
  using namespace peak_loops;
  const CpuIsa isa = cpu_isa();
  constexpr double kOfTiles = 4.0 * 16 * 16 * 32 * 2 / kSums;
  if (dtype == DType::bf16 && isa >= CpuIsa::amx) return best(bf16_amx, kOfTiles);
  if (dtype == DType::bf16 && isa >= CpuIsa::avx512_bf16) return best(bf16_512, 64);
  if (isa >= CpuIsa::avx512) return best(f32_512, 32);
  if (isa >= CpuIsa::avx2) return best(f32_256, 16);
  return 0;
}

#else

inline double peak_gflops(DType) { return 0; }

#endif

/// Returns how many GB/s `threads` threads read together from memory: the best of five reads of 512 MiB in
/// all, of at least 4 and at most 64 MiB in each.
inline double peak_read_gbytes(int threads) {
  using Time = std::chrono::steady_clock;
  constexpr std::size_t kMiBOfWords = std::size_t{1} << 17;
  constexpr int kTimes = 5;
  const auto count = static_cast<std::size_t>(threads);
  const std::size_t words = std::clamp<std::size_t>(512 / count, 4, 64) * kMiBOfWords;
  std::vector<std::vector<std::uint64_t>> blocks(count);
  std::vector<std::uint64_t> sums(count);
  const auto on_all = [&](const auto& work) {
    std::vector<std::thread> all;
    for (std::size_t t = 0; t < count; ++t) all.emplace_back([&work, t] { work(t); });
    for (std::thread& thread : all) thread.join();
  };
  on_all([&](std::size_t t) { blocks[t].assign(words, t); });
  double best = 0;
  for (int k = 0; k < kTimes; ++k) {
    const auto start = Time::now();
    on_all([&](std::size_t t) {
      std::uint64_t sum[8] = {};  // so that no addition waits for the one before it
      for (std::size_t i = 0; i < words; i += 8)
        for (std::size_t j = 0; j < 8; ++j) sum[j] += blocks[t][i + j];
      sums[t] = std::accumulate(sum, sum + 8, sums[t]);
    });
    const double seconds = std::chrono::duration<double>(Time::now() - start).count();
    best = std::max(best, static_cast<double>(count * words * sizeof(std::uint64_t)) / seconds * 1e-9);
  }
  volatile std::uint64_t sink = std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
  static_cast<void>(sink);
  return best;
}

}  // namespace weft
