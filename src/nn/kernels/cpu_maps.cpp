// Biases per channel, permuted dimensions, and the pixels of a map that a convolution's kernel sees.
#include <algorithm>
#include <vector>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

WEFT_CPU_CLONES(void, add_to_range, (float* y, float value, std::int64_t n), (y, value, n)) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += value;
}

WEFT_CPU_CLONES(double, sum_of_range, (const float* x, std::int64_t n), (x, n)) {
  return lane_sum<double>(n, [&](std::int64_t i) WEFT_INLINE { return static_cast<double>(x[i]); });
}

// One dimension of the result of a permutation.
struct Walked {
  std::int64_t size, from, to;  // steps in x and in y
};

// The dimensions of y, outermost first, without dimensions of one element. Dimensions that are neighbours in
// both y and x become one.
std::vector<Walked> walked(const Permutation& how) {
  const Strides of_x = row_major(how.in);
  std::vector<Walked> dims;
  for (int d = 0; d < how.in.rank(); ++d) {
    const auto x_dim = static_cast<int>(how.order[d]);
    const Walked next{how.in[x_dim], of_x[x_dim], 0};
    if (next.size == 1) continue;
    if (!dims.empty() && dims.back().from == next.size * next.from)
      dims.back() = {dims.back().size * next.size, next.from, 0};
    else
      dims.push_back(next);
  }
  std::int64_t step = 1;
  for (auto d = dims.rbegin(); d != dims.rend(); ++d) d->to = step, step *= d->size;
  return dims;
}

// to[i to_step + j] = from[i + j from_step] for i in [0, rows), j in [0, columns), square by square, so that
// read and written data stays in the cache.
void transpose(const float* from, float* to, std::int64_t rows, std::int64_t columns, std::int64_t from_step,
               std::int64_t to_step) {
  constexpr std::int64_t kSquare = 16;
  for (std::int64_t i0 = 0; i0 < rows; i0 += kSquare)
    for (std::int64_t j0 = 0; j0 < columns; j0 += kSquare)
      for (std::int64_t i = i0; i < std::min(rows, i0 + kSquare); ++i)
        for (std::int64_t j = j0; j < std::min(columns, j0 + kSquare); ++j)
          to[i * to_step + j] = from[i + j * from_step];
}

// The pixel of [0, size) that stands for pixel `at`. -1 means that 0 stands for it.
std::int64_t padded_pixel(std::int64_t at, std::int64_t size, Padding padding) {
  if (at >= 0 && at < size) return at;
  switch (padding) {
    case Padding::zeros: return -1;
    case Padding::reflect: return at < 0 ? -at : 2 * (size - 1) - at;
    case Padding::replicate: return at < 0 ? 0 : size - 1;
    case Padding::circular: return at < 0 ? at + size : at - size;
  }
  return -1;
}

// The pixel that element (i, r) sees, i in the kernel and r in the output: table[i * outputs + r].
std::vector<std::int64_t> pixels_seen(std::int64_t kernel, std::int64_t outputs, std::int64_t stride,
                                      std::int64_t dilation, std::int64_t before, std::int64_t size,
                                      Padding padding) {
  std::vector<std::int64_t> table(static_cast<std::size_t>(kernel * outputs));
  for (std::int64_t i = 0; i < kernel; ++i)
    for (std::int64_t r = 0; r < outputs; ++r)
      table[static_cast<std::size_t>(i * outputs + r)] =
          padded_pixel(r * stride + i * dilation - before, size, padding);
  return table;
}

// Calls row(c, columns of one output row, row of x or -1, pixels of that row or -1 each) for every output
// row, channel by channel. Threads share the channels.
template <class Row>
void each_output_row(KernelContext::State& state, const UnfoldShape& s, Row&& row) {
  const auto rows = pixels_seen(s.kernel_height, s.out_height, s.stride_height, s.dilation_height,
                                s.padding_height, s.height, s.padding);
  const auto columns = pixels_seen(s.kernel_width, s.out_width, s.stride_width, s.dilation_width,
                                   s.padding_width, s.width, s.padding);
  parallel_for(state, s.channels, [&](std::int64_t c, int) {
    for (std::int64_t i = 0; i < s.kernel_height; ++i)
      for (std::int64_t j = 0; j < s.kernel_width; ++j)
        for (std::int64_t r = 0; r < s.out_height; ++r)
          row(c, (((c * s.kernel_height + i) * s.kernel_width + j) * s.out_height + r) * s.out_width,
              rows[static_cast<std::size_t>(i * s.out_height + r)], columns.data() + j * s.out_width);
  });
}

}  // namespace

void add_channel_bias(KernelContext& ctx, const float* bias, float* y, MapShape s) {
  parallel_for(ctx.state(), s.batch * s.channels, [&](std::int64_t map, int) {
    add_to_range(y + map * s.pixels, bias[map % s.channels], s.pixels);
  });
}

void channel_bias_backward(KernelContext& ctx, const float* dy, float* dbias, MapShape s) {
  parallel_for(ctx.state(), s.channels, [&](std::int64_t c, int) {
    double sum = 0;
    for (std::int64_t b = 0; b < s.batch; ++b)
      sum += sum_of_range(dy + (b * s.channels + c) * s.pixels, s.pixels);
    dbias[c] += static_cast<float>(sum);
  });
}

// If the last dimension of y is the last one of x, runs of it are copied. Otherwise the planes of the two
// dimensions are transposed one after the other.
void permute(KernelContext& ctx, const float* x, float* y, const Permutation& how) {
  const std::int64_t count = how.in.count();
  if (count == 0) return;
  std::vector<Walked> dims = walked(how);
  if (dims.empty()) dims.push_back({1, 1, 1});
  const Walked last = dims.back();
  const auto found = std::find_if(dims.begin(), dims.end(), [](const Walked& d) { return d.from == 1; });
  const Walked first = *found;
  const bool runs = last.from == 1;
  std::vector<Walked> outer;
  for (auto d = dims.begin(); d + 1 != dims.end(); ++d)
    if (runs || d != found) outer.push_back(*d);
  const std::int64_t plane = runs ? last.size : last.size * first.size;
  parallel_blocks(ctx.state(), count / plane, std::max<std::int64_t>(1, kElementBlock / plane),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t index = begin; index < end; ++index) {
                      std::int64_t rest = index, from = 0, to = 0;
                      for (auto d = outer.rbegin(); d != outer.rend(); ++d) {
                        from += rest % d->size * d->from;
                        to += rest % d->size * d->to;
                        rest /= d->size;
                      }
                      if (runs)
                        std::copy_n(x + from, last.size, y + to);
                      else
                        transpose(x + from, y + to, first.size, last.size, last.from, first.to);
                    }
                  });
}

void unfold(KernelContext& ctx, const float* x, float* columns, const UnfoldShape& s) {
  each_output_row(ctx.state(), s,
                  [&](std::int64_t c, std::int64_t to, std::int64_t row, const std::int64_t* seen) {
                    float* const out = columns + to;
                    if (row < 0) {
                      std::fill_n(out, s.out_width, 0.0f);
                      return;
                    }
                    const float* const in = x + (c * s.height + row) * s.width;
                    for (std::int64_t t = 0; t < s.out_width; ++t) out[t] = seen[t] < 0 ? 0.0f : in[seen[t]];
                  });
}

void fold(KernelContext& ctx, const float* dcolumns, float* dx, const UnfoldShape& s) {
  fill(ctx, dx, 0.0f, s.channels * s.height * s.width);
  each_output_row(ctx.state(), s,
                  [&](std::int64_t c, std::int64_t from, std::int64_t row, const std::int64_t* seen) {
                    if (row < 0) return;
                    const float* const in = dcolumns + from;
                    float* const out = dx + (c * s.height + row) * s.width;
                    for (std::int64_t t = 0; t < s.out_width; ++t)
                      if (seen[t] >= 0) out[seen[t]] += in[t];
                  });
}

}  // namespace weft::kernels::cpu
