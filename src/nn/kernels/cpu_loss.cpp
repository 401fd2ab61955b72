// Cross-entropy over whole rows of logits, forward and backward.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

void check(const char* op, const std::int64_t* targets, std::int64_t tokens, std::int64_t vocab,
           std::int64_t count) {
  if (count <= 0) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: count is {}; expected the number of valid tokens of all ranks, more than 0",
                            op, count));
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    if ((targets[t] < 0 || targets[t] >= vocab) && targets[t] != kIgnoredTarget) {
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: token {} has target {}; expected 0 <= target < {} (vocab) or {}", op, t,
                              targets[t], vocab, kIgnoredTarget));
    }
  }
}

// losses[t] = log_sum_exp - logits[target] in f64, 0 where ignored.
WEFT_CPU_CLONES void loss_rows(const float* logits, const std::int64_t* targets, float* log_sum_exp,
                               double* losses, std::int64_t rows, std::int64_t vocab) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * vocab;
    const float largest = lane_max(row, vocab);
    const float sum =
        lane_sum<float>(vocab, [&](std::int64_t j) WEFT_INLINE { return exp_f32(row[j] - largest); });
    const double log_sum = static_cast<double>(largest) + std::log(static_cast<double>(sum));
    log_sum_exp[r] = static_cast<float>(log_sum);
    losses[r] = targets[r] == kIgnoredTarget ? 0.0 : log_sum - static_cast<double>(row[targets[r]]);
  }
}

WEFT_CPU_CLONES void gradient_rows(const float* logits, const std::int64_t* targets, const float* log_sum_exp,
                                   float* dlogits, float inv_count, std::int64_t rows, std::int64_t vocab) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * vocab;
    float* drow = dlogits + r * vocab;
    if (targets[r] == kIgnoredTarget) {
      std::fill(drow, drow + vocab, 0.0f);
      continue;
    }
    const float log_sum = log_sum_exp[r];
#pragma GCC ivdep
    for (std::int64_t j = 0; j < vocab; ++j) drow[j] = exp_f32(row[j] - log_sum) * inv_count;
    drow[targets[r]] -= inv_count;
  }
}

}  // namespace

void cross_entropy_forward(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                           float* log_sum_exp, double* loss, std::int64_t tokens, std::int64_t vocab,
                           const std::int64_t* count) {
  check("cross_entropy_forward", targets, tokens, vocab, *count);
  KernelContext::State& state = ctx.state();
  double* losses = state.scratch_f64(tokens);
  parallel_blocks(state, tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    loss_rows(logits + begin * vocab, targets + begin, log_sum_exp + begin, losses + begin, end - begin,
              vocab);
  });
  double sum = 0.0;
  for (std::int64_t t = 0; t < tokens; ++t) sum += losses[t];
  *loss = sum / static_cast<double>(*count);
}

void cross_entropy_backward(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                            const float* log_sum_exp, const double* dloss, float* dlogits,
                            std::int64_t tokens, std::int64_t vocab, const std::int64_t* count) {
  check("cross_entropy_backward", targets, tokens, vocab, *count);
  const auto inv_count = static_cast<float>(1.0 / static_cast<double>(*count));
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    gradient_rows(logits + begin * vocab, targets + begin, log_sum_exp + begin, dlogits + begin * vocab,
                  inv_count, end - begin, vocab);
  });
  if (dloss != nullptr) scale(ctx, dlogits, static_cast<float>(*dloss), tokens * vocab);
}

void count_valid(KernelContext&, const std::int64_t* targets, std::int64_t* count, std::int64_t n) {
  *count = n - std::count(targets, targets + n, kIgnoredTarget);
}

}  // namespace weft::kernels::cpu
