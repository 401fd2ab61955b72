// Causal grouped-query attention, forward and backward, as products of the matrix library over blocks of
// query positions.
//
// A task is one (batch, key/value head) with all query heads that use it. Its query positions are taken in
// blocks of 64; a block sees keys 0 .. end of block, so about half of the scores are never computed. The
// scores of a block are kept transposed, (keys, 64 queries): then maxima and sums over keys go down columns,
// 64 queries side by side in the vector registers, and no row has a rest. A block of fewer queries leaves
// columns unused, whose contents nobody reads on. Forward: scores, their softmax in place, out =
// probabilities v. Only the log of each query's sum is kept. Backward: the scores are made again, the
// probabilities from them and the kept sums; then, per block, with delta = sum of dout * out per query (Dao
// 2022),
//   dprobabilities = dout v^T,  dscores = probabilities * (dprobabilities - delta),
//   dv += probabilities^T dout,  dq = dscores k,  dk += dscores^T q.
// Blocks go from the last to the first there, because the last one sees all keys and can overwrite dk and dv.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kQueryBlock = 64;

void check(const char* op, const AttentionShape& s) {
  if (s.kv_heads < 1 || s.heads % s.kv_heads != 0) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} query heads over {} key/value heads; expected a multiple", op, s.heads,
                            s.kv_heads));
  }
}

// Query r of the block is position first + r and sees first + r + 1 keys; entries beyond become 0.
// scores: (keys, 64 queries), become e^(score - maximum); largest, sum: (64 queries), of the scores and of
// what they become
WEFT_CPU_CLONES void softmax_columns(float* scores, float* largest, float* sum, std::int64_t keys,
                                     std::int64_t first) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  constexpr std::int64_t kPartialSum =
      32;  // keys added up before they join the sum, so that long sums stay accurate
  std::fill(largest, largest + kQueryBlock, kMinusInfinity);
  std::fill(sum, sum + kQueryBlock, 0.0f);
  for (std::int64_t key = 0; key < keys; ++key) {
    float* row = scores + key * kQueryBlock;
    const auto hidden = static_cast<int>(key - first);  // queries 0 .. hidden - 1 do not see this key
    if (hidden > 0) {
      for (int r = 0; r < kQueryBlock; ++r) row[r] = r < hidden ? kMinusInfinity : row[r];
    }
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) largest[r] = row[r] > largest[r] ? row[r] : largest[r];
  }
  for (std::int64_t begin = 0; begin < keys; begin += kPartialSum) {
    float partial[kQueryBlock] = {};
    for (std::int64_t key = begin; key < std::min(keys, begin + kPartialSum); ++key) {
      float* row = scores + key * kQueryBlock;
#pragma GCC ivdep
      for (int r = 0; r < kQueryBlock; ++r) {
        row[r] = exp_f32(row[r] - largest[r]);
        partial[r] += row[r];
      }
    }
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) sum[r] += partial[r];
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

// scores: (keys, 64 queries), become probabilities; dscores: (keys, 64 queries), come as dprobabilities and
// become the gradient of the scores before scaling; log_sum_exp, delta: (64 queries)
WEFT_CPU_CLONES void score_gradient_columns(float* scores, float* dscores, const float* log_sum_exp,
                                            const float* delta, float scaling, std::int64_t keys,
                                            std::int64_t first) {
  for (std::int64_t key = 0; key < keys; ++key) {
    float *row = scores + key * kQueryBlock, *drow = dscores + key * kQueryBlock;
    const auto hidden = static_cast<int>(key - first);
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) {
      const float probability = exp_f32(row[r] - log_sum_exp[r]);
      const float dscore = probability * (drow[r] - delta[r]) * scaling;
      row[r] = r < hidden ? 0.0f : probability;
      drow[r] = r < hidden ? 0.0f : dscore;
    }
  }
}

}  // namespace

void attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                       float* log_sum_exp, AttentionShape s) {
  check("attention_forward", s);
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  state.reserve_per_thread(kQueryBlock * (s.seq + 2));
  const std::int64_t group = s.heads / s.kv_heads, q_stride = s.heads * s.head_dim,
                     k_stride = s.kv_heads * s.head_dim;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  parallel_for(state, s.batch * s.kv_heads, [&](std::int64_t task, int thread) {
    const std::int64_t b = task / s.kv_heads, kv_head = task % s.kv_heads;
    const float* keys = k + b * s.seq * k_stride + kv_head * s.head_dim;
    const float* values = v + b * s.seq * k_stride + kv_head * s.head_dim;
    float* largest = state.thread_scratch(thread);
    float* sum = largest + kQueryBlock;
    float* scores = sum + kQueryBlock;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::int64_t first = 0; first < s.seq; first += kQueryBlock) {
        const std::int64_t seen = std::min(s.seq, first + kQueryBlock), rows = seen - first;
        const std::int64_t at = (b * s.seq + first) * q_stride + head * s.head_dim;
        strided_matmul(Stored::plain, Stored::transposed, seen, rows, s.head_dim, scaling, keys, k_stride,
                       q + at, q_stride, 0.0f, scores, kQueryBlock);
        softmax_columns(scores, largest, sum, seen, first);
        strided_matmul(Stored::transposed, Stored::plain, rows, s.head_dim, seen, 1.0f, scores, kQueryBlock,
                       values, k_stride, 0.0f, out + at, q_stride);
        float* log_sum = log_sum_exp + (b * s.heads + head) * s.seq + first;
        for (std::int64_t r = 0; r < rows; ++r) log_sum[r] = largest[r] + std::log(sum[r]);
        for (std::int64_t r = 0; r < rows; ++r) sum[r] = 1.0f / sum[r];
        scale_rows(out + at, sum, rows, s.head_dim, q_stride);
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
  state.reserve_per_thread(kQueryBlock * (2 * s.seq + 2));
  const std::int64_t group = s.heads / s.kv_heads, q_stride = s.heads * s.head_dim,
                     k_stride = s.kv_heads * s.head_dim;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  parallel_for(state, s.batch * s.kv_heads, [&](std::int64_t task, int thread) {
    const std::int64_t b = task / s.kv_heads, kv_head = task % s.kv_heads;
    const std::int64_t kv_at = b * s.seq * k_stride + kv_head * s.head_dim;
    float* delta = state.thread_scratch(thread);
    float* log_sum = delta + kQueryBlock;
    float* scores = log_sum + kQueryBlock;
    float* dscores = scores + kQueryBlock * s.seq;
    float accumulate = 0.0f;
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (std::int64_t block = blocks_of(s.seq, kQueryBlock) - 1; block >= 0; --block) {
        const std::int64_t first = block * kQueryBlock;
        const std::int64_t seen = std::min(s.seq, first + kQueryBlock), rows = seen - first;
        const std::int64_t at = (b * s.seq + first) * q_stride + head * s.head_dim;
        strided_matmul(Stored::plain, Stored::transposed, seen, rows, s.head_dim, scaling, k + kv_at,
                       k_stride, q + at, q_stride, 0.0f, scores, kQueryBlock);
        strided_matmul(Stored::plain, Stored::transposed, seen, rows, s.head_dim, 1.0f, v + kv_at, k_stride,
                       dout + at, q_stride, 0.0f, dscores, kQueryBlock);
        row_dots(dout + at, out + at, delta, rows, s.head_dim, q_stride);
        std::copy_n(log_sum_exp + (b * s.heads + head) * s.seq + first, rows, log_sum);
        score_gradient_columns(scores, dscores, log_sum, delta, scaling, seen, first);
        strided_matmul(Stored::plain, Stored::plain, seen, s.head_dim, rows, 1.0f, scores, kQueryBlock,
                       dout + at, q_stride, accumulate, dv + kv_at, k_stride);
        strided_matmul(Stored::transposed, Stored::plain, rows, s.head_dim, seen, 1.0f, dscores, kQueryBlock,
                       k + kv_at, k_stride, 0.0f, dq + at, q_stride);
        strided_matmul(Stored::plain, Stored::plain, seen, s.head_dim, rows, 1.0f, dscores, kQueryBlock,
                       q + at, q_stride, accumulate, dk + kv_at, k_stride);
        accumulate = 1.0f;
      }
    }
  });
}

}  // namespace weft::kernels::cpu
