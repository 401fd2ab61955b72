// The sums of each channel of maps, batch norm with given statistics, and group norm.
#include <algorithm>
#include <cmath>

#include "nn/kernels/checks.hpp"
#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

WEFT_CPU_CLONES(double, sum_of, (const float* x, std::int64_t n), (x, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE { return static_cast<double>(x[i]); });
}

WEFT_CPU_CLONES(double, squares_of, (const float* x, std::int64_t n), (x, n)) {
  return lane_sum<double>(
      n, [&](std::int64_t i) WEFT_INLINE { return static_cast<double>(x[i]) * static_cast<double>(x[i]); });
}

// Σ dy (x - mean) inv_std
WEFT_CPU_CLONES(double, dot_of,
                (const float* dy, const float* x, double mean, double inv_std, std::int64_t n),
                (dy, x, mean, inv_std, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE {
    return static_cast<double>(dy[i]) * ((static_cast<double>(x[i]) - mean) * inv_std);
  });
}

WEFT_CPU_CLONES(void, forward_range,
                (const float* x, float mean, float scale, float bias, float* y, std::int64_t n),
                (x, mean, scale, bias, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + bias;
}

// dx = factor (dy - mean_dy - (x - mean) slope)
WEFT_CPU_CLONES(void, backward_range,
                (const float* dy, const float* x, float mean, float factor, float mean_dy, float slope,
                 float* dx, std::int64_t n),
                (dy, x, mean, factor, mean_dy, slope, dx, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) dx[i] = factor * (dy[i] - mean_dy - (x[i] - mean) * slope);
}

// Calls run(channel, first element) for each sample of each channel; threads share the channels.
template <class Run>
void each_range(KernelContext& ctx, MapShape s, Run&& run) {
  parallel_for(ctx.state(), s.channels, [&](std::int64_t c, int) {
    for (std::int64_t b = 0; b < s.batch; ++b) run(c, (b * s.channels + c) * s.pixels);
  });
}

void clear(double* sums, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) sums[i] = 0;
}

}  // namespace

void channel_moments(KernelContext& ctx, const float* x, double* sum, double* squares, MapShape s) {
  clear(sum, s.channels);
  clear(squares, s.channels);
  each_range(ctx, s, [&](std::int64_t c, std::int64_t at) {
    sum[c] += sum_of(x + at, s.pixels);
    squares[c] += squares_of(x + at, s.pixels);
  });
}

void batch_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                        const float* mean, const float* inv_std, float* y, MapShape s) {
  each_range(ctx, s, [&](std::int64_t c, std::int64_t at) {
    forward_range(x + at, mean[c], weight[c] * inv_std[c], bias[c], y + at, s.pixels);
  });
}

void batch_norm_backward_sums(KernelContext& ctx, const float* dy, const float* x, const float* mean,
                              const float* inv_std, double* sum_dy, double* sum_dyx, MapShape s) {
  clear(sum_dy, s.channels);
  clear(sum_dyx, s.channels);
  each_range(ctx, s, [&](std::int64_t c, std::int64_t at) {
    sum_dy[c] += sum_of(dy + at, s.pixels);
    sum_dyx[c] +=
        dot_of(dy + at, x + at, static_cast<double>(mean[c]), static_cast<double>(inv_std[c]), s.pixels);
  });
}

void batch_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                         const float* mean, const float* inv_std, const float* mean_dy, const float* mean_dyx,
                         float* dx, MapShape s) {
  each_range(ctx, s, [&](std::int64_t c, std::int64_t at) {
    backward_range(dy + at, x + at, mean[c], weight[c] * inv_std[c], mean_dy[c], inv_std[c] * mean_dyx[c],
                   dx + at, s.pixels);
  });
}

// There are only a few numbers for each channel, so one thread computes them.
void batch_norm_statistics(KernelContext&, const double* sum, const double* squares, double count, double eps,
                           float* mean, float* inv_std, double* tracked_mean, double* tracked_var,
                           std::int64_t channels) {
  for (std::int64_t c = 0; c < channels; ++c) {
    const double of = sum[c] / count, variance = std::max(0.0, squares[c] / count - of * of);
    mean[c] = static_cast<float>(of);
    inv_std[c] = static_cast<float>(1 / std::sqrt(variance + eps));
    if (tracked_mean == nullptr) continue;
    tracked_mean[c] = of;
    tracked_var[c] = variance * count / (count - 1);
  }
}

void batch_norm_track(KernelContext&, const double* tracked_mean, const double* tracked_var, double ranks,
                      double momentum, float* running_mean, float* running_var, std::int64_t* batches,
                      std::int64_t channels) {
  const auto move = [&](float& running, double to) {
    running = static_cast<float>((1 - momentum) * static_cast<double>(running) + momentum * (to / ranks));
  };
  for (std::int64_t c = 0; c < channels; ++c) {
    move(running_mean[c], tracked_mean[c]);
    move(running_var[c], tracked_var[c]);
  }
  ++*batches;
}

void inverse_std(KernelContext&, const float* variance, double eps, float* inv_std, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i)
    inv_std[i] = static_cast<float>(1 / std::sqrt(static_cast<double>(variance[i]) + eps));
}

void divide_f64(KernelContext&, const double* x, double divisor, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(x[i] / divisor);
}

void group_sums(KernelContext&, const double* x, const float* weight, double* y, std::int64_t rows,
                std::int64_t channels, std::int64_t groups) {
  clear(y, rows * groups);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < channels; ++c) {
      const double factor = weight == nullptr ? 1.0 : static_cast<double>(weight[c]);
      y[r * groups + c / (channels / groups)] += factor * x[r * channels + c];
    }
}

void spread_groups(KernelContext&, const float* x, float* y, std::int64_t rows, std::int64_t channels,
                   std::int64_t groups) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < channels; ++c) y[r * channels + c] = x[r * groups + c / (channels / groups)];
}

void sum_rows_f64(KernelContext&, const double* x, float* y, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) {
    double sum = 0;
    for (std::int64_t r = 0; r < rows; ++r) sum += x[r * columns + c];
    y[c] = static_cast<float>(sum);
  }
}

// Group norm rounds at the same steps as the layer for maps that are sharded in space
// (src/domain/group_norm.cpp). It computes the sums of each channel in f64, then those of each group, then
// statistics in f32, over the ranges above. So both give equal bits, unless the ranks' sums, in another
// order, round to another f32.
void group_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias, float* y,
                        float* mean, float* inv_std, MapShape s, std::int64_t groups, float eps) {
  check_groups("group_norm_forward", s, groups);
  const std::int64_t channels = s.channels / groups;
  parallel_for(ctx.state(), s.batch * groups, [&](std::int64_t task, int) {
    const std::int64_t first = task * channels * s.pixels, of_weight = task % groups * channels;
    double sum = 0, squares = 0;
    for (std::int64_t c = 0; c < channels; ++c) {
      sum += sum_of(x + first + c * s.pixels, s.pixels);
      squares += squares_of(x + first + c * s.pixels, s.pixels);
    }
    batch_norm_statistics(ctx, &sum, &squares, static_cast<double>(channels * s.pixels),
                          static_cast<double>(eps), mean + task, inv_std + task, nullptr, nullptr, 1);
    for (std::int64_t c = 0; c < channels; ++c)
      forward_range(x + first + c * s.pixels, mean[task], weight[of_weight + c] * inv_std[task],
                    bias[of_weight + c], y + first + c * s.pixels, s.pixels);
  });
}

void group_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                         const float* mean, const float* inv_std, float* dx, float* dweight, float* dbias,
                         MapShape s, std::int64_t groups) {
  check_groups("group_norm_backward", s, groups);
  KernelContext::State& state = ctx.state();
  const std::int64_t channels = s.channels / groups;
  // (batch, channels), and the same of biases.
  float* const weights = state.scratch(2 * s.batch * s.channels);
  float* const biases = weights + s.batch * s.channels;
  parallel_for(state, s.batch * groups, [&](std::int64_t task, int) {
    const std::int64_t of_weight = task % groups * channels;
    const float middle = mean[task], inv = inv_std[task];
    double sum = 0, dot = 0;  // of g = dy weight, and of g (x - mean) inv_std
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t row = task * channels + c, at = row * s.pixels;
      const double of_dy = sum_of(dy + at, s.pixels),
                   of_both = dot_of(dy + at, x + at, static_cast<double>(middle), static_cast<double>(inv),
                                    s.pixels);
      weights[row] = static_cast<float>(of_both);
      biases[row] = static_cast<float>(of_dy);
      const auto factor = static_cast<double>(weight[of_weight + c]);
      sum += factor * of_dy;
      dot += factor * of_both;
    }
    const auto n = static_cast<double>(channels * s.pixels);
    const auto mean_sum = static_cast<float>(sum / n), mean_dot = static_cast<float>(dot / n);
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t at = (task * channels + c) * s.pixels;
      forward_range(dy + at, 0, weight[of_weight + c], 0, dx + at, s.pixels);  // g, rounded
      backward_range(dx + at, x + at, middle, inv, mean_sum, inv * mean_dot, dx + at, s.pixels);
    }
  });
  add_partial_rows(state, weights, dweight, s.batch, s.channels);
  add_partial_rows(state, biases, dbias, s.batch, s.channels);
}

}  // namespace weft::kernels::cpu
