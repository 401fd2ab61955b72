#include "nn/kernels/composed.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "nn/kernels/checks.hpp"
#include "nn/kernels/widened.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/device_runtime.hpp"
#include "weft/nn/kernel_rows.hpp"

namespace weft::kernels {
namespace composed {
namespace {

// Memory of the device for the kernels that are queued while it exists.
template <class T>
class Temporary {
 public:
  Temporary(const KernelContext& ctx, std::int64_t elements)
      : runtime_(&ctx.compute()->runtime()),
        stream_(ctx.stream()),
        bytes_(static_cast<std::size_t>(elements) * sizeof(T)),
        data_(static_cast<T*>(runtime_->allocate(bytes_, stream_))) {}
  ~Temporary() { runtime_->release(data_, bytes_, stream_); }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  operator T*() const noexcept { return data_; }
  T* data() const noexcept { return data_; }

 private:
  DeviceRuntime* runtime_;
  Stream stream_;
  std::size_t bytes_;
  T* data_;
};

// ---- Linear layers: products and biases ----

template <class T>
void linear(KernelContext& ctx, const T* x, WeightOf<T> w, const float* bias, float* y, LinearShape s) {
  matmul(ctx, x, Stored::plain, w, Stored::transposed, y, s.tokens, s.out, s.in, false);
  if (bias != nullptr) add_bias(ctx, bias, y, s.tokens, s.out);
}
void linear_forward(KernelContext& ctx, const float* x, const float* w, const float* bias, float* y,
                    LinearShape s) {
  linear<float>(ctx, x, w, bias, y, s);
}
void linear_forward_bf16(KernelContext& ctx, const bf16* x, WeightMatrix w, const float* bias, float* y,
                         LinearShape s) {
  linear<bf16>(ctx, x, w, bias, y, s);
}
void linear_backward_input(KernelContext& ctx, const float* dy, const float* w, float* dx, LinearShape s) {
  matmul(ctx, dy, Stored::plain, w, Stored::plain, dx, s.tokens, s.in, s.out, false);
}
void linear_backward_weight(KernelContext& ctx, const float* dy, const float* x, float* dw, float* dbias,
                            LinearShape s) {
  matmul(ctx, dy, Stored::transposed, x, Stored::plain, dw, s.out, s.in, s.tokens, true);
  if (dbias != nullptr) bias_backward(ctx, dy, dbias, s.tokens, s.out);
}

// ---- Norms: their statistics come from sums in f64, as those of norms over several ranks do ----

void layer_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias, float* y,
                        float* mean, float* inv_std, std::int64_t rows, std::int64_t dim, float eps) {
  const Temporary<double> sums(ctx, rows), squares(ctx, rows);
  channel_moments(ctx, x, sums, squares, {1, rows, dim});
  batch_norm_statistics(ctx, sums, squares, static_cast<double>(dim), static_cast<double>(eps), mean, inv_std,
                        nullptr, nullptr, rows);
  row_norm_forward(ctx, x, weight, bias, mean, inv_std, y, rows, dim);
}

void layer_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                         const float* mean, const float* inv_std, float* dx, float* dweight, float* dbias,
                         std::int64_t rows, std::int64_t dim) {
  const Temporary<double> sum_g(ctx, rows), sum_gx(ctx, rows);
  const Temporary<float> mean_g(ctx, rows), mean_gx(ctx, rows);
  row_norm_backward_sums(ctx, dy, x, weight, mean, inv_std, sum_g, sum_gx, dweight, dbias, rows, dim);
  divide_f64(ctx, sum_g, static_cast<double>(dim), mean_g, rows);
  divide_f64(ctx, sum_gx, static_cast<double>(dim), mean_gx, rows);
  row_norm_backward(ctx, dy, x, weight, mean, inv_std, mean_g, mean_gx, dx, rows, dim);
}

// (batch, channels, pixels) to (batch, pixels, channels), and back.
Permutation to_rows(const MapShape& s) { return {{s.batch, s.channels, s.pixels}, {0, 2, 1}}; }
Permutation to_maps(const MapShape& s) { return {{s.batch, s.pixels, s.channels}, {0, 2, 1}}; }

void channel_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                          float* y, float* mean, float* inv_std, MapShape s, float eps) {
  const Temporary<float> rows(ctx, s.elements());
  permute(ctx, x, rows, to_rows(s));
  kernels::layer_norm_forward(ctx, rows, weight, bias, rows, mean, inv_std, s.batch * s.pixels, s.channels,
                              eps);
  permute(ctx, rows, y, to_maps(s));
}

void channel_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                           const float* mean, const float* inv_std, float* dx, float* dweight, float* dbias,
                           MapShape s) {
  const Temporary<float> x_rows(ctx, s.elements()), d_rows(ctx, s.elements());
  permute(ctx, x, x_rows, to_rows(s));
  permute(ctx, dy, d_rows, to_rows(s));
  kernels::layer_norm_backward(ctx, d_rows, x_rows, weight, mean, inv_std, d_rows, dweight, dbias,
                               s.batch * s.pixels, s.channels);
  permute(ctx, d_rows, dx, to_maps(s));
}

// The number of values of which a group of one sample has its statistics.
double of_group(const MapShape& s, std::int64_t groups) {
  return static_cast<double>(s.channels / groups * s.pixels);
}

void group_norm_forward(KernelContext& ctx, const float* x, const float* weight, const float* bias, float* y,
                        float* mean, float* inv_std, MapShape s, std::int64_t groups, float eps) {
  check_groups("group_norm_forward", s, groups);
  const std::int64_t channels = s.batch * s.channels, all = s.batch * groups, map = s.channels * s.pixels;
  const Temporary<double> sums(ctx, channels), squares(ctx, channels), group_sum(ctx, all),
      group_squares(ctx, all);
  const Temporary<float> means(ctx, channels), invs(ctx, channels);
  channel_moments(ctx, x, sums, squares, {1, channels, s.pixels});
  group_sums(ctx, sums, nullptr, group_sum, s.batch, s.channels, groups);
  group_sums(ctx, squares, nullptr, group_squares, s.batch, s.channels, groups);
  batch_norm_statistics(ctx, group_sum, group_squares, of_group(s, groups), static_cast<double>(eps), mean,
                        inv_std, nullptr, nullptr, all);
  spread_groups(ctx, mean, means, s.batch, s.channels, groups);
  spread_groups(ctx, inv_std, invs, s.batch, s.channels, groups);
  for (std::int64_t b = 0; b < s.batch; ++b)
    batch_norm_forward(ctx, x + b * map, weight, bias, means + b * s.channels, invs + b * s.channels,
                       y + b * map, {1, s.channels, s.pixels});
}

// With g = dy weight: dx = inv_std (g - mean(g) - n mean(g n)), which is batch_norm_backward of g with a
// weight of ones.
void group_norm_backward(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                         const float* mean, const float* inv_std, float* dx, float* dweight, float* dbias,
                         MapShape s, std::int64_t groups) {
  check_groups("group_norm_backward", s, groups);
  const std::int64_t channels = s.batch * s.channels, all = s.batch * groups, map = s.channels * s.pixels;
  const MapShape sample{1, s.channels, s.pixels};
  const Temporary<float> means(ctx, channels), invs(ctx, channels), ones(ctx, s.channels),
      zeros(ctx, s.channels), g(ctx, s.elements());
  const Temporary<double> sum_dy(ctx, channels), sum_dyx(ctx, channels), group_sum(ctx, all);
  const Temporary<float> group_mean(ctx, all), mean_g(ctx, channels), mean_gx(ctx, channels);
  spread_groups(ctx, mean, means, s.batch, s.channels, groups);
  spread_groups(ctx, inv_std, invs, s.batch, s.channels, groups);
  for (std::int64_t b = 0; b < s.batch; ++b)
    batch_norm_backward_sums(ctx, dy + b * map, x + b * map, means + b * s.channels, invs + b * s.channels,
                             sum_dy + b * s.channels, sum_dyx + b * s.channels, sample);
  const auto add_to = [&](const Temporary<double>& sums, float* gradient, float* of_channels) {
    sum_rows_f64(ctx, sums, ones, s.batch, s.channels);  // ones: not yet in use
    add(ctx, ones, gradient, gradient, s.channels);
    group_sums(ctx, sums, weight, group_sum, s.batch, s.channels, groups);
    divide_f64(ctx, group_sum, of_group(s, groups), group_mean, all);
    spread_groups(ctx, group_mean, of_channels, s.batch, s.channels, groups);
  };
  add_to(sum_dy, dbias, mean_g);
  add_to(sum_dyx, dweight, mean_gx);
  fill(ctx, ones, 1.0f, s.channels);
  fill(ctx, zeros, 0.0f, s.channels);
  batch_norm_forward(ctx, dy, weight, zeros, zeros, ones, g, s);
  for (std::int64_t b = 0; b < s.batch; ++b)
    batch_norm_backward(ctx, g + b * map, x + b * map, ones, means + b * s.channels, invs + b * s.channels,
                        mean_g + b * s.channels, mean_gx + b * s.channels, dx + b * map, sample);
}

// ---- Attention: a whole is one piece, the first and the last ----

AttentionPiece whole(const AttentionShape& s) {
  return {s.batch, s.seq, s.seq, s.heads, s.kv_heads, s.head_dim, 0, 0, true, true, true, s.bf16_products};
}

void attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                       float* softmax, AttentionShape s) {
  check_heads("attention_forward", s);
  attention_piece_forward(ctx, q, k, v, ScoreBias{}, out, softmax, whole(s));
}

void attention_backward(KernelContext& ctx, const float* dout, const float* q, const float* k, const float* v,
                        const float* out, const float* softmax, float* dq, float* dk, float* dv,
                        AttentionShape s) {
  check_heads("attention_backward", s);
  const Temporary<float> delta(ctx, s.batch * s.heads * s.seq);
  attention_delta(ctx, dout, out, delta, {s.batch, s.seq, s.seq, s.heads, s.kv_heads, s.head_dim});
  attention_piece_backward_queries(ctx, dout, q, k, v, ScoreBias{}, softmax, delta, dq, whole(s));
  attention_piece_backward_keys(ctx, dout, q, k, v, ScoreBias{}, softmax, delta, dk, dv, whole(s));
}

void full_attention_forward(KernelContext& ctx, const float* q, const float* k, const float* v,
                            ScoreBias bias, float* out, float* softmax, FullAttentionShape s) {
  check_heads("full_attention_forward", s);
  attention_piece_forward(ctx, q, k, v, bias, out, softmax,
                          {s.batch, s.queries, s.keys, s.heads, s.kv_heads, s.head_dim, 0, 0, false, true,
                           true, s.bf16_products});
}

// ---- Products and attention in bf16, and what is between them: in f32, and rounded ----

void matmul_to_bf16(KernelContext& ctx, const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored,
                    const float* bias, bf16* c, std::int64_t m, std::int64_t n, std::int64_t k) {
  const Temporary<float> wide(ctx, m * n);
  matmul(ctx, a, a_stored, b, b_stored, wide, m, n, k, false);
  if (bias != nullptr) add_bias(ctx, bias, static_cast<float*>(wide), m, n);
  round_to_bf16(ctx, wide, c, m * n);
}

}  // namespace
}  // namespace composed

namespace {

// Calls each(kernel, its composition, parts…) for every kernel that has one, after the parts that have one
// themselves.
template <class Each>
constexpr void each_composition(Each&& each) {
  using T = KernelTable;
#define WEFT_COMPOSED(name, ...) each.template operator()<&T::name, __VA_ARGS__>(&composed::name)
  WEFT_COMPOSED(linear_forward, &T::matmul, &T::add_bias);
  WEFT_COMPOSED(linear_forward_bf16, &T::matmul_bf16, &T::add_bias);
  WEFT_COMPOSED(linear_backward_input, &T::matmul);
  WEFT_COMPOSED(linear_backward_weight, &T::matmul, &T::bias_backward);
  WEFT_COMPOSED(layer_norm_forward, &T::channel_moments, &T::batch_norm_statistics, &T::row_norm_forward);
  WEFT_COMPOSED(layer_norm_backward, &T::row_norm_backward_sums, &T::divide_f64, &T::row_norm_backward);
  WEFT_COMPOSED(channel_norm_forward, &T::permute, &T::layer_norm_forward);
  WEFT_COMPOSED(channel_norm_backward, &T::permute, &T::layer_norm_backward);
  WEFT_COMPOSED(group_norm_forward, &T::channel_moments, &T::group_sums, &T::batch_norm_statistics,
                &T::spread_groups, &T::batch_norm_forward);
  WEFT_COMPOSED(group_norm_backward, &T::spread_groups, &T::batch_norm_backward_sums, &T::sum_rows_f64,
                &T::add, &T::group_sums, &T::divide_f64, &T::fill, &T::batch_norm_forward,
                &T::batch_norm_backward);
  WEFT_COMPOSED(attention_forward, &T::attention_piece_forward);
  WEFT_COMPOSED(attention_backward, &T::attention_delta, &T::attention_piece_backward_queries,
                &T::attention_piece_backward_keys);
  WEFT_COMPOSED(full_attention_forward, &T::attention_piece_forward);
  WEFT_COMPOSED(matmul_to_bf16, &T::matmul_bf16, &T::add_bias, &T::round_to_bf16);
#define WEFT_WIDENED(name, ...)                                                                   \
  each.template operator()<&T::name##_bf16, &T::widen_bf16, &T::name __VA_OPT__(, ) __VA_ARGS__>( \
      &Widened<&T::name##_bf16, &T::name, composed::Temporary<float>>::run)
#define WEFT_ROUNDED(name) WEFT_WIDENED(name, &T::round_to_bf16)
  WEFT_ROUNDED(add_bias);
  WEFT_WIDENED(bias_backward);
  WEFT_ROUNDED(rms_norm_forward);
  WEFT_ROUNDED(rms_norm_backward);
  WEFT_ROUNDED(layer_norm_forward);
  WEFT_ROUNDED(layer_norm_backward);
  WEFT_ROUNDED(rope_forward);
  WEFT_ROUNDED(rope_backward);
  WEFT_ROUNDED(attention_forward);
  WEFT_ROUNDED(attention_backward);
  WEFT_ROUNDED(full_attention_forward);
  WEFT_ROUNDED(full_attention_backward);
  WEFT_ROUNDED(silu_forward);
  WEFT_ROUNDED(silu_backward);
  WEFT_ROUNDED(gelu_forward);
  WEFT_ROUNDED(gelu_backward);
  WEFT_ROUNDED(relu_forward);
  WEFT_ROUNDED(relu_backward);
  WEFT_ROUNDED(swiglu_forward);
  WEFT_ROUNDED(swiglu_backward);
  WEFT_ROUNDED(add);
  WEFT_ROUNDED(dropout);
#undef WEFT_ROUNDED
#undef WEFT_WIDENED
#undef WEFT_COMPOSED
}

}  // namespace

void compose(KernelTable& table) noexcept {
  each_composition([&]<auto Member, auto... Parts>(auto made) {
    if (table.*Member == nullptr && (... && (table.*Parts != nullptr))) table.*Member = made;
  });
}

std::vector<Composition> compositions() {
  std::vector<Composition> all;
  each_composition([&]<auto Member, auto... Parts>(auto) {
    all.push_back({Row<Member>::name, {Row<Parts>::name...}});
  });
  return all;
}

}  // namespace weft::kernels
