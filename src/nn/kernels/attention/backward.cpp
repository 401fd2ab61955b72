// Grouped-query attention, causal or full, backward, as matrix products over blocks of 64 queries and 256 keys.
//
// The scores are made again, the probabilities from them and the sums that forward kept; then, per block, with delta = sum of dout *
// out per query (Dao 2022),
//   dprobabilities = dout v^T,  dscores = probabilities * (dprobabilities - delta),
//   dv += probabilities^T dout,  dq += dscores k,  dk += dscores^T q.
// An element of dq is summed over keys in order; one of dk or dv over blocks of queries from the last to the first, because the last one sees all keys and can overwrite
// them, and of each block over the query heads that use the key/value head. A task is one (batch, key/value head) with all its query heads. Where there are more threads than tasks, and of
// pieces, dq is made with a task for each block of queries, and dk and dv with a task for each 128 keys, which makes the scores twice (7 products instead of 5): with
// products of our own (gemm/gemm.hpp), whose bits do not depend on where matrices are cut, and no others. Memory is two times 64 x 256 scores for each thread.
//
// A bias is added to the scores from a transposed copy, one of all tasks or one of each sample; one that is the same for all queries needs no copy. The gradient of
// one of all tasks is the sum of all
// tasks' dscores: tasks are taken in at most 64 groups, each of which adds up its own in order, then the groups'
// sums are added in order, so that the number of threads changes no bit.
#include "nn/kernels/attention/sizes.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kKeyBlock = kAttentionKeys;

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

// dbias: (keys, rows) with rows `stride` apart, += dscores: (keys, 64 queries)
WEFT_CPU_CLONES void add_to_bias(const float* dscores, float* dbias, std::int64_t keys, std::int64_t rows,
                                 std::int64_t stride) {
  for (std::int64_t key = 0; key < keys; ++key) {
    const float* from = dscores + key * kQueryBlock;
    float* to = dbias + key * stride;
#pragma GCC ivdep
    for (std::int64_t r = 0; r < rows; ++r) to[r] += from[r];
  }
}

struct Backward {
  const float *dout, *q, *k, *v;
  KeyBias bias;
  const float *out,
      *delta;  // one of them: delta is made of out where there is none. delta: (batch, heads, queries)
  const float* log_sum_exp;
  float *dq, *dk, *dv;
  Sizes s;

  // A block of queries of one head, and where it lies in q, dout and out, and in log_sum_exp and delta.
  struct Block {
    std::int64_t b, head, first, rows, at, sums_at;
  };
  Block block(std::int64_t b, std::int64_t head, std::int64_t index) const {
    const std::int64_t first = index * kQueryBlock;
    return {b,
            head,
            first,
            std::min(kQueryBlock, s.queries - first),
            (b * s.queries + first) * s.q_stride() + head * s.head_dim,
            (b * s.heads + head) * s.queries + first};
  }
  std::int64_t key_at(const Block& x, std::int64_t key) const {  // in k and v
    return (x.b * s.keys + key) * s.k_stride() + x.head / s.group() * s.head_dim;
  }
  static void reserve(KernelContext::State& state, const Sizes& s) {
    state.reserve_per_thread(kQueryBlock * (2 * kKeyBlock + 2));
    state.reserve_products(std::max(kQueryBlock, s.head_dim), std::max(s.head_dim, kKeyBlock));
  }
  static float* scores(KernelContext::State& state, int thread) {
    return state.thread_scratch(thread) + 2 * kQueryBlock;
  }
  static float* dscores(KernelContext::State& state, int thread) {
    return scores(state, thread) + kQueryBlock * kKeyBlock;
  }

  // Probabilities and the scores' gradients of a block and keys [begin, end), at most kKeyBlock, which it sees.
  void score_gradients(KernelContext::State& state, int thread, const Block& x, std::int64_t begin,
                       std::int64_t end) const {
    float* of_block = state.thread_scratch(thread);
    float* log_sum = of_block + kQueryBlock;
    const std::int64_t q_stride = s.q_stride(), k_stride = s.k_stride(), count = end - begin;
    float *const to = scores(state, thread), *const dto = dscores(state, thread);
    strided_matmul(state, thread, Stored::plain, Stored::transposed, count, x.rows, s.head_dim, s.scaling(),
                   k + key_at(x, begin), k_stride, q + x.at, q_stride, false, to, kQueryBlock);
    bias.add(to, s, x.b, begin, count, x.first, x.rows);
    strided_matmul(state, thread, Stored::plain, Stored::transposed, count, x.rows, s.head_dim, 1.0f,
                   v + key_at(x, begin), k_stride, dout + x.at, q_stride, false, dto, kQueryBlock);
    if (delta != nullptr)
      std::copy_n(delta + x.sums_at, x.rows, of_block);
    else
      row_dots(dout + x.at, out + x.at, of_block, x.rows, s.head_dim, q_stride);
    for (std::int64_t r = 0; r < x.rows; ++r) {  // of a query that sees no key all probabilities are 0
      const float kept = log_sum_exp[x.sums_at + r];
      log_sum[r] = kept == -std::numeric_limits<float>::infinity() ? 0.0f : kept;
    }
    score_gradient_columns(to, dto, log_sum, of_block, s.scaling(), count, s.hidden_from(x.first) - begin);
  }

  void queries_gradient(KernelContext::State& state, int thread, const Block& x, std::int64_t begin,
                        std::int64_t end, bool accumulate) const {
    strided_matmul(state, thread, Stored::transposed, Stored::plain, x.rows, s.head_dim, end - begin, 1.0f,
                   dscores(state, thread), kQueryBlock, k + key_at(x, begin), s.k_stride(), accumulate,
                   dq + x.at, s.q_stride());
  }
  void no_queries_gradient(const Block& x) const {
    for (std::int64_t r = 0; r < x.rows; ++r) std::fill_n(dq + x.at + r * s.q_stride(), s.head_dim, 0.0f);
  }
  void keys_gradients(KernelContext::State& state, int thread, const Block& x, std::int64_t begin,
                      std::int64_t end, bool accumulate) const {
    const std::int64_t q_stride = s.q_stride(), k_stride = s.k_stride();
    strided_matmul(state, thread, Stored::plain, Stored::plain, end - begin, s.head_dim, x.rows, 1.0f,
                   scores(state, thread), kQueryBlock, dout + x.at, q_stride, accumulate,
                   dv + key_at(x, begin), k_stride);
    strided_matmul(state, thread, Stored::plain, Stored::plain, end - begin, s.head_dim, x.rows, 1.0f,
                   dscores(state, thread), kQueryBlock, q + x.at, q_stride, accumulate, dk + key_at(x, begin),
                   k_stride);
  }

  // A (batch, key/value head). dbias: (keys, queries), to which its dscores are added, not yet divided by the scaling; or null
  void run(KernelContext::State& state, int thread, std::int64_t task, float* dbias) const {
    const std::int64_t b = task / s.kv_heads, kv_head = task % s.kv_heads;
    bool accumulate = false;
    for (std::int64_t index = blocks_of(s.queries, kQueryBlock) - 1; index >= 0; --index) {
      for (std::int64_t head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
        const Block x = block(b, head, index);
        const std::int64_t seen = s.seen(x.first, x.rows);
        if (seen == 0) no_queries_gradient(x);
        for (std::int64_t key = 0; key < seen; key += kKeyBlock) {
          const std::int64_t end = std::min(seen, key + kKeyBlock);
          score_gradients(state, thread, x, key, end);
          if (dbias != nullptr)
            add_to_bias(dscores(state, thread), dbias + key * s.queries + x.first, end - key, x.rows,
                        s.queries);
          keys_gradients(state, thread, x, key, end, accumulate);
          queries_gradient(state, thread, x, key, end, key > 0);
        }
        accumulate = true;
      }
    }
  }

  // dq, without a bias's gradient, with a task for each block of queries. The same sums in the same order.
  void run_queries(KernelContext::State& state) const {
    const std::int64_t blocks = blocks_of(s.queries, kQueryBlock);
    const auto of_queries = [&](std::int64_t task, int thread) {
      const Block x = block(task / (s.heads * blocks), task / blocks % s.heads, blocks - 1 - task % blocks);
      const std::int64_t seen = s.seen(x.first, x.rows);
      if (seen == 0 && s.begins) no_queries_gradient(x);
      for (std::int64_t key = 0; key < seen; key += kKeyBlock) {
        const std::int64_t end = std::min(seen, key + kKeyBlock);
        score_gradients(state, thread, x, key, end);
        queries_gradient(state, thread, x, key, end, key > 0 || !s.begins);
      }
    };
    parallel_for(state, s.batch * s.heads * blocks, of_queries, Tasks::unequal);
  }

  // dk and dv, likewise, with a task for some keys of a (batch, key/value head).
  void run_keys(KernelContext::State& state) const {
    constexpr std::int64_t kKeys = 128;
    static_assert(kKeys <= kKeyBlock);
    const std::int64_t blocks = blocks_of(s.queries, kQueryBlock), chunks = blocks_of(s.keys, kKeys);
    const auto of_keys = [&](std::int64_t task, int thread) {
      const std::int64_t b = task / (s.kv_heads * chunks), kv_head = task / chunks % s.kv_heads,
                         begin = task % chunks * kKeys;
      bool accumulate = !s.begins;
      for (std::int64_t index = blocks - 1; index >= 0; --index) {
        const std::int64_t first = index * kQueryBlock,
                           seen = s.seen(first, std::min(kQueryBlock, s.queries - first)),
                           end = std::min({begin + kKeys, s.keys, seen});
        if (end <= begin) break;  // nor do the blocks before it see these keys
        for (std::int64_t head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
          const Block x = block(b, head, index);
          score_gradients(state, thread, x, begin, end);
          keys_gradients(state, thread, x, begin, end, accumulate);
          accumulate = true;
        }
      }
    };
    parallel_for(state, s.batch * s.kv_heads * chunks, of_keys, Tasks::unequal);
  }

  void run_by_blocks(KernelContext::State& state) const {
    run_queries(state);
    run_keys(state);
  }
};

// Fewer tasks than threads: in time, 5 products of one task against 7 of all of them on all threads.
bool better_by_blocks(const KernelContext::State& state, const Sizes& s) {
  return state.own != nullptr && 7 * s.batch * s.kv_heads < 5 * state.threads && s.queries > kQueryBlock;
}

// dbias = the sum of the groups' partial sums, transposed and divided by the scaling, which is in them.
// partials: (groups, keys, queries), dbias: (queries, keys)
void finish_bias(KernelContext::State& state, const float* partials, float* dbias, std::int64_t groups,
                 const Sizes& s) {
  const float unscaled = std::sqrt(static_cast<float>(s.head_dim));
  parallel_for(state, s.queries, [&](std::int64_t query, int) {
    for (std::int64_t key = 0; key < s.keys; ++key) {
      float sum = 0.0f;
      for (std::int64_t g = 0; g < groups; ++g) sum += partials[(g * s.keys + key) * s.queries + query];
      dbias[query * s.keys + key] = sum * unscaled;
    }
  });
}

}  // namespace

void attention_backward(KernelContext& ctx, const float* dout, const float* q, const float* k, const float* v,
                        const float* out, const float* log_sum_exp, float* dq, float* dk, float* dv,
                        AttentionShape s) {
  check_heads("attention_backward", s);
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  Backward::reserve(state, sizes(s));
  const Backward backward{dout, q, k, v, {}, out, nullptr, log_sum_exp, dq, dk, dv, sizes(s)};
  if (better_by_blocks(state, backward.s)) return backward.run_by_blocks(state);
  parallel_for(state, s.batch * s.kv_heads,
               [&](std::int64_t task, int thread) { backward.run(state, thread, task, nullptr); });
}

void full_attention_backward(KernelContext& ctx, const float* dout, const float* q, const float* k,
                             const float* v, ScoreBias bias, const float* out, const float* log_sum_exp,
                             float* dq, float* dk, float* dv, float* dbias, FullAttentionShape s) {
  check_heads("full_attention_backward", s);
  if (dbias != nullptr && (bias.of_each_sample || !bias.of_each_query))
    throw Error(ErrorCode::bad_argument,
                "full_attention_backward: dbias is not null; expected null, or a bias (queries, keys) of all "
                "samples");
  const std::int64_t kv_size = s.batch * s.keys * s.kv_heads * s.head_dim;
  if (s.queries == 0) {  // no block of queries will write them
    std::fill_n(dk, kv_size, 0.0f);
    std::fill_n(dv, kv_size, 0.0f);
  }
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  Backward::reserve(state, sizes(s));
  constexpr std::int64_t kGroups = 64;
  const std::int64_t tasks = s.batch * s.kv_heads, pairs = s.keys * s.queries;
  const std::int64_t per_group = dbias == nullptr ? 1 : std::max<std::int64_t>(1, blocks_of(tasks, kGroups));
  const std::int64_t groups = blocks_of(tasks, per_group);
  const std::int64_t of_bias = KeyBias::floats(bias, sizes(s));
  float* const scratch = state.scratch(of_bias + (dbias == nullptr ? 0 : groups * pairs));
  float* const partials = scratch + of_bias;
  const Backward backward{
      dout, q, k, v, KeyBias::of(bias, sizes(s), scratch), out, nullptr, log_sum_exp, dq, dk, dv, sizes(s)};
  if (dbias == nullptr && better_by_blocks(state, backward.s)) return backward.run_by_blocks(state);
  parallel_for(state, groups, [&](std::int64_t group, int thread) {
    float* const partial = dbias == nullptr ? nullptr : partials + group * pairs;
    if (partial != nullptr) std::fill_n(partial, pairs, 0.0f);
    for (std::int64_t task = group * per_group; task < std::min(tasks, (group + 1) * per_group); ++task)
      backward.run(state, thread, task, partial);
  });
  if (dbias != nullptr) finish_bias(state, partials, dbias, groups, sizes(s));
}

void attention_delta(KernelContext& ctx, const float* dout, const float* out, float* delta,
                     FullAttentionShape s) {
  const std::int64_t stride = s.heads * s.head_dim;
  parallel_for(ctx.state(), s.batch * s.heads, [&](std::int64_t task, int) {
    const std::int64_t at = task / s.heads * s.queries * stride + task % s.heads * s.head_dim;
    row_dots(dout + at, out + at, delta + task * s.queries, s.queries, s.head_dim, stride);
  });
}

void attention_piece_backward_queries(KernelContext& ctx, const float* dout, const float* q, const float* k,
                                      const float* v, ScoreBias bias, const float* log_sum_exp,
                                      const float* delta, float* dq, AttentionPiece s) {
  const Sizes of = sizes("attention_piece_backward_queries", s, "key", s.first_key, kAttentionKeys);
  const ThreadCountGuard one_thread_per_product(1);
  Backward::reserve(ctx.state(), of);
  const KeyBias added = KeyBias::of(bias, of, ctx.state().scratch(KeyBias::floats(bias, of)));
  Backward{dout, q, k, v, added, nullptr, delta, log_sum_exp, dq, nullptr, nullptr, of}.run_queries(
      ctx.state());
}

void attention_piece_backward_keys(KernelContext& ctx, const float* dout, const float* q, const float* k,
                                   const float* v, ScoreBias bias, const float* log_sum_exp,
                                   const float* delta, float* dk, float* dv, AttentionPiece s) {
  const Sizes of = sizes("attention_piece_backward_keys", s, "query", s.first_query, kAttentionQueries);
  if (s.begins && s.queries == 0) {  // no block of queries will write them
    std::fill_n(dk, s.batch * s.keys * of.k_stride(), 0.0f);
    std::fill_n(dv, s.batch * s.keys * of.k_stride(), 0.0f);
  }
  const ThreadCountGuard one_thread_per_product(1);
  Backward::reserve(ctx.state(), of);
  const KeyBias added = KeyBias::of(bias, of, ctx.state().scratch(KeyBias::floats(bias, of)));
  Backward{dout, q, k, v, added, nullptr, delta, log_sum_exp, nullptr, dk, dv, of}.run_keys(ctx.state());
}

}  // namespace weft::kernels::cpu
