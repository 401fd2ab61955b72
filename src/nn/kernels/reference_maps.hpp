// The kernels of maps (batch, channels, height, width), and attention over all keys, as plain loops; see
// reference.hpp.
#pragma once

#include "nn/kernels/reference.hpp"

namespace weft::kernels::reference {

/// layer_norm_forward() of each pixel. x, y: (batch, channels, pixels), weight, bias: (channels), mean,
/// inv_std: (batch, pixels).
template <class T>
void channel_norm_forward(const T* x, const T* weight, const T* bias, T* y, T* mean, T* inv_std, MapShape s,
                          T eps) {
  std::vector<T> in(static_cast<std::size_t>(s.channels)), out(in.size());
  for (std::int64_t row = 0; row < s.batch * s.pixels; ++row) {
    const std::int64_t first = row / s.pixels * s.channels * s.pixels + row % s.pixels;
    for (std::int64_t c = 0; c < s.channels; ++c) in[static_cast<std::size_t>(c)] = x[first + c * s.pixels];
    layer_norm_forward(in.data(), weight, bias, out.data(), mean + row, inv_std + row, 1, s.channels, eps);
    for (std::int64_t c = 0; c < s.channels; ++c) y[first + c * s.pixels] = out[static_cast<std::size_t>(c)];
  }
}

template <class T>
void channel_norm_backward(const T* dy, const T* x, const T* weight, const T* mean, const T* inv_std, T* dx,
                           T* dweight, T* dbias, MapShape s) {
  const auto n = static_cast<std::size_t>(s.batch * s.channels * s.pixels);
  std::vector<T> x_rows(n), dy_rows(n), dx_rows(n);  // (batch, pixels, channels)
  const auto place = [&](std::size_t i) {            // of element i of the maps among the rows
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t b = at / (s.channels * s.pixels), c = at / s.pixels % s.channels, p = at % s.pixels;
    return static_cast<std::size_t>((b * s.pixels + p) * s.channels + c);
  };
  for (std::size_t i = 0; i < n; ++i) x_rows[place(i)] = x[i], dy_rows[place(i)] = dy[i];
  layer_norm_backward(dy_rows.data(), x_rows.data(), weight, mean, inv_std, dx_rows.data(), dweight, dbias,
                      s.batch * s.pixels, s.channels);
  for (std::size_t i = 0; i < n; ++i) dx[i] = dx_rows[place(i)];
}

/// layer_norm_forward() of each group with its gain and bias per channel. x, y: (batch, channels, pixels),
/// weight, bias: (channels), mean, inv_std: (batch, groups).
template <class T>
void group_norm_forward(const T* x, const T* weight, const T* bias, T* y, T* mean, T* inv_std, MapShape s,
                        std::int64_t groups, T eps) {
  const std::int64_t size = s.channels / groups * s.pixels;  // of a group of one sample
  const std::vector<T> ones(static_cast<std::size_t>(size), T{1}), zeros(ones.size(), T{0});
  layer_norm_forward(x, ones.data(), zeros.data(), y, mean, inv_std, s.batch * groups, size, eps);
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) {
    const std::int64_t c = i / s.pixels % s.channels;
    y[i] = static_cast<T>(static_cast<double>(y[i]) * static_cast<double>(weight[c]) +
                          static_cast<double>(bias[c]));
  }
}

template <class T>
void group_norm_backward(const T* dy, const T* x, const T* weight, const T* mean, const T* inv_std, T* dx,
                         T* dweight, T* dbias, MapShape s, std::int64_t groups) {
  const std::int64_t size = s.channels / groups * s.pixels;
  const std::vector<T> ones(static_cast<std::size_t>(size), T{1});
  std::vector<T> scaled(static_cast<std::size_t>(s.batch * s.channels * s.pixels)), forgotten(ones.size()),
      more(ones.size());
  std::vector<double> weights(dweight, dweight + s.channels), biases(dbias, dbias + s.channels);
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) {
    const std::int64_t c = i / s.pixels % s.channels, group = i / size;
    const double d = static_cast<double>(dy[i]);
    scaled[static_cast<std::size_t>(i)] = static_cast<T>(d * static_cast<double>(weight[c]));
    weights[static_cast<std::size_t>(c)] += d *
                                            (static_cast<double>(x[i]) - static_cast<double>(mean[group])) *
                                            static_cast<double>(inv_std[group]);
    biases[static_cast<std::size_t>(c)] += d;
  }
  layer_norm_backward(scaled.data(), x, ones.data(), mean, inv_std, dx, forgotten.data(), more.data(),
                      s.batch * groups, size);
  for (std::int64_t c = 0; c < s.channels; ++c) {
    dweight[c] = static_cast<T>(weights[static_cast<std::size_t>(c)]);
    dbias[c] = static_cast<T>(biases[static_cast<std::size_t>(c)]);
  }
}

/// sum, squares: (channels), of x: (batch, channels, pixels).
template <class T>
void channel_moments(const T* x, double* sum, double* squares, MapShape s) {
  for (std::int64_t c = 0; c < s.channels; ++c) sum[c] = squares[c] = 0;
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) {
    const auto value = static_cast<double>(x[i]);
    sum[i / s.pixels % s.channels] += value;
    squares[i / s.pixels % s.channels] += value * value;
  }
}

/// x, y: (batch, channels, pixels), the others: (channels).
template <class T>
void batch_norm_forward(const T* x, const T* weight, const T* bias, const T* mean, const T* inv_std, T* y,
                        MapShape s) {
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) {
    const std::int64_t c = i / s.pixels % s.channels;
    y[i] = static_cast<T>((static_cast<double>(x[i]) - static_cast<double>(mean[c])) *
                              static_cast<double>(inv_std[c]) * static_cast<double>(weight[c]) +
                          static_cast<double>(bias[c]));
  }
}

template <class T>
void batch_norm_backward_sums(const T* dy, const T* x, const T* mean, const T* inv_std, double* sum_dy,
                              double* sum_dyx, MapShape s) {
  for (std::int64_t c = 0; c < s.channels; ++c) sum_dy[c] = sum_dyx[c] = 0;
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) {
    const std::int64_t c = i / s.pixels % s.channels;
    const auto d = static_cast<double>(dy[i]);
    sum_dy[c] += d;
    sum_dyx[c] +=
        d * (static_cast<double>(x[i]) - static_cast<double>(mean[c])) * static_cast<double>(inv_std[c]);
  }
}

template <class T>
void batch_norm_backward(const T* dy, const T* x, const T* weight, const T* mean, const T* inv_std,
                         const T* mean_dy, const T* mean_dyx, T* dx, MapShape s) {
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) {
    const std::int64_t c = i / s.pixels % s.channels;
    const double inv = static_cast<double>(inv_std[c]),
                 normal = (static_cast<double>(x[i]) - static_cast<double>(mean[c])) * inv;
    dx[i] = static_cast<T>(static_cast<double>(weight[c]) * inv *
                           (static_cast<double>(dy[i]) - static_cast<double>(mean_dy[c]) -
                            normal * static_cast<double>(mean_dyx[c])));
  }
}

/// x, y: (rows, dim), weight, bias: (dim), mean, inv_std: (rows).
template <class T>
void row_norm_forward(const T* x, const T* weight, const T* bias, const T* mean, const T* inv_std, T* y,
                      std::int64_t rows, std::int64_t dim) {
  for (std::int64_t i = 0; i < rows * dim; ++i)
    y[i] = static_cast<T>((static_cast<double>(x[i]) - static_cast<double>(mean[i / dim])) *
                              static_cast<double>(inv_std[i / dim]) * static_cast<double>(weight[i % dim]) +
                          static_cast<double>(bias[i % dim]));
}

/// sum_g, sum_gx: (rows), overwritten; dweight, dbias: (dim), +=.
template <class T>
void row_norm_backward_sums(const T* dy, const T* x, const T* weight, const T* mean, const T* inv_std,
                            double* sum_g, double* sum_gx, T* dweight, T* dbias, std::int64_t rows,
                            std::int64_t dim) {
  for (std::int64_t r = 0; r < rows; ++r) {
    sum_g[r] = sum_gx[r] = 0;
    for (std::int64_t i = 0; i < dim; ++i) {
      const auto d = static_cast<double>(dy[r * dim + i]), w = static_cast<double>(weight[i]);
      const double normal = (static_cast<double>(x[r * dim + i]) - static_cast<double>(mean[r])) *
                            static_cast<double>(inv_std[r]);
      sum_g[r] += d * w;
      sum_gx[r] += d * w * normal;
      dweight[i] = static_cast<T>(static_cast<double>(dweight[i]) + d * normal);
      dbias[i] = static_cast<T>(static_cast<double>(dbias[i]) + d);
    }
  }
}

template <class T>
void row_norm_backward(const T* dy, const T* x, const T* weight, const T* mean, const T* inv_std,
                       const T* mean_g, const T* mean_gx, T* dx, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t i = 0; i < rows * dim; ++i) {
    const auto r = i / dim;
    const double inv = static_cast<double>(inv_std[r]),
                 normal = (static_cast<double>(x[i]) - static_cast<double>(mean[r])) * inv;
    dx[i] = static_cast<T>(inv * (static_cast<double>(dy[i]) * static_cast<double>(weight[i % dim]) -
                                  static_cast<double>(mean_g[r]) - normal * static_cast<double>(mean_gx[r])));
  }
}

/// y: (batch, channels, pixels), bias: (channels).
template <class T>
void add_channel_bias(const T* bias, T* y, MapShape s) {
  for (std::int64_t i = 0; i < s.batch * s.channels * s.pixels; ++i) y[i] += bias[i / s.pixels % s.channels];
}

/// dbias += the sums of dy. dy: (batch, channels, pixels), dbias: (channels).
template <class T>
void channel_bias_backward(const T* dy, T* dbias, MapShape s) {
  for (std::int64_t c = 0; c < s.channels; ++c) {
    auto sum = static_cast<double>(dbias[c]);
    for (std::int64_t b = 0; b < s.batch; ++b)
      for (std::int64_t p = 0; p < s.pixels; ++p)
        sum += static_cast<double>(dy[(b * s.channels + c) * s.pixels + p]);
    dbias[c] = static_cast<T>(sum);
  }
}

/// Dimension d of y is dimension how.order[d] of x. x: how.in.
template <class T>
void permute(const T* x, T* y, const Permutation& how) {
  const int rank = how.in.rank();
  for (std::int64_t to = 0; to < how.in.count(); ++to) {
    Dims at = how.in;  // the place in x
    std::int64_t rest = to;
    for (int d = rank - 1; d >= 0; --d) {
      const auto of_x = static_cast<int>(how.order[d]);
      at[of_x] = rest % how.in[of_x];
      rest /= how.in[of_x];
    }
    std::int64_t from = 0;
    for (int d = 0; d < rank; ++d) from = from * how.in[d] + at[d];
    y[to] = x[from];
  }
}

/// The pixel of [0, size) that stands for pixel `at`, which may lie beyond the border. -1 means that 0 stands
/// for it.
inline std::int64_t padded_pixel(std::int64_t at, std::int64_t size, Padding padding) {
  if (at >= 0 && at < size) return at;
  switch (padding) {
    case Padding::zeros: return -1;
    case Padding::reflect: return at < 0 ? -at : 2 * (size - 1) - at;
    case Padding::replicate: return at < 0 ? 0 : size - 1;
    case Padding::circular: return at < 0 ? at + size : at - size;
  }
  return -1;
}

/// Calls put(place in columns, place in x or -1) for every column.
template <class Put>
void each_column(const UnfoldShape& s, Put&& put) {
  std::int64_t to = 0;
  for (std::int64_t c = 0; c < s.channels; ++c)
    for (std::int64_t i = 0; i < s.kernel_height; ++i)
      for (std::int64_t j = 0; j < s.kernel_width; ++j)
        for (std::int64_t r = 0; r < s.out_height; ++r)
          for (std::int64_t t = 0; t < s.out_width; ++t, ++to) {
            const std::int64_t row = padded_pixel(
                r * s.stride_height + i * s.dilation_height - s.padding_height, s.height, s.padding);
            const std::int64_t column =
                padded_pixel(t * s.stride_width + j * s.dilation_width - s.padding_width, s.width, s.padding);
            put(to, row < 0 || column < 0 ? -1 : (c * s.height + row) * s.width + column);
          }
}

/// x: (channels, height, width), columns: (channels, kernel_height, kernel_width, out_height, out_width).
template <class T>
void unfold(const T* x, T* columns, const UnfoldShape& s) {
  each_column(s, [&](std::int64_t to, std::int64_t from) { columns[to] = from < 0 ? T{0} : x[from]; });
}

template <class T>
void fold(const T* dcolumns, T* dx, const UnfoldShape& s) {
  std::vector<double> sums(static_cast<std::size_t>(s.channels * s.height * s.width));
  each_column(s, [&](std::int64_t from, std::int64_t to) {
    if (to >= 0) sums[static_cast<std::size_t>(to)] += static_cast<double>(dcolumns[from]);
  });
  for (std::size_t i = 0; i < sums.size(); ++i) dx[i] = static_cast<T>(sums[i]);
}

/// Calls score(b, head, query, key, at_q, at_k): at_q and at_k are the places at which the query's and the
/// key's head begin.
template <class Score>
void each_score(const FullAttentionShape& s, Score&& score) {
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t i = 0; i < s.queries; ++i)
        for (std::int64_t j = 0; j < s.keys; ++j)
          score(b, h, i, j, ((b * s.queries + i) * s.heads + h) * s.head_dim,
                ((b * s.keys + j) * s.kv_heads + h / (s.heads / s.kv_heads)) * s.head_dim);
}

/// The score of query i and key j of sample b: their product, scaled, and the bias.
template <class T>
double full_score(const T* q, const T* k, const ScoreBiasOf<T>& bias, std::int64_t b, std::int64_t i,
                  std::int64_t j, const FullAttentionShape& s) {
  double dot = 0.0;
  for (std::int64_t d = 0; d < s.head_dim; ++d) dot += static_cast<double>(q[d]) * static_cast<double>(k[d]);
  const double score = dot / std::sqrt(static_cast<double>(s.head_dim));
  if (bias.data == nullptr) return score;
  const std::int64_t rows = bias.of_each_query ? s.queries : 1;
  const std::int64_t row = (bias.of_each_sample ? b * rows : 0) + (bias.of_each_query ? i : 0);
  return score + static_cast<double>(bias.data[row * s.keys + j]);
}

/// q, out: (batch, queries, heads, head_dim); k, v: (batch, keys, kv_heads, head_dim); bias: (queries, keys),
/// in the form that it declares, or null; softmax: (batch, heads, queries, kSoftmaxTerms). The output of a
/// query that sees no key is 0.
template <class T>
void full_attention_forward(const T* q, const T* k, const T* v,
                            const std::type_identity_t<ScoreBiasOf<T>>& bias, T* out, T* softmax,
                            FullAttentionShape s) {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  const auto rows = static_cast<std::size_t>(s.batch * s.heads * s.queries);
  std::vector<double> largest(rows, kMinusInfinity), sum(rows),
      values(rows * static_cast<std::size_t>(s.head_dim));
  const auto row = [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    return static_cast<std::size_t>((b * s.heads + h) * s.queries + i);
  };
  each_score(s, [&](auto b, auto h, auto i, auto j, auto at_q, auto at_k) {
    const double score = full_score(q + at_q, k + at_k, bias, b, i, j, s);
    double& most = largest[row(b, h, i)];  // as it is kept
    most = std::max(most, static_cast<double>(static_cast<T>(score)));
  });
  each_score(s, [&](auto b, auto h, auto i, auto j, auto at_q, auto at_k) {
    const double most = largest[row(b, h, i)];
    if (most == kMinusInfinity) return;
    const double weight = std::exp(full_score(q + at_q, k + at_k, bias, b, i, j, s) - most);
    sum[row(b, h, i)] += weight;
    for (std::int64_t d = 0; d < s.head_dim; ++d)
      values[static_cast<std::size_t>(at_q + d)] += weight * static_cast<double>(v[at_k + d]);
  });
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t i = 0; i < s.queries; ++i) {
        const std::size_t r = row(b, h, i);
        softmax[r * kSoftmaxTerms] = static_cast<T>(largest[r]);
        softmax[r * kSoftmaxTerms + 1] = static_cast<T>(sum[r]);
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          const std::int64_t at = ((b * s.queries + i) * s.heads + h) * s.head_dim + d;
          out[at] = sum[r] == 0 ? T{0} : static_cast<T>(values[static_cast<std::size_t>(at)] / sum[r]);
        }
      }
}

/// dq has the shape of q, dk and dv have the shape of k. dbias: (queries, keys), the sum over samples and
/// heads, or null.
template <class T>
void full_attention_backward(const T* dout, const T* q, const T* k, const T* v,
                             const std::type_identity_t<ScoreBiasOf<T>>& bias, const T* out, const T* softmax,
                             T* dq, T* dk, T* dv, T* dbias, FullAttentionShape s) {
  const auto q_size = static_cast<std::size_t>(s.batch * s.queries * s.heads * s.head_dim),
             k_size = static_cast<std::size_t>(s.batch * s.keys * s.kv_heads * s.head_dim);
  std::vector<double> dq_sum(q_size), dk_sum(k_size), dv_sum(k_size),
      dbias_sum(static_cast<std::size_t>(s.queries * s.keys));
  const double scaling = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
  each_score(s, [&](auto b, auto h, auto i, auto j, auto at_q, auto at_k) {
    const T* kept = softmax + ((b * s.heads + h) * s.queries + i) * kSoftmaxTerms;
    if (kept[1] == 0) return;  // the query sees no key
    const double probability =
        std::exp(full_score(q + at_q, k + at_k, bias, b, i, j, s) - static_cast<double>(kept[0])) /
        static_cast<double>(kept[1]);
    double delta = 0.0, dprobability = 0.0;
    for (std::int64_t d = 0; d < s.head_dim; ++d) {
      delta += static_cast<double>(dout[at_q + d]) * static_cast<double>(out[at_q + d]);
      dprobability += static_cast<double>(dout[at_q + d]) * static_cast<double>(v[at_k + d]);
    }
    const double dscore = probability * (dprobability - delta);
    dbias_sum[static_cast<std::size_t>(i * s.keys + j)] += dscore;
    for (std::int64_t d = 0; d < s.head_dim; ++d) {
      const auto of_q = static_cast<std::size_t>(at_q + d), of_k = static_cast<std::size_t>(at_k + d);
      dq_sum[of_q] += dscore * scaling * static_cast<double>(k[at_k + d]);
      dk_sum[of_k] += dscore * scaling * static_cast<double>(q[at_q + d]);
      dv_sum[of_k] += probability * static_cast<double>(dout[at_q + d]);
    }
  });
  for (std::size_t i = 0; i < q_size; ++i) dq[i] = static_cast<T>(dq_sum[i]);
  for (std::size_t i = 0; i < k_size; ++i)
    dk[i] = static_cast<T>(dk_sum[i]), dv[i] = static_cast<T>(dv_sum[i]);
  for (std::size_t i = 0; dbias != nullptr && i < dbias_sum.size(); ++i)
    dbias[i] = static_cast<T>(dbias_sum[i]);
}

/// weights: (batch, heads, queries, keys). The other arguments are those of full_attention_forward().
template <class T>
void attention_weights_forward(const T* q, const T* k, const T* bias, T* weights, FullAttentionShape s) {
  const std::int64_t per_kv = s.heads / s.kv_heads;
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t i = 0; i < s.queries; ++i) {
        std::vector<double> row(static_cast<std::size_t>(s.keys));
        double sum = 0;
        for (std::int64_t j = 0; j < s.keys; ++j) {
          double score = bias == nullptr ? 0.0 : static_cast<double>(bias[i * s.keys + j]);
          for (std::int64_t d = 0; d < s.head_dim; ++d)
            score += static_cast<double>(q[((b * s.queries + i) * s.heads + h) * s.head_dim + d]) *
                     static_cast<double>(k[((b * s.keys + j) * s.kv_heads + h / per_kv) * s.head_dim + d]) /
                     std::sqrt(static_cast<double>(s.head_dim));
          sum += row[static_cast<std::size_t>(j)] = std::exp(score);
        }
        for (std::int64_t j = 0; j < s.keys; ++j)
          weights[((b * s.heads + h) * s.queries + i) * s.keys + j] =
              static_cast<T>(row[static_cast<std::size_t>(j)] / sum);
      }
}

template <class T>
void attention_apply_forward(const T* weights, const T* v, T* out, FullAttentionShape s) {
  const std::int64_t per_kv = s.heads / s.kv_heads;
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t i = 0; i < s.queries; ++i)
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          double sum = 0;
          for (std::int64_t j = 0; j < s.keys; ++j)
            sum += static_cast<double>(weights[((b * s.heads + h) * s.queries + i) * s.keys + j]) *
                   static_cast<double>(v[((b * s.keys + j) * s.kv_heads + h / per_kv) * s.head_dim + d]);
          out[((b * s.queries + i) * s.heads + h) * s.head_dim + d] = static_cast<T>(sum);
        }
}

}  // namespace weft::kernels::reference
