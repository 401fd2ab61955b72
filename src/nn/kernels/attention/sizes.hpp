// The common part of the passes of attention: sizes, the places of blocks, and a bias. Private to the files
// in this folder.
//
// Query positions are processed in blocks of 64. The scores of a block are kept transposed, (keys, 64
// queries). Then maxima and sums over keys go down columns, 64 queries in parallel in the vector registers,
// and no row has a remainder. A block of fewer queries leaves columns unused, whose contents nobody uses.
//
// Both passes also process attention in pieces of keys and of queries, as these arrive from other ranks. The
// terms of a piece are added in the order of the whole computation, so that the bits are those of one piece.
// Pieces of keys begin at the beginning of a block of keys, and pieces of queries at the beginning of a block
// of queries. Each element's sum runs over blocks in a fixed order, in pieces or not.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/kernels/attention/block_products.hpp"
#include "nn/kernels/checks.hpp"
#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kQueryBlock = kAttentionQueries;

// All kinds of attention, complete or a piece. Positions are counted from the piece's first key and its first
// query. That query is position `ahead` of the piece's keys. For causal attention query i sees the keys up to
// ahead + i.
struct Sizes {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;
  bool causal;
  std::int64_t ahead = 0;
  bool begins = true, ends = true;  // nothing was added up before, and nothing will be
  bool bf16 = false;                // operands of products may be rounded

  std::int64_t group() const { return kv_heads == 0 ? 0 : heads / kv_heads; }
  std::int64_t q_stride() const { return heads * head_dim; }
  std::int64_t k_stride() const { return kv_heads * head_dim; }
  float scaling() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  /// How many keys the queries [first, first + rows) see, and the first of these keys that some of the
  /// queries do not see.
  std::int64_t seen(std::int64_t first, std::int64_t rows) const {
    return causal ? std::clamp<std::int64_t>(ahead + first + rows, 0, keys) : keys;
  }
  std::int64_t hidden_from(std::int64_t first) const { return causal ? ahead + first : keys; }
};

[[maybe_unused]] Sizes sizes(const AttentionShape& s) {
  return {s.batch, s.seq, s.seq, s.heads, s.kv_heads, s.head_dim, true, 0, true, true, s.bf16_products};
}
[[maybe_unused]] Sizes sizes(const FullAttentionShape& s) {
  return {s.batch, s.queries, s.keys, s.heads, s.kv_heads, s.head_dim, false, 0, true, true, s.bf16_products};
}
// `first`: the first element of the tensor that arrives in pieces. Pieces begin at multiples of `step`.
[[maybe_unused]] Sizes sizes(const char* op, const AttentionPiece& s, const char* what, std::int64_t first,
                             std::int64_t step) {
  check_heads(op, s);
  if (first % step != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: first_{} is {}; expected a multiple of {}", op, what, first, step));
  return {s.batch,    s.queries,  s.keys,         s.heads,
          s.kv_heads, s.head_dim, s.causal,       s.first_query - s.first_key,
          s.begins,   s.ends,     s.bf16_products};
}

// How many blocks of queries a task processes, at most `most`. They share keys that are laid out once, but
// all threads should have tasks.
[[maybe_unused]] std::int64_t group_size(const KernelContext::State& state, const Sizes& s,
                                         std::int64_t most) {
  const std::int64_t blocks = blocks_of(s.queries, kQueryBlock);
  std::int64_t size = std::min(most, std::max<std::int64_t>(blocks, 1));
  while (size > 1 && s.batch * s.heads * blocks_of(blocks, size) < 4 * state.threads) size /= 2;
  return size;
}

// to: (columns, rows), from: (rows, columns)
[[maybe_unused]] void transpose(const float* from, float* to, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// scores: (keys, 64 queries) += bias: (keys, rows) with rows `stride` apart
WEFT_CPU_CLONES(void, add_bias_columns,
                (float* scores, const float* bias, std::int64_t keys, std::int64_t rows, std::int64_t stride),
                (scores, bias, keys, rows, stride)) {
  for (std::int64_t key = 0; key < keys; ++key) {
    float* to = scores + key * kQueryBlock;
    const float* from = bias + key * stride;
#pragma GCC ivdep
    for (std::int64_t r = 0; r < rows; ++r) to[r] += from[r];
  }
}

// scores: (keys, 64 queries) += bias: (keys), the same for all queries
WEFT_CPU_CLONES(void, add_key_bias_columns, (float* scores, const float* bias, std::int64_t keys),
                (scores, bias, keys)) {
  for (std::int64_t key = 0; key < keys; ++key) {
    float* to = scores + key * kQueryBlock;
    const float of_key = bias[key];
#pragma GCC ivdep
    for (int r = 0; r < kQueryBlock; ++r) to[r] += of_key;
  }
}

// A bias in the form in which it is added to scores: (keys, queries), or (keys) for all queries, for all
// samples or for each; without data there is none.
struct KeyBias {
  const float* data = nullptr;
  std::int64_t of_sample = 0;  // floats between those of two samples
  bool of_each_query = true;

  // How many floats of scratch memory a bias needs that is stored by queries.
  static std::int64_t floats(const ScoreBias& bias, const Sizes& s) {
    if (bias.data == nullptr || !bias.of_each_query) return 0;
    return (bias.of_each_sample ? s.batch : 1) * s.queries * s.keys;
  }
  static KeyBias of(const ScoreBias& bias, const Sizes& s, float* scratch) {
    if (bias.data == nullptr) return {};
    const std::int64_t one = (bias.of_each_query ? s.queries : 1) * s.keys;
    const std::int64_t of_sample = bias.of_each_sample ? one : 0;
    if (!bias.of_each_query) return {bias.data, of_sample, false};
    for (std::int64_t b = 0; b < (bias.of_each_sample ? s.batch : 1); ++b)
      transpose(bias.data + b * one, scratch + b * one, s.queries, s.keys);
    return {scratch, of_sample, true};
  }

  // Adds the bias to the scores of keys [begin, begin + count) and queries [first, first + rows) of sample b.
  void add(float* scores, const Sizes& s, std::int64_t b, std::int64_t begin, std::int64_t count,
           std::int64_t first, std::int64_t rows) const {
    if (data == nullptr) return;
    const float* const own = data + b * of_sample;
    if (of_each_query)
      add_bias_columns(scores, own + begin * s.queries + first, count, rows, s.queries);
    else
      add_key_bias_columns(scores, own + begin, count);
  }
};

}  // namespace
}  // namespace weft::kernels::cpu
