// Linear resampling of maps by tables of taps, and pooling by the largest pixel.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

void resample_row(const float* x, float* y, const Taps& t) {
  for (std::int64_t s = 0; s < t.outputs(); ++s) {
    float sum = 0.0f;
    for (std::int64_t e = t.begin[static_cast<std::size_t>(s)]; e < t.begin[static_cast<std::size_t>(s) + 1];
         ++e)
      sum += t.weight[static_cast<std::size_t>(e)] * x[t.index[static_cast<std::size_t>(e)]];
    y[s] = sum;
  }
}

WEFT_CPU_CLONES(void, add_weighted, (float* y, const float* x, float weight, std::int64_t n),
                (y, x, weight, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] += weight * x[i];
}

// Calls see(output, row of x or -1, kernel row) for each output row and kernel row of one dimension, in this
// order.
struct Seen {
  std::int64_t kernel, stride, dilation, padding, size, outputs;
  std::int64_t at(std::int64_t output, std::int64_t i) const {
    const std::int64_t pixel = output * stride + i * dilation - padding;
    return pixel >= 0 && pixel < size ? pixel : -1;
  }
};

Seen seen_rows(const UnfoldShape& s) {
  return {s.kernel_height, s.stride_height, s.dilation_height, s.padding_height, s.height, s.out_height};
}
Seen seen_columns(const UnfoldShape& s) {
  return {s.kernel_width, s.stride_width, s.dilation_width, s.padding_width, s.width, s.out_width};
}

}  // namespace

// First every row that any output row needs is resampled along its columns. Then these rows are added up.
void resample(KernelContext& ctx, const float* x, float* y, const ResampleShape& s) {
  const Taps &rows = *s.rows, &columns = *s.columns;
  const std::int64_t height = rows.outputs(), width = columns.outputs();
  std::vector<char> used(static_cast<std::size_t>(s.height), 0);
  for (const std::int64_t i : rows.index) used[static_cast<std::size_t>(i)] = 1;
  parallel_for(ctx.state(), s.maps, [&](std::int64_t map, int) {
    std::vector<float> wide(static_cast<std::size_t>(s.height * width));
    for (std::int64_t i = 0; i < s.height; ++i)
      if (used[static_cast<std::size_t>(i)] != 0)
        resample_row(x + (map * s.height + i) * s.width, wide.data() + i * width, columns);
    for (std::int64_t r = 0; r < height; ++r) {
      float* const out = y + (map * height + r) * width;
      std::fill_n(out, width, 0.0f);
      for (std::int64_t e = rows.begin[static_cast<std::size_t>(r)];
           e < rows.begin[static_cast<std::size_t>(r) + 1]; ++e)
        add_weighted(out, wide.data() + rows.index[static_cast<std::size_t>(e)] * width,
                     rows.weight[static_cast<std::size_t>(e)], width);
    }
  });
}

void max_pool_forward(KernelContext& ctx, const float* x, float* y, std::int32_t* place,
                      const UnfoldShape& s) {
  const Seen rows = seen_rows(s), columns = seen_columns(s);
  parallel_for(ctx.state(), s.channels, [&](std::int64_t c, int) {
    const float* const map = x + c * s.height * s.width;
    for (std::int64_t r = 0; r < s.out_height; ++r)
      for (std::int64_t t = 0; t < s.out_width; ++t) {
        float largest = -std::numeric_limits<float>::infinity();
        std::int32_t at = -1;
        for (std::int64_t i = 0; i < s.kernel_height; ++i)
          for (std::int64_t j = 0; j < s.kernel_width; ++j) {
            const std::int64_t row = rows.at(r, i), column = columns.at(t, j);
            if (row < 0 || column < 0) continue;
            const float pixel = map[row * s.width + column];
            if (at >= 0 && !(pixel > largest) && !(std::isnan(pixel) && !std::isnan(largest))) continue;
            largest = pixel;
            at = static_cast<std::int32_t>(i * s.kernel_width + j);
          }
        const std::int64_t out = (c * s.out_height + r) * s.out_width + t;
        y[out] = largest;
        place[out] = at;
      }
  });
}

void max_pool_backward(KernelContext& ctx, const float* dy, const std::int32_t* place, float* dx,
                       const UnfoldShape& s) {
  const Seen rows = seen_rows(s), columns = seen_columns(s);
  parallel_for(ctx.state(), s.channels, [&](std::int64_t c, int) {
    float* const map = dx + c * s.height * s.width;
    std::fill_n(map, s.height * s.width, 0.0f);
    for (std::int64_t r = 0; r < s.out_height; ++r)
      for (std::int64_t t = 0; t < s.out_width; ++t) {
        const std::int64_t out = (c * s.out_height + r) * s.out_width + t;
        if (place[out] < 0) continue;
        const std::int64_t row = rows.at(r, place[out] / s.kernel_width),
                           column = columns.at(t, place[out] % s.kernel_width);
        if (row >= 0 && column >= 0) map[row * s.width + column] += dy[out];
      }
  });
}

}  // namespace weft::kernels::cpu
