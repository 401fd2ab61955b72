// Layer norm over the last dimension, and over the channels of each pixel of a map, forward and backward.
//
// With n = (x - mean) inv_std and g = dy weight, both means over the normalised elements, dx = inv_std (g -
//   mean(g) - n mean(g n)), dweight = sum of dy n, dbias = sum of dy.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

WEFT_CPU_CLONES_OF_T(void, forward_rows,
                     (const T* x, const float* weight, const float* bias, T* y, float* mean, float* inv_std,
                      std::int64_t rows, std::int64_t dim, float eps),
                     (x, weight, bias, y, mean, inv_std, rows, dim, eps)) {
  const float count = static_cast<float>(std::max<std::int64_t>(dim, 1));  // an empty sum has the mean 0
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * dim;
    T* out = y + row * dim;
    const float middle =
        lane_sum<float>(dim, [&](std::int64_t i) WEFT_INLINE { return wide(in[i]); }) / count;
    const float squares = lane_sum<float>(dim, [&](std::int64_t i) WEFT_INLINE {
      const float off = wide(in[i]) - middle;
      return off * off;
    });
    const float inv = 1.0f / std::sqrt(squares / count + eps);
    mean[row] = middle;
    inv_std[row] = inv;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) out[i] = T((wide(in[i]) - middle) * inv * weight[i] + bias[i]);
  }
}

// dweight, dbias: (dim), overwritten with the sums over these rows
WEFT_CPU_CLONES_OF_T(void, backward_rows,
                     (const T* dy, const T* x, const float* weight, const float* mean, const float* inv_std,
                      T* dx, float* dweight, float* dbias, std::int64_t rows, std::int64_t dim),
                     (dy, x, weight, mean, inv_std, dx, dweight, dbias, rows, dim)) {
  std::memset(dweight, 0, sizeof(float) * static_cast<std::size_t>(dim));
  std::memset(dbias, 0, sizeof(float) * static_cast<std::size_t>(dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* dout = dy + row * dim;
    const T* in = x + row * dim;
    T* din = dx + row * dim;
    const float middle = mean[row], inv = inv_std[row];
    const float sum =
        lane_sum<float>(dim, [&](std::int64_t i) WEFT_INLINE { return wide(dout[i]) * weight[i]; });
    const float dot = lane_sum<float>(dim, [&](std::int64_t i) WEFT_INLINE {
      return wide(dout[i]) * weight[i] * ((wide(in[i]) - middle) * inv);
    });
    const float mean_sum = sum / static_cast<float>(dim), mean_dot = dot / static_cast<float>(dim);
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) {
      const float d = wide(dout[i]), normal = (wide(in[i]) - middle) * inv;
      dweight[i] += d * normal;
      dbias[i] += d;
      din[i] = T(inv * (d * weight[i] - mean_sum - normal * mean_dot));
    }
  }
}

// The number of pixels in one task: their sums over channels stay in registers and the first-level cache.
constexpr std::int64_t kTile = 128;

// x, y: (channels, tile) with rows `stride` apart; mean, inv_std: (tile)
WEFT_CPU_CLONES(void, forward_tile,
                (const float* x, const float* weight, const float* bias, float* y, float* mean,
                 float* inv_std, std::int64_t channels, std::int64_t tile, std::int64_t stride, float eps),
                (x, weight, bias, y, mean, inv_std, channels, tile, stride, eps)) {
  double sum[kTile] = {}, squares[kTile] = {};
  const double count = static_cast<double>(std::max<std::int64_t>(channels, 1));
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* in = x + c * stride;
#pragma GCC ivdep
    for (std::int64_t p = 0; p < tile; ++p) sum[p] += static_cast<double>(in[p]);
  }
  for (std::int64_t p = 0; p < tile; ++p) mean[p] = static_cast<float>(sum[p] / count);
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* in = x + c * stride;
#pragma GCC ivdep
    for (std::int64_t p = 0; p < tile; ++p) {
      const float off = in[p] - mean[p];
      squares[p] += static_cast<double>(off) * static_cast<double>(off);
    }
  }
  for (std::int64_t p = 0; p < tile; ++p)
    inv_std[p] = 1.0f / std::sqrt(static_cast<float>(squares[p] / count) + eps);
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* in = x + c * stride;
    float* out = y + c * stride;
    const float w = weight[c], b = bias[c];
#pragma GCC ivdep
    for (std::int64_t p = 0; p < tile; ++p) out[p] = (in[p] - mean[p]) * inv_std[p] * w + b;
  }
}

// dweight, dbias: (channels), overwritten with the sums over this tile
WEFT_CPU_CLONES(void, backward_tile,
                (const float* dy, const float* x, const float* weight, const float* mean,
                 const float* inv_std, float* dx, float* dweight, float* dbias, std::int64_t channels,
                 std::int64_t tile, std::int64_t stride),
                (dy, x, weight, mean, inv_std, dx, dweight, dbias, channels, tile, stride)) {
  double sum[kTile] = {}, dot[kTile] = {};
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* dout = dy + c * stride;
    const float* in = x + c * stride;
    const float w = weight[c];
    const auto normal = [&](std::int64_t p) WEFT_INLINE { return (in[p] - mean[p]) * inv_std[p]; };
#pragma GCC ivdep
    for (std::int64_t p = 0; p < tile; ++p) {
      const float g = dout[p] * w;
      sum[p] += static_cast<double>(g);
      dot[p] += static_cast<double>(g * normal(p));
    }
    dweight[c] = lane_sum<float>(tile, [&](std::int64_t p) WEFT_INLINE { return dout[p] * normal(p); });
    dbias[c] = lane_sum<float>(tile, [&](std::int64_t p) WEFT_INLINE { return dout[p]; });
  }
  float mean_sum[kTile], mean_dot[kTile];
  for (std::int64_t p = 0; p < tile; ++p) {
    mean_sum[p] = static_cast<float>(sum[p] / static_cast<double>(channels));
    mean_dot[p] = static_cast<float>(dot[p] / static_cast<double>(channels));
  }
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* dout = dy + c * stride;
    const float* in = x + c * stride;
    float* din = dx + c * stride;
    const float w = weight[c];
#pragma GCC ivdep
    for (std::int64_t p = 0; p < tile; ++p) {
      const float normal = (in[p] - mean[p]) * inv_std[p];
      din[p] = inv_std[p] * (dout[p] * w - mean_sum[p] - normal * mean_dot[p]);
    }
  }
}

// Calls body(task, first, pixel, tile) for tiles of pixels: `first` is the index of the tile's first element
// in the maps, `pixel` its index in (batch, pixels).
template <class Body>
void each_tile(KernelContext::State& state, const MapShape& s, Body&& body) {
  const std::int64_t tiles = blocks_of(s.pixels, kTile);
  parallel_for(state, s.batch * tiles, [&](std::int64_t task, int) {
    const std::int64_t b = task / tiles, begin = task % tiles * kTile;
    body(task, b * s.channels * s.pixels + begin, b * s.pixels + begin, std::min(kTile, s.pixels - begin));
  });
}

}  // namespace

template <class T>
void layer_norm_forward(KernelContext& ctx, const T* x, const float* weight, const float* bias, T* y,
                        float* mean, float* inv_std, std::int64_t rows, std::int64_t dim, float eps) {
  parallel_blocks(ctx.state(), rows, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    forward_rows(x + begin * dim, weight, bias, y + begin * dim, mean + begin, inv_std + begin, end - begin,
                 dim, eps);
  });
}

template <class T>
void layer_norm_backward(KernelContext& ctx, const T* dy, const T* x, const float* weight, const float* mean,
                         const float* inv_std, T* dx, float* dweight, float* dbias, std::int64_t rows,
                         std::int64_t dim) {
  KernelContext::State& state = ctx.state();
  const std::int64_t blocks = blocks_of(rows, kRowBlock);
  float* const weights = state.scratch(2 * blocks * dim);  // (blocks, dim), and the same of biases
  float* const biases = weights + blocks * dim;
  parallel_blocks(state, rows, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t block = begin / kRowBlock;
    backward_rows(dy + begin * dim, x + begin * dim, weight, mean + begin, inv_std + begin, dx + begin * dim,
                  weights + block * dim, biases + block * dim, end - begin, dim);
  });
  add_partial_rows(state, weights, dweight, blocks, dim);
  add_partial_rows(state, biases, dbias, blocks, dim);
}

WEFT_KERNEL_OF_BOTH(layer_norm_forward);
WEFT_KERNEL_OF_BOTH(layer_norm_backward);

void channel_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                          float* y, float* mean, float* inv_std, MapShape s, float eps) {
  each_tile(ctx.state(), s, [&](std::int64_t, std::int64_t first, std::int64_t pixel, std::int64_t tile) {
    forward_tile(x + first, weight, bias, y + first, mean + pixel, inv_std + pixel, s.channels, tile,
                 s.pixels, eps);
  });
}

void channel_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                           const float* mean, const float* inv_std, float* dx, float* dweight, float* dbias,
                           MapShape s) {
  KernelContext::State& state = ctx.state();
  const std::int64_t tiles = s.batch * blocks_of(s.pixels, kTile);
  float* const weights = state.scratch(2 * tiles * s.channels);  // (tiles, channels), and the same of biases
  float* const biases = weights + tiles * s.channels;
  each_tile(state, s, [&](std::int64_t task, std::int64_t first, std::int64_t pixel, std::int64_t tile) {
    backward_tile(dy + first, x + first, weight, mean + pixel, inv_std + pixel, dx + first,
                  weights + task * s.channels, biases + task * s.channels, s.channels, tile, s.pixels);
  });
  add_partial_rows(state, weights, dweight, tiles, s.channels);
  add_partial_rows(state, biases, dbias, tiles, s.channels);
}

}  // namespace weft::kernels::cpu
