// Norms of long rows with given statistics: layer norm over maps, of which a rank may have a part. Threads
// share blocks of columns, since there may be only one row.
#include <algorithm>
#include <vector>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kColumns = 1024;

WEFT_CPU_CLONES(void, forward_range,
                (const float* x, const float* weight, const float* bias, float mean, float inv, float* y,
                 std::int64_t n),
                (x, weight, bias, mean, inv, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * inv * weight[i] + bias[i];
}

// The sums over a range of g = dy weight and of g x^.
WEFT_CPU_CLONES(double, sum_of, (const float* dy, const float* weight, std::int64_t n), (dy, weight, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE {
    return static_cast<double>(dy[i]) * static_cast<double>(weight[i]);
  });
}
WEFT_CPU_CLONES(double, dot_of,
                (const float* dy, const float* weight, const float* x, float mean, float inv, std::int64_t n),
                (dy, weight, x, mean, inv, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE {
    return static_cast<double>(dy[i]) * static_cast<double>(weight[i]) *
           static_cast<double>((x[i] - mean) * inv);
  });
}

WEFT_CPU_CLONES(void, add_gradients,
                (const float* dy, const float* x, float mean, float inv, float* dweight, float* dbias,
                 std::int64_t n),
                (dy, x, mean, inv, dweight, dbias, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    dweight[i] += dy[i] * ((x[i] - mean) * inv);
    dbias[i] += dy[i];
  }
}

WEFT_CPU_CLONES(void, backward_range,
                (const float* dy, const float* x, const float* weight, float mean, float inv, float mean_g,
                 float mean_gx, float* dx, std::int64_t n),
                (dy, x, weight, mean, inv, mean_g, mean_gx, dx, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i)
    dx[i] = inv * (dy[i] * weight[i] - mean_g - (x[i] - mean) * inv * mean_gx);
}

// Calls run(block, row, column, columns) for all rows of each block of columns.
template <class Run>
void each_range(KernelContext& ctx, std::int64_t rows, std::int64_t dim, Run&& run) {
  parallel_blocks(ctx.state(), dim, kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = 0; row < rows; ++row) run(begin / kColumns, row, begin, end - begin);
  });
}

}  // namespace

void row_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                      const float* mean, const float* inv_std, float* y, std::int64_t rows,
                      std::int64_t dim) {
  each_range(ctx, rows, dim, [&](std::int64_t, std::int64_t row, std::int64_t column, std::int64_t n) {
    const std::int64_t at = row * dim + column;
    forward_range(x + at, weight + column, bias + column, mean[row], inv_std[row], y + at, n);
  });
}

void row_norm_backward_sums(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                            const float* mean, const float* inv_std, double* sum_g, double* sum_gx,
                            float* dweight, float* dbias, std::int64_t rows, std::int64_t dim) {
  const std::int64_t blocks = blocks_of(dim, kColumns);
  std::vector<double> partial(static_cast<std::size_t>(2 * rows * blocks));  // (2, rows, blocks)
  each_range(ctx, rows, dim, [&](std::int64_t block, std::int64_t row, std::int64_t column, std::int64_t n) {
    const std::int64_t at = row * dim + column;
    partial[static_cast<std::size_t>(row * blocks + block)] = sum_of(dy + at, weight + column, n);
    partial[static_cast<std::size_t>((rows + row) * blocks + block)] =
        dot_of(dy + at, weight + column, x + at, mean[row], inv_std[row], n);
    add_gradients(dy + at, x + at, mean[row], inv_std[row], dweight + column, dbias + column, n);
  });
  for (std::int64_t row = 0; row < rows; ++row) {
    sum_g[row] = sum_gx[row] = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      sum_g[row] += partial[static_cast<std::size_t>(row * blocks + block)];
      sum_gx[row] += partial[static_cast<std::size_t>((rows + row) * blocks + block)];
    }
  }
}

void row_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                       const float* mean, const float* inv_std, const float* mean_g, const float* mean_gx,
                       float* dx, std::int64_t rows, std::int64_t dim) {
  each_range(ctx, rows, dim, [&](std::int64_t, std::int64_t row, std::int64_t column, std::int64_t n) {
    const std::int64_t at = row * dim + column;
    backward_range(dy + at, x + at, weight + column, mean[row], inv_std[row], mean_g[row], mean_gx[row],
                   dx + at, n);
  });
}

}  // namespace weft::kernels::cpu
