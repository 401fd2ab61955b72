// Causal grouped-query attention, forward and backward, as products of the matrix library over blocks of
// query positions.
//
// A task is one (batch, key/value head) with all query heads that use it. Its query positions are taken in
// blocks of 64; a block sees keys 0 .. end of block, so about half of the scores are never computed. Forward:
// scores of the block, their softmax in place, out = probabilities v. Only the log of each row's sum is kept.
// Backward: the scores are made again, the probabilities from them and the kept sums; then, per block, with
// delta = sum of dout * out per row (Dao 2022),
//   dprobabilities = dout v^T,  dscores = probabilities * (dprobabilities - delta),
//   dv += probabilities^T dout,  dq = dscores k,  dk += dscores^T q.
// Blocks go from the last to the first there, because the last one sees all keys and can overwrite dk and dv.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels {
namespace {

constexpr std::int64_t kQueryBlock = 64;

void check(const char* op, const AttentionShape& s) {
  if (s.kv_heads < 1 || s.heads % s.kv_heads != 0) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} query heads over {} key/value heads; expected a multiple", op, s.heads,
                            s.kv_heads));
  }
}

// Row r of the block is position first + r and sees first + r + 1 keys; entries beyond become 0.
// scores: (rows, keys), become e^(score - maximum); inv_sum, log_sum_exp: (rows)
WEFT_CPU_CLONES void softmax_rows(float* scores, float* inv_sum, float* log_sum_exp, std::int64_t rows,
                                  std::int64_t keys, std::int64_t first) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * keys;
    const std::int64_t visible = first + r + 1;
    const float largest = lane_max(row, visible);
#pragma GCC ivdep
    for (std::int64_t j = 0; j < visible; ++j) row[j] = exp_f32(row[j] - largest);
    const float sum = lane_sum<float>(visible, [&](std::int64_t j) WEFT_INLINE { return row[j]; });
    std::fill(row + visible, row + keys, 0.0f);
    inv_sum[r] = 1.0f / sum;
    log_sum_exp[r] = largest + std::log(sum);
  }
}

// out: (rows, width) with rows `stride` apart; row r is multiplied by factor[r]
WEFT_CPU_CLONES void scale_rows(float* out, const float* factor, std::int64_t rows, std::int64_t width,
                                std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = out + r * stride;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < width; ++i) row[i] *= factor[r];
  }
}

// delta[r] = sum of dout * out over the row. dout, out: (rows, width) with rows `stride` apart
WEFT_CPU_CLONES void row_dots(const float* dout, const float* out, float* delta, std::int64_t rows,
                              std::int64_t width, std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float *a = dout + r * stride, *b = out + r * stride;
    delta[r] = lane_sum<float>(width, [&](std::int64_t i) WEFT_INLINE { return a[i] * b[i]; });
  }
}

// scores: (rows, keys), become probabilities; dscores: (rows, keys), come as dprobabilities and become the
// gradient of the scores before scaling; log_sum_exp, delta: (rows)
WEFT_CPU_CLONES void score_gradient_rows(float* scores, float* dscores, const float* log_sum_exp,
                                         const float* delta, float scaling, std::int64_t rows,
                                         std::int64_t keys, std::int64_t first) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float *row = scores + r * keys, *drow = dscores + r * keys;
    const std::int64_t visible = first + r + 1;
    const float log_sum = log_sum_exp[r], row_delta = delta[r];
#pragma GCC ivdep
    for (std::int64_t j = 0; j < visible; ++j) {
      const float probability = exp_f32(row[j] - log_sum);
      row[j] = probability;
      drow[j] = probability * (drow[j] - row_delta) * scaling;
    }
    std::fill(row + visible, row + keys, 0.0f);
    std::fill(drow + visible, drow + keys, 0.0f);
  }
}

}  // namespace

void attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                       float* log_sum_exp, AttentionShape s) {
  check("attention_forward", s);
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  state.reserve_per_thread(kQueryBlock * (s.seq + 1));
  const std::int64_t group = s.heads / s.kv_heads, q_stride = s.heads * s.head_dim,
                     k_stride = s.kv_heads * s.head_dim;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  parallel_for(state, s.batch * s.kv_heads, [&](std::int64_t task, int thread) {
    const std::int64_t b = task / s.kv_heads, kv_head = task % s.kv_heads;
    const float* keys = k + b * s.seq * k_stride + kv_head * s.head_dim;
    const float* values = v + b * s.seq * k_stride + kv_head * s.head_dim;
    float* inv_sum = state.thread_scratch(thread);
    float* scores = inv_sum + kQueryBlock;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::int64_t first = 0; first < s.seq; first += kQueryBlock) {
        const std::int64_t seen = std::min(s.seq, first + kQueryBlock), rows = seen - first;
        const std::int64_t at = (b * s.seq + first) * q_stride + head * s.head_dim;
        strided_matmul(Stored::plain, Stored::transposed, rows, seen, s.head_dim, scaling, q + at, q_stride,
                       keys, k_stride, 0.0f, scores, seen);
        softmax_rows(scores, inv_sum, log_sum_exp + (b * s.heads + head) * s.seq + first, rows, seen, first);
        strided_matmul(Stored::plain, Stored::plain, rows, s.head_dim, seen, 1.0f, scores, seen, values,
                       k_stride, 0.0f, out + at, q_stride);
        scale_rows(out + at, inv_sum, rows, s.head_dim, q_stride);
      }
    }
  });
}

void attention_backward(KernelContext& ctx, const float* dout, const float* q, const float* k, const float* v,
                        const float* out, const float* log_sum_exp, float* dq, float* dk, float* dv,
                        AttentionShape s) {
  check("attention_backward", s);
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  state.reserve_per_thread(kQueryBlock * (2 * s.seq + 1));
  const std::int64_t group = s.heads / s.kv_heads, q_stride = s.heads * s.head_dim,
                     k_stride = s.kv_heads * s.head_dim;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  parallel_for(state, s.batch * s.kv_heads, [&](std::int64_t task, int thread) {
    const std::int64_t b = task / s.kv_heads, kv_head = task % s.kv_heads;
    const std::int64_t kv_at = b * s.seq * k_stride + kv_head * s.head_dim;
    float* delta = state.thread_scratch(thread);
    float* scores = delta + kQueryBlock;
    float* dscores = scores + kQueryBlock * s.seq;
    float accumulate = 0.0f;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::int64_t block = blocks_of(s.seq, kQueryBlock) - 1; block >= 0; --block) {
        const std::int64_t first = block * kQueryBlock;
        const std::int64_t seen = std::min(s.seq, first + kQueryBlock), rows = seen - first;
        const std::int64_t at = (b * s.seq + first) * q_stride + head * s.head_dim;
        strided_matmul(Stored::plain, Stored::transposed, rows, seen, s.head_dim, scaling, q + at, q_stride,
                       k + kv_at, k_stride, 0.0f, scores, seen);
        strided_matmul(Stored::plain, Stored::transposed, rows, seen, s.head_dim, 1.0f, dout + at, q_stride,
                       v + kv_at, k_stride, 0.0f, dscores, seen);
        row_dots(dout + at, out + at, delta, rows, s.head_dim, q_stride);
        score_gradient_rows(scores, dscores, log_sum_exp + (b * s.heads + head) * s.seq + first, delta,
                            scaling, rows, seen, first);
        strided_matmul(Stored::transposed, Stored::plain, seen, s.head_dim, rows, 1.0f, scores, seen,
                       dout + at, q_stride, accumulate, dv + kv_at, k_stride);
        strided_matmul(Stored::plain, Stored::plain, rows, s.head_dim, seen, 1.0f, dscores, seen, k + kv_at,
                       k_stride, 0.0f, dq + at, q_stride);
        strided_matmul(Stored::transposed, Stored::plain, seen, s.head_dim, rows, 1.0f, dscores, seen, q + at,
                       q_stride, accumulate, dk + kv_at, k_stride);
        accumulate = 1.0f;
      }
    }
  });
}

}  // namespace weft::kernels
