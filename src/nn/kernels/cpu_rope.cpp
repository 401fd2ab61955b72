// Rotary position embedding: the tables, the rotation and the inverse rotation.
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "nn/kernels/reference.hpp"

namespace weft::kernels::cpu {
namespace {

// One position: every head's pairs (i, i + half) rotate by the same angles. direction is 1, or -1 for the
// inverse rotation.
WEFT_CPU_CLONES(void, turn,
                (const float* x, const float* cosine, const float* sine, float direction, float* y,
                 std::int64_t heads, std::int64_t half),
                (x, cosine, sine, direction, y, heads, half)) {
  for (std::int64_t head = 0; head < heads; ++head) {
    const float* in = x + head * 2 * half;
    float* out = y + head * 2 * half;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < half; ++i) {
      const float low = in[i], high = in[i + half], turned_sine = direction * sine[i];
      out[i] = low * cosine[i] - high * turned_sine;
      out[i + half] = high * cosine[i] + low * turned_sine;
    }
  }
}

void turn_all(KernelContext& ctx, const float* x, const float* cosine, const float* sine, float direction,
              float* y, RopeShape s) {
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

void rope_forward(KernelContext& ctx, const float* x, const float* cosine, const float* sine, float* y,
                  RopeShape s) {
  turn_all(ctx, x, cosine, sine, 1.0f, y, s);
}

void rope_backward(KernelContext& ctx, const float* dy, const float* cosine, const float* sine, float* dx,
                   RopeShape s) {
  turn_all(ctx, dy, cosine, sine, -1.0f, dx, s);
}

}  // namespace weft::kernels::cpu

namespace weft::kernels {

void rope_tables(float theta, std::int64_t head_dim, std::int64_t positions, float* cosine, float* sine) {
  reference::rope_tables<float>(theta, head_dim, positions, cosine, sine);
}

}  // namespace weft::kernels
