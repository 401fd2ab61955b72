// Grouped-query attention, causal or full, forward and backward, as matrix products over blocks of
// query positions.
//
// Query positions are taken in blocks of 64; a block of causal attention sees keys 0 .. end of block, so about half
// of the scores are never computed; one of full attention sees all. The scores of a block are kept transposed, (keys, 64 queries):
// then maxima and sums over keys go down columns, 64 queries side by side in the vector registers, and no row has a rest. A block of
// fewer queries leaves columns unused, whose contents nobody reads on. Memory is 64 scores for each key and thread.
//
// Forward: a task is one block of one query head: scores, their softmax in place, out = probabilities v. Only the log of each
// query's sum is kept.
//
// Backward: the scores are made again, the probabilities from them and the kept sums; then, per block, with delta = sum of dout *
// out per query (Dao 2022),
//   dprobabilities = dout v^T,  dscores = probabilities * (dprobabilities - delta),
//   dv += probabilities^T dout,  dq = dscores k,  dk += dscores^T q.
// A task is one (batch, key/value head) with all query heads that use it. Blocks go from the last to the first there, because
// the last one sees all keys and can overwrite dk and dv. Where there are more threads than tasks, dq is made with a task for
// each block of queries, then dk and dv with a task for each 128 keys, which makes the scores twice (7 products instead of 5): with
// products of our own (gemm/gemm.hpp), whose bits do not depend on where matrices are cut, and no others.
//
// A bias, which all tasks share, is added to the scores from a transposed copy. Its gradient is the sum of all
// tasks' dscores: tasks are taken in at most 64 groups, each of which adds up its own in order, then the groups'
// sums are added in order, so that the number of threads changes no bit.
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

// Both kinds: causal attention has as many keys as queries.
struct Sizes {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;
  bool causal;

  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t q_stride() const { return heads * head_dim; }
  std::int64_t k_stride() const { return kv_heads * head_dim; }
  float scaling() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  /// How many keys the queries [first, first + rows) see, and the first of them that some do not.
  std::int64_t seen(std::int64_t first, std::int64_t rows) const { return causal ? first + rows : keys; }
  std::int64_t hidden_from(std::int64_t first) const { return causal ? first : keys; }
};

template <class Shape>
void check(const char* op, const Shape& s) {
  if (s.kv_heads < 1 || s.heads % s.kv_heads != 0) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} query heads over {} key/value heads; expected a multiple", op, s.heads,
                            s.kv_heads));
  }
}

Sizes sizes(const AttentionShape& s) {
  return {s.batch, s.seq, s.seq, s.heads, s.kv_heads, s.head_dim, true};
}
Sizes sizes(const FullAttentionShape& s) {
  return {s.batch, s.queries, s.keys, s.heads, s.kv_heads, s.head_dim, false};
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

// to: (columns, rows), from: (rows, columns)
void transpose(const float* from, float* to, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// scores: (keys, 64 queries) += bias: (keys, rows) with rows `stride` apart; or the other way round
WEFT_CPU_CLONES void add_bias_columns(float* scores, const float* bias, std::int64_t keys, std::int64_t rows,
                                      std::int64_t stride) {
  for (std::int64_t key = 0; key < keys; ++key) {
    float* to = scores + key * kQueryBlock;
    const float* from = bias + key * stride;
#pragma GCC ivdep
    for (std::int64_t r = 0; r < rows; ++r) to[r] += from[r];
  }
}

WEFT_CPU_CLONES void add_to_bias(const float* dscores, float* dbias, std::int64_t keys, std::int64_t rows,
                                 std::int64_t stride) {
  for (std::int64_t key = 0; key < keys; ++key) {
    const float* from = dscores + key * kQueryBlock;
    float* to = dbias + key * stride;
#pragma GCC ivdep
    for (std::int64_t r = 0; r < rows; ++r) to[r] += from[r];
  }
}

// bias: (keys, queries), transposed, or null
void forward(KernelContext::State& state, const float* q, const float* k, const float* v, const float* bias,
             float* out, float* log_sum_exp, const Sizes& s) {
  const ThreadCountGuard one_thread_per_product(1);
  state.reserve_per_thread(kQueryBlock * (s.keys + 2));
  state.reserve_products(std::max(kQueryBlock, s.head_dim), std::max(s.head_dim, s.keys));
  const std::int64_t q_stride = s.q_stride(), k_stride = s.k_stride();
  const std::int64_t blocks = blocks_of(s.queries, kQueryBlock);
  const auto one_block = [&](std::int64_t task, int thread) {
    const std::int64_t b = task / (s.heads * blocks), head = task / blocks % s.heads;
    const std::int64_t first = (blocks - 1 - task % blocks) * kQueryBlock;  // those that see the most begin
    const std::int64_t kv_at = b * s.keys * k_stride + head / s.group() * s.head_dim;
    float* largest = state.thread_scratch(thread);
    float* sum = largest + kQueryBlock;
    float* scores = sum + kQueryBlock;
    const std::int64_t rows = std::min(kQueryBlock, s.queries - first), seen = s.seen(first, rows);
    const std::int64_t at = (b * s.queries + first) * q_stride + head * s.head_dim;
    strided_matmul(state, thread, Stored::plain, Stored::transposed, seen, rows, s.head_dim, s.scaling(),
                   k + kv_at, k_stride, q + at, q_stride, false, scores, kQueryBlock);
    if (bias != nullptr) add_bias_columns(scores, bias + first, seen, rows, s.queries);
    softmax_columns(scores, largest, sum, seen, s.hidden_from(first));
    strided_matmul(state, thread, Stored::transposed, Stored::plain, rows, s.head_dim, seen, 1.0f, scores,
                   kQueryBlock, v + kv_at, k_stride, false, out + at, q_stride);
    float* log_sum = log_sum_exp + (b * s.heads + head) * s.queries + first;
    for (std::int64_t r = 0; r < rows; ++r) log_sum[r] = largest[r] + std::log(sum[r]);
    for (std::int64_t r = 0; r < rows; ++r) sum[r] = 1.0f / sum[r];
    scale_rows(out + at, sum, rows, s.head_dim, q_stride);
  };
  parallel_for(state, s.batch * s.heads * blocks, one_block, Tasks::unequal);
}

struct Backward {
  const float *dout, *q, *k, *v, *bias, *out, *log_sum_exp;
  float *dq, *dk, *dv;
  Sizes s;

  // A block of queries of one head, and where it lies in q, dout and out.
  struct Block {
    std::int64_t b, head, first, rows, at;
  };
  Block block(std::int64_t b, std::int64_t head, std::int64_t index) const {
    const std::int64_t first = index * kQueryBlock;
    return {b, head, first, std::min(kQueryBlock, s.queries - first),
            (b * s.queries + first) * s.q_stride() + head * s.head_dim};
  }
  std::int64_t key_at(const Block& x, std::int64_t key) const {  // in k and v
    return (x.b * s.keys + key) * s.k_stride() + x.head / s.group() * s.head_dim;
  }
  static float* scores(KernelContext::State& state, int thread) {
    return state.thread_scratch(thread) + 2 * kQueryBlock;
  }
  float* dscores(KernelContext::State& state, int thread) const {
    return scores(state, thread) + kQueryBlock * s.keys;
  }

  // Probabilities and the scores' gradients of a block and keys [begin, end), which it sees.
  void score_gradients(KernelContext::State& state, int thread, const Block& x, std::int64_t begin,
                       std::int64_t end) const {
    float* delta = state.thread_scratch(thread);
    float* log_sum = delta + kQueryBlock;
    const std::int64_t q_stride = s.q_stride(), k_stride = s.k_stride(), count = end - begin;
    float *const to = scores(state, thread), *const dto = dscores(state, thread);
    strided_matmul(state, thread, Stored::plain, Stored::transposed, count, x.rows, s.head_dim, s.scaling(),
                   k + key_at(x, begin), k_stride, q + x.at, q_stride, false, to, kQueryBlock);
    if (bias != nullptr) add_bias_columns(to, bias + begin * s.queries + x.first, count, x.rows, s.queries);
    strided_matmul(state, thread, Stored::plain, Stored::transposed, count, x.rows, s.head_dim, 1.0f,
                   v + key_at(x, begin), k_stride, dout + x.at, q_stride, false, dto, kQueryBlock);
    row_dots(dout + x.at, out + x.at, delta, x.rows, s.head_dim, q_stride);
    std::copy_n(log_sum_exp + (x.b * s.heads + x.head) * s.queries + x.first, x.rows, log_sum);
    score_gradient_columns(to, dto, log_sum, delta, s.scaling(), count, s.hidden_from(x.first) - begin);
  }

  void queries_gradient(KernelContext::State& state, int thread, const Block& x) const {
    strided_matmul(state, thread, Stored::transposed, Stored::plain, x.rows, s.head_dim,
                   s.seen(x.first, x.rows), 1.0f, dscores(state, thread), kQueryBlock, k + key_at(x, 0),
                   s.k_stride(), false, dq + x.at, s.q_stride());
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
    for (std::int64_t head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
      for (std::int64_t index = blocks_of(s.queries, kQueryBlock) - 1; index >= 0; --index) {
        const Block x = block(b, head, index);
        const std::int64_t seen = s.seen(x.first, x.rows);
        score_gradients(state, thread, x, 0, seen);
        if (dbias != nullptr) add_to_bias(dscores(state, thread), dbias + x.first, seen, x.rows, s.queries);
        keys_gradients(state, thread, x, 0, seen, accumulate);
        queries_gradient(state, thread, x);
        accumulate = true;
      }
    }
  }

  // All of them, without a bias's gradient, in tasks of blocks of queries, then of keys. The same sums in the same order.
  void run_by_blocks(KernelContext::State& state) const {
    constexpr std::int64_t kKeys = 128;
    const std::int64_t blocks = blocks_of(s.queries, kQueryBlock), chunks = blocks_of(s.keys, kKeys);
    const auto of_queries = [&](std::int64_t task, int thread) {
      const Block x = block(task / (s.heads * blocks), task / blocks % s.heads, blocks - 1 - task % blocks);
      score_gradients(state, thread, x, 0, s.seen(x.first, x.rows));
      queries_gradient(state, thread, x);
    };
    parallel_for(state, s.batch * s.heads * blocks, of_queries, Tasks::unequal);
    const auto of_keys = [&](std::int64_t task, int thread) {
      const std::int64_t b = task / (s.kv_heads * chunks), kv_head = task / chunks % s.kv_heads,
                         begin = task % chunks * kKeys;
      bool accumulate = false;
      for (std::int64_t head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
        for (std::int64_t index = blocks - 1; index >= 0; --index) {
          const Block x = block(b, head, index);
          const std::int64_t end = std::min({begin + kKeys, s.keys, s.seen(x.first, x.rows)});
          if (end <= begin) break;  // nor do the blocks before it see these keys
          score_gradients(state, thread, x, begin, end);
          keys_gradients(state, thread, x, begin, end, accumulate);
          accumulate = true;
        }
      }
    };
    parallel_for(state, s.batch * s.kv_heads * chunks, of_keys, Tasks::unequal);
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

void attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                       float* log_sum_exp, AttentionShape s) {
  check("attention_forward", s);
  forward(ctx.state(), q, k, v, nullptr, out, log_sum_exp, sizes(s));
}

void attention_backward(KernelContext& ctx, const float* dout, const float* q, const float* k, const float* v,
                        const float* out, const float* log_sum_exp, float* dq, float* dk, float* dv,
                        AttentionShape s) {
  check("attention_backward", s);
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  state.reserve_per_thread(kQueryBlock * (2 * s.seq + 2));
  state.reserve_products(std::max(kQueryBlock, s.head_dim), std::max({kQueryBlock, s.head_dim, s.seq}));
  const Backward backward{dout, q, k, v, nullptr, out, log_sum_exp, dq, dk, dv, sizes(s)};
  if (better_by_blocks(state, backward.s)) return backward.run_by_blocks(state);
  parallel_for(state, s.batch * s.kv_heads,
               [&](std::int64_t task, int thread) { backward.run(state, thread, task, nullptr); });
}

void full_attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v,
                            const float* bias, float* out, float* log_sum_exp, FullAttentionShape s) {
  check("full_attention_forward", s);
  const std::int64_t rows = s.batch * s.queries * s.heads;
  if (s.keys == 0) {  // nothing is seen: an empty sum
    std::fill_n(out, rows * s.head_dim, 0.0f);
    std::fill_n(log_sum_exp, rows, -std::numeric_limits<float>::infinity());
    return;
  }
  float* transposed = nullptr;
  if (bias != nullptr) {
    transposed = ctx.state().scratch(s.keys * s.queries);
    transpose(bias, transposed, s.queries, s.keys);
  }
  forward(ctx.state(), q, k, v, transposed, out, log_sum_exp, sizes(s));
}

void full_attention_backward(KernelContext& ctx, const float* dout, const float* q, const float* k,
                             const float* v, const float* bias, const float* out, const float* log_sum_exp,
                             float* dq, float* dk, float* dv, float* dbias, FullAttentionShape s) {
  check("full_attention_backward", s);
  const std::int64_t kv_size = s.batch * s.keys * s.kv_heads * s.head_dim;
  if (s.queries == 0) {  // no block of queries will write them
    std::fill_n(dk, kv_size, 0.0f);
    std::fill_n(dv, kv_size, 0.0f);
  }
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard one_thread_per_product(1);
  state.reserve_per_thread(kQueryBlock * (2 * s.keys + 2));
  state.reserve_products(std::max(kQueryBlock, s.head_dim), std::max({kQueryBlock, s.head_dim, s.keys}));
  constexpr std::int64_t kGroups = 64;
  const std::int64_t tasks = s.batch * s.kv_heads, pairs = s.keys * s.queries;
  const std::int64_t per_group = dbias == nullptr ? 1 : std::max<std::int64_t>(1, blocks_of(tasks, kGroups));
  const std::int64_t groups = blocks_of(tasks, per_group);
  float* const transposed =
      state.scratch((bias == nullptr ? 0 : pairs) + (dbias == nullptr ? 0 : groups * pairs));
  float* const partials = transposed + (bias == nullptr ? 0 : pairs);
  if (bias != nullptr) transpose(bias, transposed, s.queries, s.keys);
  const Backward backward{dout, q,  k,  v,       bias == nullptr ? nullptr : transposed, out, log_sum_exp,
                          dq,   dk, dv, sizes(s)};
  if (dbias == nullptr && better_by_blocks(state, backward.s)) return backward.run_by_blocks(state);
  parallel_for(state, groups, [&](std::int64_t group, int thread) {
    float* const partial = dbias == nullptr ? nullptr : partials + group * pairs;
    if (partial != nullptr) std::fill_n(partial, pairs, 0.0f);
    for (std::int64_t task = group * per_group; task < std::min(tasks, (group + 1) * per_group); ++task)
      backward.run(state, thread, task, partial);
  });
  if (dbias != nullptr) finish_bias(state, partials, dbias, groups, sizes(s));
}

}  // namespace weft::kernels::cpu
