// Token embedding, forward and backward.
#include <fmt/format.h>

#include <algorithm>

#include "nn/kernels/cpu_context.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

void check_ids(const std::int64_t* ids, std::int64_t tokens, std::int64_t vocab) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (ids[t] < 0 || ids[t] >= vocab) {
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("embedding: token {} has id {}; expected 0 <= id < {} (vocab)", t, ids[t], vocab));
    }
  }
}

}  // namespace

void embedding_forward(KernelContext& ctx, const std::int64_t* ids, const float* table, float* y,
                       std::int64_t tokens, std::int64_t vocab, std::int64_t dim) {
  check_ids(ids, tokens, vocab);
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) std::copy_n(table + ids[t] * dim, dim, y + t * dim);
  });
}

void embedding_forward_bf16(KernelContext& ctx, const std::int64_t* ids, const bf16* table, float* y,
                            std::int64_t tokens, std::int64_t vocab, std::int64_t dim) {
  check_ids(ids, tokens, vocab);
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      std::transform(table + ids[t] * dim, table + (ids[t] + 1) * dim, y + t * dim,
                     [](bf16 x) { return static_cast<float>(x); });
  });
}

// Tokens repeat, so threads share rows of the table: each takes some columns instead, and goes over all
// tokens in order.
void embedding_backward(KernelContext& ctx, const std::int64_t* ids, const float* dy, float* dtable,
                        std::int64_t tokens, std::int64_t vocab, std::int64_t dim) {
  check_ids(ids, tokens, vocab);
  constexpr std::int64_t kColumns = 64;
  parallel_blocks(ctx.state(), dim, kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* from = dy + t * dim;
      float* to = dtable + ids[t] * dim;
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) to[i] += from[i];
    }
  });
}

}  // namespace weft::kernels::cpu
