// One step of each optimizer on a flat range of parameters.
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

struct AdamWFactors {  // scalars in f64 until here, each rounded to f32 once, as PyTorch does
  float keep, beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_correction2, eps, step_size;
};

// Computes the step of element i; `first` is its new first moment.
WEFT_INLINE inline void adamw_element(float& p, float& m, float& v, float g, float first,
                                      const AdamWFactors& k) {
  const float second = v * k.beta2 + k.one_minus_beta2 * g * g;
  const float denominator = std::sqrt(second) / k.sqrt_correction2 + k.eps;
  m = first;
  v = second;
  p = p * k.keep - k.step_size * first / denominator;
}

// If beta1 is 1/2 or more, the moment is computed from the previous step's moment.
WEFT_CPU_CLONES(void, adamw_range,
                (float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& f),
                (p, m, v, g, n, f)) {
  const AdamWFactors k = f;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i)
    adamw_element(p[i], m[i], v[i], g[i], m[i] + k.one_minus_beta1 * (g[i] - m[i]), k);
}

// If beta1 is below 1/2, the moment is computed mainly from the gradient: m + (1 - beta1) (g - m) would lose
// digits of g if m is much larger.
WEFT_CPU_CLONES(void, adamw_new_range,
                (float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& f),
                (p, m, v, g, n, f)) {
  const AdamWFactors k = f;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i)
    adamw_element(p[i], m[i], v[i], g[i], g[i] - k.beta1 * (g[i] - m[i]), k);
}

// If beta1 is 0, the moment is the gradient, even if g - m is infinite.
WEFT_CPU_CLONES(void, adamw_plain_range,
                (float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWFactors& f),
                (p, m, v, g, n, f)) {
  const AdamWFactors k = f;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) adamw_element(p[i], m[i], v[i], g[i], g[i], k);
}

WEFT_CPU_CLONES(void, sgd_range,
                (float* p, float* velocity, const float* g, std::int64_t n, float rate, float momentum,
                 float decay),
                (p, velocity, g, n, rate, momentum, decay)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    velocity[i] = momentum * velocity[i] + (g[i] + decay * p[i]);
    p[i] -= rate * velocity[i];
  }
}

WEFT_CPU_CLONES(void, plain_sgd_range, (float* p, const float* g, std::int64_t n, float rate, float decay),
                (p, g, n, rate, decay)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) p[i] -= rate * (g[i] + decay * p[i]);
}

WEFT_CPU_CLONES(void, lion_range,
                (float* p, float* m, const float* g, std::int64_t n, float rate, float beta1, float beta2,
                 float one_minus_beta1, float one_minus_beta2, float keep),
                (p, m, g, n, rate, beta1, beta2, one_minus_beta1, one_minus_beta2, keep)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float c = beta1 * m[i] + one_minus_beta1 * g[i];
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;
    p[i] = p[i] * keep - rate * sign;
    m[i] = beta2 * m[i] + one_minus_beta2 * g[i];
  }
}

struct ScheduleFreeFactors {  // each rounded to f32 once
  float beta2, one_minus_beta2, sqrt_correction2, eps, decay, weight, rate_of_y, rate;
};

WEFT_CPU_CLONES(void, schedule_free_range,
                (float* y, float* z, float* v, const float* g, std::int64_t n, const ScheduleFreeFactors& f),
                (y, z, v, g, n, f)) {
  const ScheduleFreeFactors k = f;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float second = v[i] * k.beta2 + k.one_minus_beta2 * g[i] * g[i];
    const float d = g[i] / (std::sqrt(second) / k.sqrt_correction2 + k.eps) + k.decay * y[i];
    v[i] = second;
    y[i] = y[i] + k.weight * (z[i] - y[i]) - k.rate_of_y * d;
    z[i] -= k.rate * d;
  }
}

}  // namespace

void lion_step(KernelContext& ctx, float* p, float* m, const float* g, std::int64_t n, const LionStep& s) {
  const auto rate = static_cast<float>(s.rate), beta1 = static_cast<float>(s.beta1),
             beta2 = static_cast<float>(s.beta2), one_minus_beta1 = static_cast<float>(1.0 - s.beta1),
             one_minus_beta2 = static_cast<float>(1.0 - s.beta2),
             keep = static_cast<float>(1.0 - s.rate * s.weight_decay);
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    lion_range(p + begin, m + begin, g + begin, end - begin, rate, beta1, beta2, one_minus_beta1,
               one_minus_beta2, keep);
  });
}

void schedule_free_step(KernelContext& ctx, float* y, float* z, float* v, const float* g, std::int64_t n,
                        const ScheduleFreeStep& s) {
  const double correction2 = 1.0 - std::pow(s.beta2, static_cast<double>(s.step));
  const ScheduleFreeFactors factors{
      .beta2 = static_cast<float>(s.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - s.beta2),
      .sqrt_correction2 = static_cast<float>(std::sqrt(correction2)),
      .eps = static_cast<float>(s.eps),
      .decay = static_cast<float>(s.weight_decay),
      .weight = static_cast<float>(s.weight),
      .rate_of_y = static_cast<float>(s.rate * (1.0 - s.beta1 * (1.0 - s.weight))),
      .rate = static_cast<float>(s.rate)};
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    schedule_free_range(y + begin, z + begin, v + begin, g + begin, end - begin, factors);
  });
}

void adamw_step(KernelContext& ctx, float* p, float* m, float* v, const float* g, std::int64_t n,
                const AdamWStep& s) {
  const auto step = static_cast<double>(s.step);
  const double correction1 = 1.0 - std::pow(s.beta1, step), correction2 = 1.0 - std::pow(s.beta2, step);
  const AdamWFactors factors{.keep = static_cast<float>(1.0 - s.rate * s.weight_decay),
                             .beta1 = static_cast<float>(s.beta1),
                             .one_minus_beta1 = static_cast<float>(1.0 - s.beta1),
                             .beta2 = static_cast<float>(s.beta2),
                             .one_minus_beta2 = static_cast<float>(1.0 - s.beta2),
                             .sqrt_correction2 = static_cast<float>(std::sqrt(correction2)),
                             .eps = static_cast<float>(s.eps),
                             .step_size = static_cast<float>(s.rate / correction1)};
  const auto range = s.beta1 == 0 ? adamw_plain_range : s.beta1 < 0.5 ? adamw_new_range : adamw_range;
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    range(p + begin, m + begin, v + begin, g + begin, end - begin, factors);
  });
}

void sgd_step(KernelContext& ctx, float* p, float* velocity, const float* g, std::int64_t n,
              const SgdStep& s) {
  const auto rate = static_cast<float>(s.rate), momentum = static_cast<float>(s.momentum),
             decay = static_cast<float>(s.weight_decay);
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    if (s.momentum == 0.0) {
      plain_sgd_range(p + begin, g + begin, end - begin, rate, decay);
    } else {
      sgd_range(p + begin, velocity + begin, g + begin, end - begin, rate, momentum, decay);
    }
  });
}

}  // namespace weft::kernels::cpu
