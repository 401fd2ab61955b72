// Grouped-query attention, causal or full, forward, as matrix products over blocks of 64 queries and 256 keys. A task is one block
// of queries of one head. It goes over the keys that the block sees, in order, so that about half of the scores of causal attention are never computed. Of
// the keys so far each query keeps the largest score m, the sum of e^(score - m), and the sum of e^(score - m) v, which is in out. A larger score multiplies both by
// e^(m - the new m) (M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; T. Dao et al., "FlashAttention", 2022). At
// the end out is divided by the sum, and only the log of each query's sum is kept.
//
// Memory is 64 x 256 scores for each thread, which stay in its caches. A query's bits depend on its own keys alone, not on which
// queries are in its block: keys that it does not see are zeros at the end of its sums.
#include "nn/kernels/attention/sizes.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kKeyBlock = kAttentionKeys;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Query r of the block sees key `first` + r and those before it; the entries of others become 0.
// scores: (keys, 64 queries), become e^(score - largest); largest, sum: (64 queries), of the keys before, and then of these, too; factor: (64
// queries), what the sums over the keys before are multiplied by. Returns whether all factors are 1.
WEFT_CPU_CLONES bool softmax_columns(float* scores, float* largest, float* sum, float* factor,
                                     std::int64_t keys, std::int64_t first) {
  constexpr std::int64_t kPartialSum =
      32;  // keys added up before they join the sum, so that long sums stay accurate
  float base[kQueryBlock];
  std::copy_n(largest, kQueryBlock, factor);
  for (std::int64_t key = 0; key < keys; ++key) {
    float* row = scores + key * kQueryBlock;
    const auto hidden = static_cast<int>(key - first);  // queries 0 .. hidden - 1 do not see this key
    if (hidden > 0) {
      for (int r = 0; r < kQueryBlock; ++r) row[r] = r < hidden ? kMinusInfinity : row[r];
    }
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) largest[r] = row[r] > largest[r] ? row[r] : largest[r];
  }
  int others = 0;
  for (int r = 0; r < kQueryBlock; ++r) {
    base[r] = largest[r] == kMinusInfinity ? 0.0f : largest[r];  // of a query that has seen nothing yet
    factor[r] = exp_f32(factor[r] - base[r]);
    sum[r] *= factor[r];
    others += factor[r] == 1.0f ? 0 : 1;
  }
  for (std::int64_t begin = 0; begin < keys; begin += kPartialSum) {
    float partial[kQueryBlock] = {};
    for (std::int64_t key = begin; key < std::min(keys, begin + kPartialSum); ++key) {
      float* row = scores + key * kQueryBlock;
#pragma GCC ivdep
      for (int r = 0; r < kQueryBlock; ++r) {
        row[r] = exp_f32(row[r] - base[r]);
        partial[r] += row[r];
      }
    }
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) sum[r] += partial[r];
  }
  return others == 0;
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

// largest, sum: (batch, heads, queries), of the keys of the pieces before, and then of these, too; at the end
// sum becomes its log. A whole, which begins and ends, needs no `largest`.
void forward(KernelContext::State& state, const float* q, const float* k, const float* v, const KeyBias& bias,
             float* out, float* largest_of, float* sum_of, const Sizes& s) {
  const ThreadCountGuard one_thread_per_product(1);
  const std::int64_t most_keys = std::min(kKeyBlock, s.keys);
  state.reserve_per_thread(kQueryBlock * (most_keys + 3));
  state.reserve_products(std::max(kQueryBlock, s.head_dim), std::max(s.head_dim, most_keys));
  const std::int64_t q_stride = s.q_stride(), k_stride = s.k_stride();
  const std::int64_t blocks = blocks_of(s.queries, kQueryBlock);
  const auto one_block = [&](std::int64_t task, int thread) {
    const std::int64_t b = task / (s.heads * blocks), head = task / blocks % s.heads;
    const std::int64_t first = (blocks - 1 - task % blocks) * kQueryBlock;  // those that see the most begin
    const std::int64_t kv_at = b * s.keys * k_stride + head / s.group() * s.head_dim;
    float* const largest = state.thread_scratch(thread);
    float* const sum = largest + kQueryBlock;
    float* const factor = sum + kQueryBlock;
    float* const scores = factor + kQueryBlock;
    const std::int64_t rows = std::min(kQueryBlock, s.queries - first), seen = s.seen(first, rows);
    const std::int64_t at = (b * s.queries + first) * q_stride + head * s.head_dim,
                       sums_at = (b * s.heads + head) * s.queries + first;
    std::fill_n(largest, kQueryBlock, kMinusInfinity);
    std::fill_n(sum, kQueryBlock, 0.0f);
    if (!s.begins) {
      std::copy_n(largest_of + sums_at, rows, largest);
      std::copy_n(sum_of + sums_at, rows, sum);
    }
    bool overwrite = s.begins;
    for (std::int64_t key = 0; key < seen; key += kKeyBlock) {
      const std::int64_t keys = std::min(kKeyBlock, seen - key), keys_at = kv_at + key * k_stride;
      strided_matmul(state, thread, Stored::plain, Stored::transposed, keys, rows, s.head_dim, s.scaling(),
                     k + keys_at, k_stride, q + at, q_stride, false, scores, kQueryBlock);
      bias.add(scores, s, b, key, keys, first, rows);
      const bool as_before = softmax_columns(scores, largest, sum, factor, keys, s.hidden_from(first) - key);
      if (!overwrite && !as_before) scale_rows(out + at, factor, rows, s.head_dim, q_stride);
      strided_matmul(state, thread, Stored::transposed, Stored::plain, rows, s.head_dim, keys, 1.0f, scores,
                     kQueryBlock, v + keys_at, k_stride, !overwrite, out + at, q_stride);
      overwrite = false;
    }
    if (overwrite)  // nothing is seen: an empty sum
      for (std::int64_t r = 0; r < rows; ++r) std::fill_n(out + at + r * q_stride, s.head_dim, 0.0f);
    if (!s.ends) {
      std::copy_n(largest, rows, largest_of + sums_at);
      std::copy_n(sum, rows, sum_of + sums_at);
      return;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      sum_of[sums_at + r] = largest[r] + std::log(sum[r]);
      factor[r] = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
    }
    scale_rows(out + at, factor, rows, s.head_dim, q_stride);
  };
  parallel_for(state, s.batch * s.heads * blocks, one_block, Tasks::unequal);
}

}  // namespace

void attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                       float* log_sum_exp, AttentionShape s) {
  check_heads("attention_forward", s);
  forward(ctx.state(), q, k, v, {}, out, nullptr, log_sum_exp, sizes(s));
}

void full_attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v,
                            ScoreBias bias, float* out, float* log_sum_exp, FullAttentionShape s) {
  check_heads("full_attention_forward", s);
  float* const scratch = ctx.state().scratch(KeyBias::floats(bias, sizes(s)));
  forward(ctx.state(), q, k, v, KeyBias::of(bias, sizes(s), scratch), out, nullptr, log_sum_exp, sizes(s));
}

void attention_piece_forward(KernelContext& ctx, const float* q, const float* k, const float* v,
                             ScoreBias bias, float* out, float* largest, float* sum, AttentionPiece s) {
  const Sizes of = sizes("attention_piece_forward", s, "key", s.first_key, kAttentionKeys);
  float* const scratch = ctx.state().scratch(KeyBias::floats(bias, of));
  forward(ctx.state(), q, k, v, KeyBias::of(bias, of, scratch), out, largest, sum, of);
}

}  // namespace weft::kernels::cpu
