// Addition, scaling, filling, rounding to bf16, and the sum of squares.
#include <algorithm>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

WEFT_CPU_CLONES_OF_T(void, add_range, (const T* a, const T* b, T* out, std::int64_t n), (a, b, out, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) out[i] = T(wide(a[i]) + wide(b[i]));
}

WEFT_CPU_CLONES(void, scale_range, (float* x, float factor, std::int64_t n), (x, factor, n)) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
}

WEFT_CPU_CLONES(void, round_range, (const float* x, bf16* y, std::int64_t n), (x, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] = bf16(x[i]);
}

WEFT_CPU_CLONES(void, widen_range, (const bf16* x, float* y, std::int64_t n), (x, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(x[i]);
}

// The product of two f32 is exact in f64.
WEFT_CPU_CLONES(double, squares_of_range, (const float* x, std::int64_t n), (x, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE {
    const double wide = x[i];
    return wide * wide;
  });
}

}  // namespace

template <class T>
void add(KernelContext& ctx, const T* a, const T* b, T* out, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    add_range(a + begin, b + begin, out + begin, end - begin);
  });
}

void scale(KernelContext& ctx, float* x, float factor, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock,
                  [&](std::int64_t begin, std::int64_t end) { scale_range(x + begin, factor, end - begin); });
}

void fill(KernelContext& ctx, float* x, float value, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock,
                  [&](std::int64_t begin, std::int64_t end) { std::fill(x + begin, x + end, value); });
}

template <class T>
void dropout(KernelContext& ctx, const T* x, T* y, std::int64_t n, const DropoutRun& run) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kAtOnce = 256;
    float numbers[kAtOnce];
    for (std::int64_t at = begin; at < end; at += kAtOnce) {
      const std::int64_t count = std::min(kAtOnce, end - at);
      run.stream.uniform(run.first + static_cast<std::uint64_t>(at), count, numbers);
      for (std::int64_t i = 0; i < count; ++i)
        y[at + i] = T(numbers[i] >= run.p ? wide(x[at + i]) * run.scale : 0.0f);
    }
  });
}

void round_to_bf16(KernelContext& ctx, const float* x, bf16* y, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    round_range(x + begin, y + begin, end - begin);
  });
}

void widen_bf16(KernelContext& ctx, const bf16* x, float* y, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    widen_range(x + begin, y + begin, end - begin);
  });
}

void sum_of_squares(KernelContext& ctx, const float* x, double* sum, std::int64_t n) {
  KernelContext::State& state = ctx.state();
  const std::int64_t blocks = blocks_of(n, kElementBlock);
  double* partials = state.scratch_f64(blocks);
  parallel_blocks(state, n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    partials[begin / kElementBlock] = squares_of_range(x + begin, end - begin);
  });
  double total = 0.0;
  for (std::int64_t block = 0; block < blocks; ++block) total += partials[block];
  *sum = total;
}

WEFT_KERNEL_OF_BOTH(add);
WEFT_KERNEL_OF_BOTH(dropout);

}  // namespace weft::kernels::cpu
