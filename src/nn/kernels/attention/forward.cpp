// Grouped-query attention, causal or full, forward, as matrix products over blocks of 64 queries and 256
// keys. A task is up to four blocks of queries of one head. The task processes the keys that these queries
// see, in order. The keys are laid out once for all of the blocks (products.hpp), so that about half of the
// scores of causal attention are never computed. For the keys so far, each query keeps the largest score m,
// the sum of e^(score - m), and, in out, the sum of e^(score - m) v. A larger score multiplies both by e^(m -
// the new m) (M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; T. Dao et al.,
// "FlashAttention", 2022). At the end out is divided by the sum, and for each query m and the sum are kept.
//
// A thread's memory is 64 x 256 scores and the laid-out form of 256 keys and 256 queries. It stays in the
// thread's caches. A query's bits depend on its own keys alone, not on the other queries of its block. Keys
// that it does not see are zeros at the end of its sums.
#include "nn/kernels/attention/sizes.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kKeyBlock = kAttentionKeys;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Query r of the block sees key `first` + r and the keys before it; the entries of other keys become 0.
// scores: (keys, 64 queries), become e^(score - largest); largest, sum: (64 queries), over the previous keys,
// and then also over these keys; factor: (64 queries), the factor for the sums over the previous keys.
// Returns whether all factors are 1.
WEFT_CPU_CLONES(bool, softmax_columns,
                (float* scores, float* largest, float* sum, float* factor, std::int64_t keys,
                 std::int64_t first),
                (scores, largest, sum, factor, keys, first)) {
  // The number of keys that are added up before they join the sum, so that long sums stay accurate.
  constexpr std::int64_t kPartialSum = 32;
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
WEFT_CPU_CLONES(void, scale_rows,
                (float* out, const float* factor, std::int64_t rows, std::int64_t width, std::int64_t stride),
                (out, factor, rows, width, stride)) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = out + r * stride;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < width; ++i) row[i] *= factor[r];
  }
}

// The working set of a thread: up to kGroup blocks of queries of a head, and a block of its keys. Matrices of
// units have the form of products.hpp.
constexpr std::int64_t kGroup = 4;

struct Memory {
  float *largest, *sum, *factor;  // (kGroup, 64)
  float* queries;                 // (kGroup, units of head_dim, 64)
  float *keys, *values;           // (keys, units of head_dim), (units of keys, head_dim)
  float *scores, *weights;        // (keys, 64), (units of keys, 64); the same memory if units are floats
};

Memory memory_of(Parts& parts, const BlockProducts& products, const Sizes& s, std::int64_t group) {
  const std::int64_t keys = std::min(kKeyBlock, s.keys), of_queries = group * kQueryBlock;
  Memory m{};
  m.largest = parts.next(of_queries);
  m.sum = parts.next(of_queries);
  m.factor = parts.next(kQueryBlock);
  m.queries = parts.next(of_queries * products.units(s.head_dim));
  m.keys = parts.next(keys * blocks::padded(products.units(s.head_dim)));
  m.values = parts.next(products.units(keys) * blocks::padded(s.head_dim));
  m.scores = parts.next(keys * kQueryBlock);
  m.weights = products.plain() ? m.scores : parts.next(products.units(keys) * kQueryBlock);
  return m;
}

struct Forward {
  const float *q, *k, *v;
  const KeyBias& bias;
  float *out, *softmax;  // softmax: (batch, heads, queries, kSoftmaxTerms)
  const Sizes& s;
  const BlockProducts& products;
  std::int64_t group;

  // A block of queries of one head: its place in the group, its places in q and out, and the index of its
  // first query among all queries of all heads.
  struct Block {
    std::int64_t b, head, index, first, rows, seen, at, sums_at;
  };
  Block block(std::int64_t b, std::int64_t head, std::int64_t first_of_group, std::int64_t index) const {
    const std::int64_t first = first_of_group + index * kQueryBlock,
                       rows = std::min(kQueryBlock, s.queries - first);
    return {b,
            head,
            index,
            first,
            rows,
            s.seen(first, rows),
            (b * s.queries + first) * s.q_stride() + head * s.head_dim,
            (b * s.heads + head) * s.queries + first};
  }

  void begin(const Memory& m, const Block& x) const {
    float *const largest = m.largest + x.index * kQueryBlock, *const sum = m.sum + x.index * kQueryBlock;
    std::fill_n(largest, kQueryBlock, kMinusInfinity);
    std::fill_n(sum, kQueryBlock, 0.0f);
    for (std::int64_t r = 0; !s.begins && r < x.rows; ++r) {
      largest[r] = kept(x, r)[0];
      sum[r] = kept(x, r)[1];
    }
    if (s.begins && x.seen == 0)  // an empty sum
      for (std::int64_t r = 0; r < x.rows; ++r) std::fill_n(out + x.at + r * s.q_stride(), s.head_dim, 0.0f);
    products.transposed(q + x.at, s.q_stride(), x.rows, s.head_dim, queries(m, x), kQueryBlock);
  }
  float* kept(const Block& x, std::int64_t row) const { return softmax + (x.sums_at + row) * kSoftmaxTerms; }
  float* queries(const Memory& m, const Block& x) const {
    return m.queries + x.index * products.units(s.head_dim) * kQueryBlock;
  }

  // Processes keys [key, key + keys), which are laid out in m and which the block sees.
  void attend(int thread, const Memory& m, const Block& x, std::int64_t key, std::int64_t keys) const {
    const std::int64_t head_units = products.units(s.head_dim);
    products.multiply(thread, {m.keys, blocks::padded(head_units), 1, queries(m, x), kQueryBlock, m.scores,
                               kQueryBlock, keys, x.rows, head_units, s.scaling()});
    bias.add(m.scores, s, x.b, key, keys, x.first, x.rows);
    const bool as_before =
        softmax_columns(m.scores, m.largest + x.index * kQueryBlock, m.sum + x.index * kQueryBlock, m.factor,
                        keys, s.hidden_from(x.first) - key);
    const bool accumulate = key > 0 || !s.begins;
    if (accumulate && !as_before) scale_rows(out + x.at, m.factor, x.rows, s.head_dim, s.q_stride());
    if (!products.plain()) products.down_columns(m.scores, kQueryBlock, keys, x.rows, m.weights, kQueryBlock);
    products.multiply(thread, {m.weights, 1, kQueryBlock, m.values, blocks::padded(s.head_dim), out + x.at,
                               s.q_stride(), x.rows, s.head_dim, products.units(keys), 1.0f, accumulate});
  }

  void end(const Memory& m, const Block& x) const {
    const float *const largest = m.largest + x.index * kQueryBlock, *const sum =
                                                                        m.sum + x.index * kQueryBlock;
    for (std::int64_t r = 0; r < x.rows; ++r) {
      kept(x, r)[0] = largest[r];
      kept(x, r)[1] = sum[r];
      m.factor[r] = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
    }
    if (!s.ends) return;
    scale_rows(out + x.at, m.factor, x.rows, s.head_dim, s.q_stride());
  }

  // Processes the blocks of a group, whose first query is given. Keys and values are laid out once for all of
  // the blocks.
  void run(int thread, const Memory& m, std::int64_t b, std::int64_t head, std::int64_t first) const {
    const std::int64_t count = std::min(group, blocks_of(s.queries - first, kQueryBlock));
    for (std::int64_t i = 0; i < count; ++i) begin(m, block(b, head, first, i));
    const std::int64_t seen = block(b, head, first, count - 1).seen;  // the last one sees the most
    for (std::int64_t key = 0; key < seen; key += kKeyBlock) {
      const std::int64_t keys = std::min(kKeyBlock, seen - key), stride = s.k_stride(),
                         at = (b * s.keys + key) * stride + head / s.group() * s.head_dim;
      products.along_rows(k + at, stride, keys, s.head_dim, m.keys,
                          blocks::padded(products.units(s.head_dim)));
      products.down_columns(v + at, stride, keys, s.head_dim, m.values, blocks::padded(s.head_dim));
      for (std::int64_t i = 0; i < count; ++i) {
        const Block x = block(b, head, first, i);
        if (x.seen > key) attend(thread, m, x, key, std::min(keys, x.seen - key));
      }
    }
    for (std::int64_t i = 0; i < count; ++i) end(m, block(b, head, first, i));
  }
};

// softmax: (batch, heads, queries, kSoftmaxTerms), over the keys of the previous pieces, and then also over
// these keys.
void forward(KernelContext::State& state, const float* q, const float* k, const float* v, const KeyBias& bias,
             float* out, float* softmax, const Sizes& s) {
  const std::int64_t most_keys = std::min(kKeyBlock, s.keys);
  const BlockProducts products(state, s.bf16, std::max(kQueryBlock, s.head_dim),
                               std::max(s.head_dim, most_keys));
  const std::int64_t group = group_size(state, s, kGroup), groups = blocks_of(s.queries, group * kQueryBlock);
  Parts count;
  memory_of(count, products, s, group);
  state.reserve_per_thread(count.size());
  const Forward of{q, k, v, bias, out, softmax, s, products, group};
  const auto one_group = [&](std::int64_t task, int thread) {
    Parts parts(state.thread_scratch(thread));
    const Memory m = memory_of(parts, products, s, group);
    of.run(thread, m, task / (s.heads * groups), task / groups % s.heads,
           // tasks whose queries see the most keys come first
           (groups - 1 - task % groups) * group * kQueryBlock);
  };
  parallel_for(state, s.batch * s.heads * groups, one_group, Tasks::unequal);
}

}  // namespace

template <>
void attention_forward<float>(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                              float* softmax, AttentionShape s) {
  check_heads("attention_forward", s);
  forward(ctx.state(), q, k, v, {}, out, softmax, sizes(s));
}

template <>
void full_attention_forward<float>(KernelContext& ctx, const float* q, const float* k, const float* v,
                                   ScoreBias bias, float* out, float* softmax, FullAttentionShape s) {
  check_heads("full_attention_forward", s);
  float* const scratch = ctx.state().scratch(KeyBias::floats(bias, sizes(s)));
  forward(ctx.state(), q, k, v, KeyBias::of(bias, sizes(s), scratch), out, softmax, sizes(s));
}

void attention_piece_forward(KernelContext& ctx, const float* q, const float* k, const float* v,
                             ScoreBias bias, float* out, float* softmax, AttentionPiece s) {
  const Sizes of = sizes("attention_piece_forward", s, "key", s.first_key, kAttentionKeys);
  float* const scratch = ctx.state().scratch(KeyBias::floats(bias, of));
  forward(ctx.state(), q, k, v, KeyBias::of(bias, of, scratch), out, softmax, of);
}

}  // namespace weft::kernels::cpu
