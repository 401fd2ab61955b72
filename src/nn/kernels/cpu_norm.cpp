// RMS norm, forward and backward.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

WEFT_CPU_CLONES_OF_T(void, forward_rows,
                     (const T* x, const float* weight, T* y, float* inv_rms, std::int64_t rows,
                      std::int64_t dim, float eps),
                     (x, weight, y, inv_rms, rows, dim, eps)) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * dim;
    T* out = y + row * dim;
    const float squares =
        lane_sum<float>(dim, [&](std::int64_t i) WEFT_INLINE { return wide(in[i]) * wide(in[i]); });
    const float inv = 1.0f / std::sqrt(squares / static_cast<float>(std::max<std::int64_t>(dim, 1)) + eps);
    inv_rms[row] = inv;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) out[i] = T(wide(in[i]) * inv * weight[i]);
  }
}

// With s = inv_rms and y_i = w_i x_i s, the derivative of s to x_i is -s^3 x_i / dim, so
// dx_i = s w_i dy_i - x_i (s^3 / dim) sum_j dy_j w_j x_j.
WEFT_CPU_CLONES_OF_T(void, backward_rows,
                     (const T* dy, const T* x, const float* weight, const float* inv_rms, T* dx,
                      float* dweight, std::int64_t rows, std::int64_t dim),
                     (dy, x, weight, inv_rms, dx, dweight, rows, dim)) {
  std::memset(dweight, 0, sizeof(float) * static_cast<std::size_t>(dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* dout = dy + row * dim;
    const T* in = x + row * dim;
    T* din = dx + row * dim;
    const float dot = lane_sum<float>(
        dim, [&](std::int64_t i) WEFT_INLINE { return wide(dout[i]) * weight[i] * wide(in[i]); });
    const float inv = inv_rms[row];
    const float pull = dot * inv * inv * inv / static_cast<float>(dim);
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) {
      const float scaled = wide(dout[i]) * inv, at = wide(in[i]);
      dweight[i] += scaled * at;
      din[i] = T(scaled * weight[i] - at * pull);
    }
  }
}

}  // namespace

template <class T>
void rms_norm_forward(KernelContext& ctx, const T* x, const float* weight, T* y, float* inv_rms,
                      std::int64_t rows, std::int64_t dim, float eps) {
  parallel_blocks(ctx.state(), rows, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    forward_rows(x + begin * dim, weight, y + begin * dim, inv_rms + begin, end - begin, dim, eps);
  });
}

template <class T>
void rms_norm_backward(KernelContext& ctx, const T* dy, const T* x, const float* weight, const float* inv_rms,
                       T* dx, float* dweight, std::int64_t rows, std::int64_t dim) {
  KernelContext::State& state = ctx.state();
  const std::int64_t blocks = blocks_of(rows, kRowBlock);
  float* partials = state.scratch(blocks * dim);
  parallel_blocks(state, rows, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    backward_rows(dy + begin * dim, x + begin * dim, weight, inv_rms + begin, dx + begin * dim,
                  partials + begin / kRowBlock * dim, end - begin, dim);
  });
  add_partial_rows(state, partials, dweight, blocks, dim);
}

WEFT_KERNEL_OF_BOTH(rms_norm_forward);
WEFT_KERNEL_OF_BOTH(rms_norm_backward);

}  // namespace weft::kernels::cpu
