// Rotary position embedding: the tables, the rotation and the inverse rotation.
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "nn/kernels/reference.hpp"

namespace weft::kernels::cpu {
namespace {

// One position: every head's pairs (i, i + half) rotate by the same angles. direction is 1, or -1 for the
// inverse rotation.
WEFT_CPU_CLONES_OF_T(void, turn,
                     (const T* x, const float* cosine, const float* sine, float direction, T* y,
                      std::int64_t heads, std::int64_t half),
                     (x, cosine, sine, direction, y, heads, half)) {
  for (std::int64_t head = 0; head < heads; ++head) {
    const T* in = x + head * 2 * half;
    T* out = y + head * 2 * half;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < half; ++i) {
      const float low = wide(in[i]), high = wide(in[i + half]), turned_sine = direction * sine[i];
      out[i] = T(low * cosine[i] - high * turned_sine);
      out[i + half] = T(high * cosine[i] + low * turned_sine);
    }
  }
}

template <class T>
void turn_all(KernelContext& ctx, const T* x, const float* cosine, const float* sine, float direction, T* y,
              RopeShape s) {
  const std::int64_t half = s.head_dim / 2, row = s.heads * s.head_dim;
  parallel_blocks(ctx.state(), s.batch * s.seq, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t position = t % s.seq;
      turn(x + t * row, cosine + position * half, sine + position * half, direction, y + t * row, s.heads,
           half);
    }
  });
}

}  // namespace

template <class T>
void rope_forward(KernelContext& ctx, const T* x, const float* cosine, const float* sine, T* y, RopeShape s) {
  turn_all(ctx, x, cosine, sine, 1.0f, y, s);
}

template <class T>
void rope_backward(KernelContext& ctx, const T* dy, const float* cosine, const float* sine, T* dx,
                   RopeShape s) {
  turn_all(ctx, dy, cosine, sine, -1.0f, dx, s);
}

WEFT_KERNEL_OF_BOTH(rope_forward);
WEFT_KERNEL_OF_BOTH(rope_backward);

}  // namespace weft::kernels::cpu

namespace weft::kernels {

void rope_tables(float theta, std::int64_t head_dim, std::int64_t positions, float* cosine, float* sine) {
  reference::rope_tables<float>(theta, head_dim, positions, cosine, sine);
}

}  // namespace weft::kernels
