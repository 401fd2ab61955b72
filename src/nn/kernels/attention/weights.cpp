// Full attention in two steps, with its weights in memory between them, so that the weights may be changed
// (dropout). It is for short sequences, such as the windows of a map.
#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

// The places of head h of sample b. q, out: (batch, queries, heads, head_dim); k, v: (batch, keys, kv_heads,
// head_dim); weights: (batch, heads, queries, keys).
struct Head {
  std::int64_t q, q_step, k, k_step, weights;
};

Head head_of(const FullAttentionShape& s, std::int64_t b, std::int64_t h) {
  const std::int64_t kv = h / (s.heads / s.kv_heads);
  return {(b * s.queries * s.heads + h) * s.head_dim, s.heads * s.head_dim,
          (b * s.keys * s.kv_heads + kv) * s.head_dim, s.kv_heads * s.head_dim,
          (b * s.heads + h) * s.queries * s.keys};
}

WEFT_CPU_CLONES(float, dot, (const float* a, const float* b, std::int64_t n), (a, b, n)) {
  return lane_sum<float>(n, [&](std::int64_t i) WEFT_INLINE { return a[i] * b[i]; });
}

// y += factor x
WEFT_CPU_CLONES(void, add_scaled, (float* y, const float* x, float factor, std::int64_t n),
                (y, x, factor, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

float scale_of(const FullAttentionShape& s) { return 1.0f / std::sqrt(static_cast<float>(s.head_dim)); }

// Computes the weights of one query. The weights of a query that sees no key are 0. row: (keys)
void softmax(float* row, std::int64_t keys) {
  float largest = row[0];
  for (std::int64_t j = 1; j < keys; ++j) largest = std::max(largest, row[j]);
  if (largest == -std::numeric_limits<float>::infinity()) largest = 0;
  float sum = 0;
  for (std::int64_t j = 0; j < keys; ++j) sum += row[j] = std::exp(row[j] - largest);
  if (sum == 0) return;  // all are 0
  for (std::int64_t j = 0; j < keys; ++j) row[j] /= sum;
}

void clear(float* x, std::int64_t n) { std::fill_n(x, n, 0.0f); }

}  // namespace

void attention_weights_forward(KernelContext& ctx, const float* q, const float* k, const float* bias,
                               float* weights, FullAttentionShape s) {
  const float scale = scale_of(s);
  if (s.keys == 0) return;
  parallel_for(ctx.state(), s.batch * s.heads, [&](std::int64_t task, int) {
    const Head at = head_of(s, task / s.heads, task % s.heads);
    for (std::int64_t i = 0; i < s.queries; ++i) {
      float* row = weights + at.weights + i * s.keys;
      for (std::int64_t j = 0; j < s.keys; ++j)
        row[j] = dot(q + at.q + i * at.q_step, k + at.k + j * at.k_step, s.head_dim) * scale +
                 (bias == nullptr ? 0.0f : bias[i * s.keys + j]);
      softmax(row, s.keys);
    }
  });
}

// With w = softmax(z), dz_j = w_j (dw_j - Σ_l dw_l w_l); z = q kᵀ scale + bias. A task is a sample, so that
// no two tasks write one k. dbias is summed afterwards, sample by sample.
void attention_weights_backward(KernelContext& ctx, const float* dweights, const float* weights,
                                const float* q, const float* k, float* dq, float* dk, float* dbias,
                                FullAttentionShape s) {
  const float scale = scale_of(s);
  const std::int64_t of_sample = s.heads * s.queries * s.keys;
  clear(dq, s.batch * s.queries * s.heads * s.head_dim);
  clear(dk, s.batch * s.keys * s.kv_heads * s.head_dim);
  float* const dscores = ctx.state().scratch(s.batch * of_sample);
  parallel_for(ctx.state(), s.batch, [&](std::int64_t b, int) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const Head at = head_of(s, b, h);
      for (std::int64_t i = 0; i < s.queries; ++i) {
        const std::int64_t row = at.weights + i * s.keys;
        const float inner = dot(dweights + row, weights + row, s.keys);
        for (std::int64_t j = 0; j < s.keys; ++j) {
          const float dz = weights[row + j] * (dweights[row + j] - inner);
          dscores[row + j] = dz;
          add_scaled(dq + at.q + i * at.q_step, k + at.k + j * at.k_step, dz * scale, s.head_dim);
          add_scaled(dk + at.k + j * at.k_step, q + at.q + i * at.q_step, dz * scale, s.head_dim);
        }
      }
    }
  });
  if (dbias == nullptr) return;
  clear(dbias, s.queries * s.keys);
  for (std::int64_t head = 0; head < s.batch * s.heads; ++head)
    add_scaled(dbias, dscores + head * s.queries * s.keys, 1.0f, s.queries * s.keys);
}

void attention_apply_forward(KernelContext& ctx, const float* weights, const float* v, float* out,
                             FullAttentionShape s) {
  parallel_for(ctx.state(), s.batch * s.heads, [&](std::int64_t task, int) {
    const Head at = head_of(s, task / s.heads, task % s.heads);
    for (std::int64_t i = 0; i < s.queries; ++i) {
      float* const y = out + at.q + i * at.q_step;
      clear(y, s.head_dim);
      for (std::int64_t j = 0; j < s.keys; ++j)
        add_scaled(y, v + at.k + j * at.k_step, weights[at.weights + i * s.keys + j], s.head_dim);
    }
  });
}

void attention_apply_backward(KernelContext& ctx, const float* dout, const float* weights, const float* v,
                              float* dweights, float* dv, FullAttentionShape s) {
  clear(dv, s.batch * s.keys * s.kv_heads * s.head_dim);
  parallel_for(ctx.state(), s.batch, [&](std::int64_t b, int) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const Head at = head_of(s, b, h);
      for (std::int64_t i = 0; i < s.queries; ++i)
        for (std::int64_t j = 0; j < s.keys; ++j) {
          const std::int64_t w = at.weights + i * s.keys + j;
          const float* const dy = dout + at.q + i * at.q_step;
          dweights[w] = dot(dy, v + at.k + j * at.k_step, s.head_dim);
          add_scaled(dv + at.k + j * at.k_step, dy, weights[w], s.head_dim);
        }
    }
  });
}

}  // namespace weft::kernels::cpu
