// Token embedding, forward and backward.
#include <fmt/format.h>

#include <algorithm>

#include "nn/kernels/cpu_context.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

void check_ids(const std::int64_t* ids, std::int64_t tokens, const VocabPart& vocab) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (ids[t] < 0 || ids[t] >= vocab.whole) {
      throw Error(ErrorCode::bad_argument,
                  fmt::format("embedding: token {} has id {}; expected 0 <= id < {} (vocab)", t, ids[t],
                              vocab.whole));
    }
  }
}

bool holds(const VocabPart& vocab, std::int64_t id) {
  return id >= vocab.first && id < vocab.first + vocab.count;
}

// Calls `copy(row, to)` for each token whose row is on this rank, and writes zeros for the others.
template <class T, class Copy>
void look_up(KernelContext& ctx, const std::int64_t* ids, const T* table, float* y, std::int64_t tokens,
             const VocabPart& vocab, std::int64_t dim, Copy copy) {
  check_ids(ids, tokens, vocab);
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (holds(vocab, ids[t]))
        copy(table + (ids[t] - vocab.first) * dim, y + t * dim);
      else
        std::fill_n(y + t * dim, dim, 0.0f);
    }
  });
}

}  // namespace

template <>
void embedding_forward<float>(KernelContext& ctx, const std::int64_t* ids, const float* table, float* y,
                              std::int64_t tokens, VocabPart vocab, std::int64_t dim) {
  look_up(ctx, ids, table, y, tokens, vocab, dim,
          [dim](const float* row, float* to) { std::copy_n(row, dim, to); });
}

template <>
void embedding_forward<bf16>(KernelContext& ctx, const std::int64_t* ids, const bf16* table, float* y,
                             std::int64_t tokens, VocabPart vocab, std::int64_t dim) {
  look_up(ctx, ids, table, y, tokens, vocab, dim, [dim](const bf16* row, float* to) {
    std::transform(row, row + dim, to, [](bf16 x) { return static_cast<float>(x); });
  });
}

// Tokens repeat, so threads would share rows of the table: each thread processes some columns instead, and
// goes over all tokens in order.
void embedding_backward(KernelContext& ctx, const std::int64_t* ids, const float* dy, float* dtable,
                        std::int64_t tokens, VocabPart vocab, std::int64_t dim) {
  check_ids(ids, tokens, vocab);
  constexpr std::int64_t kColumns = 64;
  parallel_blocks(ctx.state(), dim, kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (!holds(vocab, ids[t])) continue;
      const float* from = dy + t * dim;
      float* to = dtable + (ids[t] - vocab.first) * dim;
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) to[i] += from[i];
    }
  });
}

}  // namespace weft::kernels::cpu
