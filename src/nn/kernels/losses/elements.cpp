// Losses in which each element has a term: sums of the terms in f64, and the terms' derivatives.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

// The elements that one thread adds up before they are added to the sum. All have one weight, if there are
// weights.
std::int64_t piece_of(const float* weights, const LossShape& s) {
  constexpr std::int64_t kWithoutWeights = 4096;
  return weights == nullptr ? kWithoutWeights : std::max<std::int64_t>(1, s.width);
}
double weight_of(const float* weights, const LossShape& s, std::int64_t piece) {
  return weights == nullptr ? 1.0 : static_cast<double>(weights[piece % s.rows]);
}

void check(LossTerm term, const float* target, std::int64_t n, std::int64_t count) {
  if (count <= 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: count is {}; expected the number of elements of all ranks, more than 0",
                            name(term), count));
  if (term != LossTerm::binary_cross_entropy) return;
  for (std::int64_t i = 0; i < n; ++i)
    if (!(target[i] >= 0.0f && target[i] <= 1.0f))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: element {} has target {}; expected 0 to 1", name(term), i, target[i]));
}

// (y - target)^2
WEFT_CPU_CLONES(double, squares, (const float* y, const float* target, std::int64_t n), (y, target, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE {
    const double d = static_cast<double>(y[i]) - static_cast<double>(target[i]);
    return d * d;
  });
}

// -t log p - (1 - t) log(1 - p) with p = 1 / (1 + e^-y), written so that no exponential is large: |y| (1 - t)
// or, if y < 0, |y| t, plus log(1 + e^-|y|). An infinite logit of the right sign adds 0.
double cross_entropies(const float* y, const float* target, std::int64_t n) {
  return lane_sum<double>(n, [&](std::int64_t i) {
    const auto x = static_cast<double>(y[i]), t = static_cast<double>(target[i]), size = std::abs(x);
    const double wrong = x > 0.0 ? 1.0 - t : t;
    return (wrong == 0.0 ? 0.0 : size * wrong) + std::log1p(std::exp(-size));
  });
}

WEFT_CPU_CLONES(void, square_gradients,
                (const float* y, const float* target, float* dy, std::int64_t n, float factor),
                (y, target, dy, n, factor)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) dy[i] = (y[i] - target[i]) * (2.0f * factor);
}
WEFT_CPU_CLONES(void, cross_entropy_gradients,
                (const float* y, const float* target, float* dy, std::int64_t n, float factor),
                (y, target, dy, n, factor)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) dy[i] = (sigmoid_f32(y[i]) - target[i]) * factor;
}

}  // namespace

void element_loss_forward(KernelContext& ctx, const float* y, const float* target, const float* weights,
                          double* loss, LossShape s, const std::int64_t* count, LossTerm term) {
  check(term, target, s.n, *count);
  const auto terms = term == LossTerm::squared_error ? squares : cross_entropies;
  KernelContext::State& state = ctx.state();
  const std::int64_t piece = piece_of(weights, s), pieces = blocks_of(s.n, piece);
  double* const sums = state.scratch_f64(pieces);
  parallel_for(state, pieces, [&](std::int64_t i, int) {
    const std::int64_t at = i * piece;
    sums[i] = weight_of(weights, s, i) * terms(y + at, target + at, std::min(piece, s.n - at));
  });
  double sum = 0.0;
  for (std::int64_t i = 0; i < pieces; ++i) sum += sums[i];
  *loss = sum / static_cast<double>(*count);
}

void element_loss_backward(KernelContext& ctx, const float* y, const float* target, const float* weights,
                           const double* dloss, float* dy, LossShape s, const std::int64_t* count,
                           LossTerm term) {
  check(term, target, s.n, *count);
  const auto gradients = term == LossTerm::squared_error ? square_gradients : cross_entropy_gradients;
  const double factor = (dloss == nullptr ? 1.0 : *dloss) / static_cast<double>(*count);
  const std::int64_t piece = piece_of(weights, s);
  parallel_for(ctx.state(), blocks_of(s.n, piece), [&](std::int64_t i, int) {
    const std::int64_t at = i * piece;
    gradients(y + at, target + at, dy + at, std::min(piece, s.n - at),
              static_cast<float>(weight_of(weights, s, i) * factor));
  });
}

}  // namespace weft::kernels::cpu
