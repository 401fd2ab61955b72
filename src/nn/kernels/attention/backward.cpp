// Grouped-query attention, causal or full, backward, as matrix products over blocks of 64 queries and 256
// keys.
//
// The scores are computed again, then the probabilities from the scores and the sums that forward kept. Then,
// per block, with delta = sum of dout * out per query (Dao 2022): dprobabilities = dout v^T, dscores =
// probabilities * (dprobabilities - delta), dv += probabilities^T dout, dq += dscores k, dk += dscores^T q.
// An element of dq is summed over keys in order. An element of dk or dv is summed over blocks of queries from
// the last to the first, because the last block sees all keys and can overwrite them; and within each block
// over the query heads that use the key/value head. A task is one (batch, key/value head) with all its query
// heads. It processes 256 keys, which are laid out once (products.hpp), and all queries that see them, then
// the next 256 keys. If there are more threads than tasks, and for attention in pieces, dq is computed with
// one task for some blocks of queries, and dk and dv with one task for 128 or 256 keys. This computes the
// scores twice (7 products instead of 5). This is done only with our own products, because their bits do not
// depend on how matrices are divided. A thread's memory is two times 64 x 256 scores and the laid-out form of
// 256 keys and 64 queries, in f32 and in bf16.
//
// A bias is added to the scores from a transposed copy, one for all tasks or one for each sample. A bias that
// is equal for all queries needs no copy. The gradient of a bias that all tasks share is the sum of all
// tasks' dscores. Tasks are divided into at most 64 groups, each of which adds up its own dscores in order.
// Then the groups' sums are added in order. So the number of threads changes no bit.
#include "nn/kernels/attention/sizes.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kKeyBlock = kAttentionKeys;

// delta[r] = sum of dout * out over the row. dout, out: (rows, width) with rows `stride` apart
WEFT_CPU_CLONES(void, row_dots,
                (const float* dout, const float* out, float* delta, std::int64_t rows, std::int64_t width,
                 std::int64_t stride),
                (dout, out, delta, rows, width, stride)) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float *a = dout + r * stride, *b = out + r * stride;
    delta[r] = lane_sum<float>(width, [&](std::int64_t i) WEFT_INLINE { return a[i] * b[i]; });
  }
}

// scores: (keys, 64 queries), become probabilities; dscores: (keys, 64 queries), contain dprobabilities and
// become the gradient of the scores before scaling; largest, inverse_sum (of e^(score - largest)), delta: (64
// queries)
WEFT_CPU_CLONES(void, score_gradient_columns,
                (float* scores, float* dscores, const float* largest, const float* inverse_sum,
                 const float* delta, float scaling, std::int64_t keys, std::int64_t first),
                (scores, dscores, largest, inverse_sum, delta, scaling, keys, first)) {
  for (std::int64_t key = 0; key < keys; ++key) {
    float *row = scores + key * kQueryBlock, *drow = dscores + key * kQueryBlock;
    const auto hidden = static_cast<int>(key - first);
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) {
      const float probability = exp_f32(row[r] - largest[r]) * inverse_sum[r];
      const float dscore = probability * (drow[r] - delta[r]) * scaling;
      row[r] = r < hidden ? 0.0f : probability;
      drow[r] = r < hidden ? 0.0f : dscore;
    }
  }
}

// dbias: (keys, rows) with rows `stride` apart, += dscores: (keys, 64 queries)
WEFT_CPU_CLONES(void, add_to_bias,
                (const float* dscores, float* dbias, std::int64_t keys, std::int64_t rows,
                 std::int64_t stride),
                (dscores, dbias, keys, rows, stride)) {
  for (std::int64_t key = 0; key < keys; ++key) {
    const float* from = dscores + key * kQueryBlock;
    float* to = dbias + key * stride;
#pragma GCC ivdep
    for (std::int64_t r = 0; r < rows; ++r) to[r] += from[r];
  }
}

// The working set of a thread: a block of keys and a block of queries. Matrices of units have the form of
// products.hpp. Names say what a row contains.
struct BackwardMemory {
  float *largest, *inverse_sum, *delta;  // (64)
  float *keys, *values;                  // (keys, units of head_dim)
  float* key_pairs;                      // (units of keys, head_dim); `keys` itself if units are floats
  float *queries, *douts;                // (units of head_dim, 64)
  float *query_rows, *dout_rows;         // (units of 64, head_dim)
  float *scores, *dscores;               // (keys, 64 queries)
  float *weights,
      *dweights;  // (keys, units of 64), for dv and dk; scores and dscores themselves if units are floats
  float* dweight_pairs;  // (units of keys, 64), for dq; likewise
};

struct Backward {
  const float *dout, *q, *k, *v;
  KeyBias bias;
  const float* delta;    // (batch, heads, queries)
  const float* softmax;  // (batch, heads, queries, kSoftmaxTerms)
  float *dq, *dk, *dv;
  Sizes s;
  const BlockProducts& products;

  // A block of queries of one head, with its places in q, dout and out, and in delta.
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
  std::int64_t key_at(std::int64_t b, std::int64_t kv_head, std::int64_t key) const {  // in k and v
    return (b * s.keys + key) * s.k_stride() + kv_head * s.head_dim;
  }

  std::int64_t head_line() const { return blocks::padded(s.head_dim); }
  std::int64_t head_units() const { return products.units(s.head_dim); }
  std::int64_t query_units() const { return blocks::padded(products.units(kQueryBlock)); }

  BackwardMemory memory(Parts& parts) const {
    const std::int64_t keys = std::min(kKeyBlock, s.keys), of_head = blocks::padded(head_units());
    const bool plain = products.plain();
    BackwardMemory m{};
    m.largest = parts.next(kQueryBlock);
    m.inverse_sum = parts.next(kQueryBlock);
    m.delta = parts.next(kQueryBlock);
    m.keys = parts.next(keys * of_head);
    m.values = parts.next(keys * of_head);
    m.key_pairs = plain ? m.keys : parts.next(products.units(keys) * head_line());
    m.queries = parts.next(head_units() * kQueryBlock);
    m.douts = parts.next(head_units() * kQueryBlock);
    m.query_rows = parts.next(products.units(kQueryBlock) * head_line());
    m.dout_rows = parts.next(products.units(kQueryBlock) * head_line());
    m.scores = parts.next(keys * kQueryBlock);
    m.dscores = parts.next(keys * kQueryBlock);
    m.weights = plain ? m.scores : parts.next(keys * query_units());
    m.dweights = plain ? m.dscores : parts.next(keys * query_units());
    m.dweight_pairs = plain ? m.dscores : parts.next(products.units(keys) * kQueryBlock);
    return m;
  }
  BackwardMemory memory_of(const KernelContext::State& state, int thread) const {
    Parts parts(state.per_thread[static_cast<std::size_t>(thread)].floats());
    return memory(parts);
  }
  void reserve(KernelContext::State& state) const {
    Parts count;
    memory(count);
    state.reserve_per_thread(count.size());
  }

  // The outputs of a pass for a block: dq, or dk and dv, or both.
  struct Wanted {
    bool queries, keys;
  };

  void lay_out_keys(const BackwardMemory& m, std::int64_t at, std::int64_t keys, Wanted wanted) const {
    const std::int64_t line = blocks::padded(head_units());
    products.along_rows(k + at, s.k_stride(), keys, s.head_dim, m.keys, line);
    products.along_rows(v + at, s.k_stride(), keys, s.head_dim, m.values, line);
    if (wanted.queries && !products.plain())
      products.down_columns(k + at, s.k_stride(), keys, s.head_dim, m.key_pairs, head_line());
  }
  void lay_out_queries(const BackwardMemory& m, const Block& x, Wanted wanted) const {
    const std::int64_t stride = s.q_stride();
    products.transposed(q + x.at, stride, x.rows, s.head_dim, m.queries, kQueryBlock);
    products.transposed(dout + x.at, stride, x.rows, s.head_dim, m.douts, kQueryBlock);
    std::copy_n(delta + x.sums_at, x.rows, m.delta);
    for (std::int64_t r = 0; r < x.rows; ++r) {  // of a query that sees no key all probabilities are 0
      const float largest = softmax[(x.sums_at + r) * kSoftmaxTerms],
                  sum = softmax[(x.sums_at + r) * kSoftmaxTerms + 1];
      m.largest[r] = sum == 0.0f ? 0.0f : largest;
      m.inverse_sum[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
    if (!wanted.keys) return;
    products.down_columns(q + x.at, stride, x.rows, s.head_dim, m.query_rows, head_line());
    products.down_columns(dout + x.at, stride, x.rows, s.head_dim, m.dout_rows, head_line());
  }

  // Computes probabilities and the scores' gradients for a block and for `count` keys from `begin` on, which
  // the block sees. All operands are laid out.
  void score_gradients(int thread, const BackwardMemory& m, const Block& x, std::int64_t begin,
                       std::int64_t count, Wanted wanted) const {
    const std::int64_t line = blocks::padded(head_units());
    products.multiply(thread, {m.keys, line, 1, m.queries, kQueryBlock, m.scores, kQueryBlock, count, x.rows,
                               head_units(), s.scaling()});
    bias.add(m.scores, s, x.b, begin, count, x.first, x.rows);
    products.multiply(thread, {m.values, line, 1, m.douts, kQueryBlock, m.dscores, kQueryBlock, count, x.rows,
                               head_units()});
    score_gradient_columns(m.scores, m.dscores, m.largest, m.inverse_sum, m.delta, s.scaling(), count,
                           s.hidden_from(x.first) - begin);
    if (products.plain()) return;
    if (wanted.keys) {
      products.along_rows(m.scores, kQueryBlock, count, x.rows, m.weights, query_units());
      products.along_rows(m.dscores, kQueryBlock, count, x.rows, m.dweights, query_units());
    }
    if (wanted.queries)
      products.down_columns(m.dscores, kQueryBlock, count, x.rows, m.dweight_pairs, kQueryBlock);
  }

  void queries_gradient(int thread, const BackwardMemory& m, const Block& x, std::int64_t count,
                        bool accumulate) const {
    products.multiply(thread, {m.dweight_pairs, 1, kQueryBlock, m.key_pairs, head_line(), dq + x.at,
                               s.q_stride(), x.rows, s.head_dim, products.units(count), 1.0f, accumulate});
  }
  void no_queries_gradient(const Block& x) const {
    for (std::int64_t r = 0; r < x.rows; ++r) std::fill_n(dq + x.at + r * s.q_stride(), s.head_dim, 0.0f);
  }
  void keys_gradients(int thread, const BackwardMemory& m, const Block& x, std::int64_t at,
                      std::int64_t count, bool accumulate) const {
    const std::int64_t line = products.plain() ? kQueryBlock : query_units(), k_stride = s.k_stride(),
                       units = products.units(x.rows);
    products.multiply(thread, {m.weights, line, 1, m.dout_rows, head_line(), dv + at, k_stride, count,
                               s.head_dim, units, 1.0f, accumulate});
    products.multiply(thread, {m.dweights, line, 1, m.query_rows, head_line(), dk + at, k_stride, count,
                               s.head_dim, units, 1.0f, accumulate});
  }

  // Processes keys [begin, begin + most) of a (batch, key/value head) and all queries that see them, from the
  // last block to the first. dbias: (keys, queries), to which their dscores are added, not yet divided by the
  // scaling; or null.
  void run_block(KernelContext::State& state, int thread, std::int64_t b, std::int64_t kv_head,
                 std::int64_t begin, std::int64_t most, float* dbias, Wanted wanted) const {
    const BackwardMemory m = memory_of(state, thread);
    const std::int64_t at = key_at(b, kv_head, begin);
    lay_out_keys(m, at, std::min(most, s.keys - begin), wanted);
    bool accumulate = !s.begins;
    for (std::int64_t index = blocks_of(s.queries, kQueryBlock) - 1; index >= 0; --index) {
      const std::int64_t first = index * kQueryBlock,
                         seen = s.seen(first, std::min(kQueryBlock, s.queries - first)),
                         count = std::min({most, s.keys - begin, seen - begin});
      if (count <= 0) break;  // nor do the blocks before it see these keys
      for (std::int64_t head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
        const Block x = block(b, head, index);
        lay_out_queries(m, x, wanted);
        score_gradients(thread, m, x, begin, count, wanted);
        if (dbias != nullptr)
          add_to_bias(m.dscores, dbias + begin * s.queries + x.first, count, x.rows, s.queries);
        keys_gradients(thread, m, x, at, count, accumulate);
        if (wanted.queries) queries_gradient(thread, m, x, count, begin > 0);
        accumulate = true;
      }
    }
  }

  // A (batch, key/value head).
  void run(KernelContext::State& state, int thread, std::int64_t task, float* dbias) const {
    const std::int64_t b = task / s.kv_heads, kv_head = task % s.kv_heads;
    for (std::int64_t head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head)
      for (std::int64_t index = 0; index < blocks_of(s.queries, kQueryBlock); ++index) {
        const Block x = block(b, head, index);
        if (s.seen(x.first, x.rows) == 0) no_queries_gradient(x);
      }
    for (std::int64_t key = 0; key < s.keys; key += kKeyBlock)
      run_block(state, thread, b, kv_head, key, kKeyBlock, dbias, {true, true});
  }

  // Computes dq, without a bias's gradient, with one task for some blocks of queries. The sums and their
  // order are those of run_block().
  void run_queries(KernelContext::State& state) const {
    constexpr std::int64_t kGroup = 4;
    constexpr Wanted kWanted{true, false};
    const std::int64_t all = blocks_of(s.queries, kQueryBlock), size = group_size(state, s, kGroup),
                       groups = blocks_of(all, size);
    const auto of_queries = [&](std::int64_t task, int thread) {
      const BackwardMemory m = memory_of(state, thread);
      const std::int64_t b = task / (s.heads * groups), head = task / groups % s.heads,
                         begin = (groups - 1 - task % groups) * size, end = std::min(all, begin + size);
      const auto seen_by = [&](const Block& x) { return s.seen(x.first, x.rows); };
      for (std::int64_t index = begin; index < end && s.begins; ++index) {
        const Block x = block(b, head, index);
        if (seen_by(x) == 0) no_queries_gradient(x);
      }
      const std::int64_t seen = seen_by(block(b, head, end - 1));
      for (std::int64_t key = 0; key < seen; key += kKeyBlock) {
        lay_out_keys(m, key_at(b, head / s.group(), key), std::min(kKeyBlock, seen - key), kWanted);
        for (std::int64_t index = begin; index < end; ++index) {
          const Block x = block(b, head, index);
          const std::int64_t count = std::min(kKeyBlock, seen_by(x) - key);
          if (count <= 0) continue;
          lay_out_queries(m, x, kWanted);
          score_gradients(thread, m, x, key, count, kWanted);
          queries_gradient(thread, m, x, count, key > 0 || !s.begins);
        }
      }
    };
    parallel_for(state, s.batch * s.heads * groups, of_queries, Tasks::unequal);
  }

  // dk and dv, likewise, with a task for some keys of a (batch, key/value head).
  void run_keys(KernelContext::State& state) const {
    const bool few = s.batch * s.kv_heads * blocks_of(s.keys, kKeyBlock) < 4 * state.threads;
    const std::int64_t size = few ? kKeyBlock / 2 : kKeyBlock, chunks = blocks_of(s.keys, size);
    const auto of_keys = [&](std::int64_t task, int thread) {
      run_block(state, thread, task / (s.kv_heads * chunks), task / chunks % s.kv_heads, task % chunks * size,
                size, nullptr, {false, true});
    };
    parallel_for(state, s.batch * s.kv_heads * chunks, of_keys, Tasks::unequal);
  }

  void run_by_blocks(KernelContext::State& state) const {
    run_queries(state);
    run_keys(state);
  }
};

BlockProducts products_of(KernelContext::State& state, const Sizes& s) {
  return {state, s.bf16, std::max(kQueryBlock, s.head_dim), std::max(s.head_dim, kKeyBlock)};
}

// (batch, heads, queries)
std::int64_t delta_size(const Sizes& s) { return s.batch * s.heads * s.queries; }

// There are fewer tasks than threads: this compares the time of 5 products of one task with the time of 7
// products of all tasks on all threads.
bool better_by_blocks(const KernelContext::State& state, const Sizes& s) {
  return 7 * s.batch * s.kv_heads < 5 * state.threads && s.queries > kQueryBlock;
}

// dbias = the sum of the groups' partial sums, transposed and divided by the scaling that they contain.
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

template <>
void attention_backward<float>(KernelContext& ctx, const float* dout, const float* q, const float* k,
                               const float* v, const float* out, const float* softmax, float* dq, float* dk,
                               float* dv, AttentionShape s) {
  check_heads("attention_backward", s);
  KernelContext::State& state = ctx.state();
  const Sizes of = sizes(s);
  float* const delta = state.scratch(delta_size(of));
  attention_delta(ctx, dout, out, delta, {s.batch, s.seq, s.seq, s.heads, s.kv_heads, s.head_dim});
  const BlockProducts products = products_of(state, of);
  const Backward backward{dout, q, k, v, {}, delta, softmax, dq, dk, dv, of, products};
  backward.reserve(state);
  if (better_by_blocks(state, of)) return backward.run_by_blocks(state);
  parallel_for(state, s.batch * s.kv_heads,
               [&](std::int64_t task, int thread) { backward.run(state, thread, task, nullptr); });
}

template <>
void full_attention_backward<float>(KernelContext& ctx, const float* dout, const float* q, const float* k,
                                    const float* v, ScoreBias bias, const float* out, const float* softmax,
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
  const Sizes of = sizes(s);
  constexpr std::int64_t kGroups = 64;
  const std::int64_t tasks = s.batch * s.kv_heads, pairs = s.keys * s.queries;
  const std::int64_t per_group = dbias == nullptr ? 1 : std::max<std::int64_t>(1, blocks_of(tasks, kGroups));
  const std::int64_t groups = blocks_of(tasks, per_group);
  const std::int64_t of_bias = KeyBias::floats(bias, of), of_delta = delta_size(of);
  float* const scratch = state.scratch(of_bias + of_delta + (dbias == nullptr ? 0 : groups * pairs));
  float *const delta = scratch + of_bias, *const partials = delta + of_delta;
  attention_delta(ctx, dout, out, delta, s);
  const BlockProducts products = products_of(state, of);
  const Backward backward{dout, q,  k,  v,       KeyBias::of(bias, of, scratch), delta, softmax, dq,
                          dk,   dv, of, products};
  backward.reserve(state);
  if (dbias == nullptr && better_by_blocks(state, of)) return backward.run_by_blocks(state);
  parallel_for(state, groups, [&](std::int64_t group, int thread) {
    float* const partial = dbias == nullptr ? nullptr : partials + group * pairs;
    if (partial != nullptr) std::fill_n(partial, pairs, 0.0f);
    for (std::int64_t task = group * per_group; task < std::min(tasks, (group + 1) * per_group); ++task)
      backward.run(state, thread, task, partial);
  });
  if (dbias != nullptr) finish_bias(state, partials, dbias, groups, of);
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
                                      const float* v, ScoreBias bias, const float* softmax,
                                      const float* delta, float* dq, AttentionPiece s) {
  const Sizes of = sizes("attention_piece_backward_queries", s, "key", s.first_key, kAttentionKeys);
  const KeyBias added = KeyBias::of(bias, of, ctx.state().scratch(KeyBias::floats(bias, of)));
  const BlockProducts products = products_of(ctx.state(), of);
  const Backward backward{dout, q, k, v, added, delta, softmax, dq, nullptr, nullptr, of, products};
  backward.reserve(ctx.state());
  backward.run_queries(ctx.state());
}

void attention_piece_backward_keys(KernelContext& ctx, const float* dout, const float* q, const float* k,
                                   const float* v, ScoreBias bias, const float* softmax, const float* delta,
                                   float* dk, float* dv, AttentionPiece s) {
  const Sizes of = sizes("attention_piece_backward_keys", s, "query", s.first_query, kAttentionQueries);
  const std::int64_t seen = s.queries == 0 ? 0 : of.seen(0, s.queries), unseen = of.keys - seen;
  for (std::int64_t b = 0; s.begins && b < s.batch; ++b)  // keys that no block of queries will write
    for (float* const gradient : {dk, dv})
      std::fill_n(gradient + (b * of.keys + seen) * of.k_stride(), unseen * of.k_stride(), 0.0f);
  const KeyBias added = KeyBias::of(bias, of, ctx.state().scratch(KeyBias::floats(bias, of)));
  const BlockProducts products = products_of(ctx.state(), of);
  const Backward backward{dout, q, k, v, added, delta, softmax, nullptr, dk, dv, of, products};
  backward.reserve(ctx.state());
  backward.run_keys(ctx.state());
}

}  // namespace weft::kernels::cpu
