// Cross-entropy over rows of logits, forward and backward. A rank may hold a part of each row. Forward
// returns four numbers of the part, and computes the loss from the numbers of all parts.
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

// The sum of e^(row[j] - from): short sums in f32, added up in f64.
WEFT_INLINE inline double sum_of_exponentials(const float* row, float from, std::int64_t count) {
  constexpr std::int64_t kShort = 512;
  double sum = 0;
  for (std::int64_t begin = 0; begin < count; begin += kShort)
    sum +=
        static_cast<double>(lane_sum<float>(std::min(kShort, count - begin), [&](std::int64_t j) WEFT_INLINE {
          return exp_f32(row[begin + j] - from);
        }));
  return sum;
}

// terms: (rows, kLossTerms). If a part holds nothing above -infinity, the sum is relative to 0. Otherwise it
// would be NaN even if other parts make it finite. NaNs are in the sum in both cases.
WEFT_CPU_CLONES(void, term_rows,
                (const float* logits, const std::int64_t* targets, double* terms, std::int64_t rows,
                 std::int64_t first, std::int64_t count, bool sum_logits),
                (logits, targets, terms, rows, first, count, sum_logits)) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * count;
    const float largest = lane_max(row, count);
    const float from = largest == -std::numeric_limits<float>::infinity() ? 0.0f : largest;
    const std::int64_t target = targets[r] - first;
    double* to = terms + r * kLossTerms;
    to[0] = static_cast<double>(largest);
    to[1] = sum_of_exponentials(row, from, count);
    to[2] = target >= 0 && target < count ? static_cast<double>(row[target]) : 0.0;
    to[3] = sum_logits ? lane_sum<double>(
                             count, [&](std::int64_t j) WEFT_INLINE { return static_cast<double>(row[j]); })
                       : 0.0;
  }
}

// losses[t] = z - (1 - smoothing) logits[target] - smoothing (mean of logits) + z_loss z², with z = log of
// the sum of e^logit; 0 if ignored. terms: (parts, tokens, kLossTerms), softmax: (tokens, kSoftmaxTerms);
// rows [begin, end) of the tokens.
void loss_rows(const double* terms, int parts, const std::int64_t* targets, double* softmax, double* losses,
               std::int64_t tokens, std::int64_t begin, std::int64_t end, std::int64_t vocab,
               double smoothing, double z_loss) {
  for (std::int64_t t = begin; t < end; ++t) {
    const auto term = [&](int part, int which) { return terms[(part * tokens + t) * kLossTerms + which]; };
    double largest = -std::numeric_limits<double>::infinity(), sum = 0, target = 0, logits = 0;
    for (int p = 0; p < parts; ++p) largest = std::max(largest, term(p, 0));
    for (int p = 0; p < parts; ++p) {
      sum += term(p, 1) * std::exp(term(p, 0) - largest);
      target += term(p, 2);
      logits += term(p, 3);
    }
    softmax[t * kSoftmaxTerms] = largest;
    softmax[t * kSoftmaxTerms + 1] = sum;
    losses[t] = targets[t] == kIgnoredTarget ? 0.0 : std::log(sum) + (largest - target);
    if (smoothing > 0 && targets[t] != kIgnoredTarget)
      losses[t] += smoothing * (target - logits / static_cast<double>(vocab));
    if (z_loss > 0 && targets[t] != kIgnoredTarget) {
      const double z = largest + std::log(sum);
      losses[t] += z_loss * z * z;
    }
  }
}

// The target distribution divided by the number of tokens. It is the share that smoothing gives to each
// logit, and the additional share of the target's logit. Also z_loss.
struct Wanted {
  double inv_count;
  float of_each, of_target;
  double z_loss;
};

WEFT_CPU_CLONES(void, gradient_rows,
                (const float* logits, const std::int64_t* targets, const double* softmax, float* dlogits,
                 std::int64_t rows, std::int64_t first, std::int64_t count, const Wanted& wanted),
                (logits, targets, softmax, dlogits, rows, first, count, wanted)) {
  const float of_each = wanted.of_each;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = logits + r * count;
    float* drow = dlogits + r * count;
    if (targets[r] == kIgnoredTarget) {
      std::fill(drow, drow + count, 0.0f);
      continue;
    }
    const auto largest = static_cast<float>(softmax[r * kSoftmaxTerms]);
    const double sum = softmax[r * kSoftmaxTerms + 1];
    double share = wanted.inv_count;
    if (wanted.z_loss > 0) share *= 1 + 2 * wanted.z_loss * (softmax[r * kSoftmaxTerms] + std::log(sum));
    const auto factor = static_cast<float>(share / sum);
#pragma GCC ivdep
    for (std::int64_t j = 0; j < count; ++j) drow[j] = exp_f32(row[j] - largest) * factor - of_each;
    const std::int64_t target = targets[r] - first;
    if (target >= 0 && target < count) drow[target] -= wanted.of_target;
  }
}

}  // namespace

void cross_entropy_terms(KernelContext& ctx, const float* logits, const std::int64_t* targets, double* terms,
                         std::int64_t tokens, VocabPart vocab, const std::int64_t* count, double smoothing) {
  check("cross_entropy", targets, tokens, vocab.whole, *count);
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    term_rows(logits + begin * vocab.count, targets + begin, terms + begin * kLossTerms, end - begin,
              vocab.first, vocab.count, smoothing > 0);
  });
}

void cross_entropy_sum(KernelContext& ctx, const double* terms, int parts, const std::int64_t* targets,
                       double* softmax, double* loss, std::int64_t tokens, std::int64_t vocab,
                       const std::int64_t* count, double smoothing, double z_loss) {
  KernelContext::State& state = ctx.state();
  double* losses = state.scratch_f64(tokens);
  parallel_blocks(state, tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    loss_rows(terms, parts, targets, softmax, losses, tokens, begin, end, vocab, smoothing, z_loss);
  });
  double sum = 0.0;
  for (std::int64_t t = 0; t < tokens; ++t) sum += losses[t];
  *loss = sum / static_cast<double>(*count);
}

void cross_entropy_backward(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                            const double* softmax, const double* dloss, float* dlogits, std::int64_t tokens,
                            VocabPart vocab, const std::int64_t* count, double smoothing, double z_loss) {
  check("cross_entropy_backward", targets, tokens, vocab.whole, *count);
  const double inv_count = 1.0 / static_cast<double>(*count);
  const Wanted wanted{
      inv_count,
      smoothing > 0 ? static_cast<float>(smoothing * inv_count / static_cast<double>(vocab.whole)) : 0.0f,
      static_cast<float>((1 - smoothing) * inv_count), z_loss};
  parallel_blocks(ctx.state(), tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    gradient_rows(logits + begin * vocab.count, targets + begin, softmax + begin * kSoftmaxTerms,
                  dlogits + begin * vocab.count, end - begin, vocab.first, vocab.count, wanted);
  });
  if (dloss != nullptr) scale(ctx, dlogits, static_cast<float>(*dloss), tokens * vocab.count);
}

void count_valid(KernelContext&, const std::int64_t* targets, std::int64_t* count, std::int64_t n) {
  *count = n - std::count(targets, targets + n, kIgnoredTarget);
}

}  // namespace weft::kernels::cpu
