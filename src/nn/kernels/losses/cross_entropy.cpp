// Cross-entropy over rows of logits, forward and backward. A rank may hold a part of each row: forward tells four numbers of
// the part, and makes the loss of those of all parts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

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

// terms: (rows, kLossTerms). Where a part holds nothing above -infinity the sum is taken from 0, or it would be NaN
// though other parts make it finite; NaNs are in the sum either way.
WEFT_CPU_CLONES(void, term_rows,
                (const float* logits, const std::int64_t* targets, float* terms, std::int64_t rows,
                 std::int64_t first, std::int64_t count, bool sum_logits),
                (logits, targets, terms, rows, first, count, sum_logits)) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * count;
    const float largest = lane_max(row, count);
    const float from = largest == -std::numeric_limits<float>::infinity() ? 0.0f : largest;
    const std::int64_t target = targets[r] - first;
    float* to = terms + r * kLossTerms;
    to[0] = largest;
    to[1] = lane_sum<float>(count, [&](std::int64_t j) WEFT_INLINE { return exp_f32(row[j] - from); });
    to[2] = target >= 0 && target < count ? row[target] : 0.0f;
    to[3] = sum_logits ? static_cast<float>(lane_sum<double>(
                             count, [&](std::int64_t j) WEFT_INLINE { return static_cast<double>(row[j]); }))
                       : 0.0f;
  }
}

// losses[t] = log_sum_exp - (1 - smoothing) logits[target] - smoothing (mean of logits) in f64, 0 where ignored.
// terms: (parts, tokens, kLossTerms); rows [begin, end) of the tokens.
void loss_rows(const float* terms, int parts, const std::int64_t* targets, float* log_sum_exp, double* losses,
               std::int64_t tokens, std::int64_t begin, std::int64_t end, std::int64_t vocab,
               double smoothing) {
  for (std::int64_t t = begin; t < end; ++t) {
    const auto term = [&](int part, int which) {
      return static_cast<double>(terms[(part * tokens + t) * kLossTerms + which]);
    };
    double largest = -std::numeric_limits<double>::infinity(), sum = 0, target = 0, logits = 0;
    for (int p = 0; p < parts; ++p) largest = std::max(largest, term(p, 0));
    for (int p = 0; p < parts; ++p) {
      sum += term(p, 1) * std::exp(term(p, 0) - largest);
      target += term(p, 2);
      logits += term(p, 3);
    }
    const double log_sum = largest + std::log(sum);
    log_sum_exp[t] = static_cast<float>(log_sum);
    losses[t] = targets[t] == kIgnoredTarget ? 0.0 : log_sum - target;
    if (smoothing > 0 && targets[t] != kIgnoredTarget)
      losses[t] += smoothing * (target - logits / static_cast<double>(vocab));
  }
}

// What each logit loses to smoothing, and the target's logit beside that; divided by the number of tokens.
struct Wanted {
  float inv_count, of_each, of_target;
};

WEFT_CPU_CLONES(void, gradient_rows,
                (const float* logits, const std::int64_t* targets, const float* log_sum_exp, float* dlogits,
                 std::int64_t rows, std::int64_t first, std::int64_t count, const Wanted& wanted),
                (logits, targets, log_sum_exp, dlogits, rows, first, count, wanted)) {
  const float inv_count = wanted.inv_count, of_each = wanted.of_each;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * count;
    float* drow = dlogits + r * count;
    if (targets[r] == kIgnoredTarget) {
      std::fill(drow, drow + count, 0.0f);
      continue;
    }
    const float log_sum = log_sum_exp[r];
#pragma GCC ivdep
    for (std::int64_t j = 0; j < count; ++j) drow[j] = exp_f32(row[j] - log_sum) * inv_count - of_each;
    const std::int64_t target = targets[r] - first;
    if (target >= 0 && target < count) drow[target] -= wanted.of_target;
  }
}

}  // namespace

void cross_entropy_terms(KernelContext& ctx, const float* logits, const std::int64_t* targets, float* terms,
                         std::int64_t tokens, VocabPart vocab, const std::int64_t* count, double smoothing) {
  check("cross_entropy", targets, tokens, vocab.whole, *count);
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    term_rows(logits + begin * vocab.count, targets + begin, terms + begin * kLossTerms, end - begin,
              vocab.first, vocab.count, smoothing > 0);
  });
}

void cross_entropy_sum(KernelContext& ctx, const float* terms, int parts, const std::int64_t* targets,
                       float* log_sum_exp, double* loss, std::int64_t tokens, std::int64_t vocab,
                       const std::int64_t* count, double smoothing) {
  KernelContext::State& state = ctx.state();
  double* losses = state.scratch_f64(tokens);
  parallel_blocks(state, tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    loss_rows(terms, parts, targets, log_sum_exp, losses, tokens, begin, end, vocab, smoothing);
  });
  double sum = 0.0;
  for (std::int64_t t = 0; t < tokens; ++t) sum += losses[t];
  *loss = sum / static_cast<double>(*count);
}

void cross_entropy_backward(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                            const float* log_sum_exp, const double* dloss, float* dlogits,
                            std::int64_t tokens, VocabPart vocab, const std::int64_t* count,
                            double smoothing) {
  check("cross_entropy_backward", targets, tokens, vocab.whole, *count);
  const double inv_count = 1.0 / static_cast<double>(*count);
  const Wanted wanted{
      static_cast<float>(inv_count),
      smoothing > 0 ? static_cast<float>(smoothing * inv_count / static_cast<double>(vocab.whole)) : 0.0f,
      static_cast<float>((1 - smoothing) * inv_count)};
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    gradient_rows(logits + begin * vocab.count, targets + begin, log_sum_exp + begin,
                  dlogits + begin * vocab.count, end - begin, vocab.first, vocab.count, wanted);
  });
  if (dloss != nullptr) scale(ctx, dlogits, static_cast<float>(*dloss), tokens * vocab.count);
}

void count_valid(KernelContext&, const std::int64_t* targets, std::int64_t* count, std::int64_t n) {
  *count = n - std::count(targets, targets + n, kIgnoredTarget);
}

}  // namespace weft::kernels::cpu
