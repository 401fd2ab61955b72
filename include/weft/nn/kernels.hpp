// The compute kernels of one rank: raw pointers and sizes in, numbers out; layers call them. Each device has
// a table of them; a call goes through the table of the KernelContext it is given. Each call uses that
// context and nothing else, so ranks that are threads hold one context each and do not contend.
//
// Rules for all of them:
//  - Arrays are dense and row-major, in memory of the context's device; the shape stands beside each pointer.
//    Outputs are overwritten unless the name or the comment says that they accumulate ("+="). An input may be
//    the output where "in place" is said, nowhere else.
//  - Any size may be 0. Then nothing is read, and outputs that have elements become the value of an empty
//    sum.
//  - The CPU has done the work when a call returns. Another device does it on the context's stream, after all
//    work queued there before; errors about the data are then thrown by the next wait for the stream.
//  - On the CPU the result's bits depend on the input alone, not on the number of threads: every sum runs
//    over blocks of a fixed size in a fixed order.
// Each is tested against plain loops of the same name. A layer gets its KernelContext from Frame::kernels().
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/base/device.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/random.hpp"
#include "weft/base/shape.hpp"

namespace weft {
class Compute;
class Context;
}  // namespace weft

namespace weft::kernels {

struct KernelTable;

/// The state that the kernels of one rank need besides their arguments: the device's table, the stream, the
/// number of threads, the matrix library's engine and its prepared products, scratch memory that grows to
/// what was needed. One per rank; used by one thread at a time, any thread.
class KernelContext {
 public:
  /// On the CPU. threads ≥ 1: exactly so many compute, the caller being one of them. Throws bad_argument
  /// otherwise.
  explicit KernelContext(int threads);
  /// On the device of `compute`, which outlives it. Throws unsupported if nobody has given that device's
  /// kernels to the Context: `kernels: cuda:0 has none in this Context; add_kernels() gives them`.
  explicit KernelContext(Compute& compute);
  ~KernelContext();
  KernelContext(KernelContext&&) noexcept;
  KernelContext& operator=(KernelContext&&) noexcept;

  const KernelTable& table() const noexcept { return *table_; }
  int threads() const noexcept { return threads_; }
  Stream stream() const noexcept { return stream_; }
  /// The Compute that it belongs to; null if it was made from a number of threads. Kernels of a device
  /// keep their own data in it (Compute::attached).
  Compute* compute() const noexcept { return compute_; }

  struct State;  // private to the CPU's kernels
  State& state() noexcept { return *state_; }

 private:
  const KernelTable* table_;
  Compute* compute_ = nullptr;
  Stream stream_{};
  int threads_;
  std::unique_ptr<State> state_;  // the CPU's
};

/// Whether a matrix is stored as it is multiplied, or as its transpose.
enum class Stored : bool { plain, transposed };

/// A bf16 matrix, and the key by which a kernel recognises it if the kernel keeps a packed copy. If two
/// calls on one KernelContext give the same `weight` and the same `version`, not 0, the elements are the
/// same: a weight gets another version when an element changes (Parameter::number() and weight_version()).
/// Version 0: nothing is kept.
struct WeightMatrix {
  const bf16* data;
  std::uint64_t weight = 0, version = 0;
  /// An element's bits must be the same for any number of columns: the columns are pixels of a map, of which
  /// a rank may have any part.
  bool of_any_columns = false;
  WeightMatrix(const bf16* elements) noexcept : data(elements) {}
  WeightMatrix(const bf16* elements, std::uint64_t of, std::uint64_t version_of) noexcept
      : data(elements), weight(of), version(version_of) {}
};

/// The sizes of a linear layer.
struct LinearShape {
  std::int64_t tokens, in, out;
};

/// The sizes of the rotated tensor.
struct RopeShape {
  std::int64_t batch, seq, heads, head_dim;  // head_dim is even
};

/// The sizes of grouped-query attention. Query heads [h * heads/kv_heads, (h+1) * heads/kv_heads) use
/// key/value head h.
struct AttentionShape {
  std::int64_t batch, seq, heads, kv_heads, head_dim;  // kv_heads divides heads
  /// Operands of products are rounded to bf16 where the CPU multiplies bf16 (AVX-512 BF16); all sums and the
  /// softmax are f32's. Elsewhere nothing changes.
  bool bf16_products = false;
};

/// The sizes of attention in which every query sees every key, with grouped heads as in AttentionShape.
struct FullAttentionShape {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;  // kv_heads divides heads
  bool bf16_products = false;                                    ///< as in AttentionShape
};

/// A piece of an attention: queries [first_query, first_query + queries) and keys [first_key, first_key +
/// keys) of the whole. Keys that come in pieces, one after the other, are added up; `begins` and `ends` say
/// which piece is the first and the last. The sums of an attention in pieces have the bits of the whole in
/// one piece, on CPUs with AVX2: so pieces of keys begin at multiples of kAttentionKeys and come in order,
/// those of queries at multiples of kAttentionQueries and come from the last to the first.
struct AttentionPiece {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;  // kv_heads divides heads
  std::int64_t first_query, first_key;
  bool causal;  ///< query i of the whole sees its keys 0..i; otherwise all
  bool begins, ends;
  bool bf16_products = false;  ///< as in AttentionShape
};
inline constexpr std::int64_t kAttentionKeys = 256, kAttentionQueries = 64;

/// The bias that full attention adds to its scores, the same for every head: (samples, rows, keys). Without
/// data: nothing. -infinity hides a key.
template <class T>
struct ScoreBiasOf {
  ScoreBiasOf(const T* data_in = nullptr, bool of_each_sample_in = false, bool of_each_query_in = true)
      : data(data_in), of_each_sample(of_each_sample_in), of_each_query(of_each_query_in) {}
  const T* data;
  bool of_each_sample;  ///< samples: the batch; false: 1, which is for all
  bool of_each_query;   ///< rows: the queries; false: 1, which is for all
};
using ScoreBias = ScoreBiasOf<float>;

/// The term of each element of y in a loss, with its target t: (y - t)^2, or -t log p - (1 - t) log(1 - p),
/// with p = 1 / (1 + e^-y).
enum class LossTerm : unsigned char { squared_error, binary_cross_entropy };
/// Elements of a loss: n in rows of `width`, of which each `rows` successive ones have the weights in turn.
/// Without weights rows and width do not matter.
struct LossShape {
  std::int64_t n, rows = 1, width = 1;
};
/// As errors call it.
constexpr const char* name(LossTerm term) noexcept {
  return term == LossTerm::squared_error ? "mean squared error" : "binary cross entropy";
}

/// The two forms of GELU: with the normal distribution itself, and with a tanh in its place.
enum class GeluForm : unsigned char { erf, tanh };

/// The sizes of maps: pixels are height times width.
struct MapShape {
  std::int64_t batch, channels, pixels;
};

/// Another order of dimensions: dimension d of the result is dimension order[d] of the tensor with shape
/// `in`.
struct Permutation {
  Shape in;
  Dims order;
};

/// The value of pixels beyond the border of a map: 0, or another pixel (without the border one itself:
/// reflect; the border one: replicate; as if the map went on with its other side: circular).
enum class Padding : unsigned char { zeros, reflect, replicate, circular };

/// The pixels that a convolution's kernel sees of one map. Padding is less than the extent for reflect, at
/// most that for circular.
struct UnfoldShape {
  std::int64_t channels, height, width;
  std::int64_t kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width,
      dilation_height, dilation_width;
  std::int64_t out_height, out_width;
  Padding padding;
};

/// One dimension of a linear resampling: output r is the sum of weight[e] times input index[e] over e in
/// [begin[r], begin[r + 1]), in that order. Indices are within the input.
struct Taps {
  std::vector<std::int64_t> begin{0}, index{};
  std::vector<float> weight{};
  std::int64_t outputs() const noexcept { return static_cast<std::int64_t>(begin.size()) - 1; }
};

/// Maps that are resampled along both dimensions. maps: batch times channels.
struct ResampleShape {
  std::int64_t maps, height, width;
  std::shared_ptr<const Taps> rows, columns;
};

/// One step of AdamW (Loshchilov and Hutter 2019, decoupled decay), in PyTorch's order of operations:
///   p *= 1 - rate * decay;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;
///   p -= rate / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps).
/// For beta1 < 1/2 it is m = g - beta1 (g - m), which of beta1 = 0 is g.
struct AdamWStep {
  double rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // 1 at the first
};

/// One step of SGD: g' = g + weight_decay p; velocity = momentum velocity + g'; p -= rate velocity.
struct SgdStep {
  double rate, momentum, weight_decay;
};

/// Which elements of a run are dropped: element i by number first + i of the stream, which is uniform on [0,
/// 1).
struct DropoutRun {
  RandomStream stream;
  std::uint64_t first;
  float p, scale;
};

/// The entries [first, first + count) of a vocabulary of `whole`: the part of a rank if it is split. A
/// number: all of it.
struct VocabPart {
  VocabPart(std::int64_t all) : count(all), whole(all) {}
  VocabPart(std::int64_t first_in, std::int64_t count_in, std::int64_t whole_in)
      : first(first_in), count(count_in), whole(whole_in) {}
  std::int64_t first = 0, count, whole;
};

/// The facts about a part of a token's logits that cross-entropy needs; see cross_entropy_terms.
inline constexpr std::int64_t kLossTerms = 4;
/// The facts about all logits of a token, or all scores of a query, that the backward pass of a softmax
/// needs: the largest, and the sum of e^(logit - largest). They are kept as two numbers: the logarithm of
/// the sum of e^logit, as one number, has too few digits for that sum where logits are large.
inline constexpr std::int64_t kSoftmaxTerms = 2;

/// A target that takes no part in the loss.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// Angles of rotary positions: position p turns pair i by p * theta^(-2i/head_dim). cosine, sine: (positions,
/// head_dim/2). Made in f32 with one rounding per step (power, reciprocal, product), as PyTorch makes them.
void rope_tables(float theta, std::int64_t head_dim, std::int64_t positions, float* cosine, float* sine);

/// The kernels of a device. These comments hold for every table. `kernels::add(ctx, …)` calls `add` of
/// ctx.table().
struct KernelTable {
  /// c = a b, or c += a b when `accumulate`.
  /// a: (m, k), stored (k, m) when `a_stored` is transposed; b: (k, n), stored (n, k) when `b_stored` is; c:
  /// (m, n). bf16 products are summed in f32.
  void (*matmul)(KernelContext& ctx, const float* a, Stored a_stored, const float* b, Stored b_stored,
                 float* c, std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate);
  void (*matmul_bf16)(KernelContext& ctx, const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored,
                      float* c, std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate);

  /// c = a b^T, each element rounded once from a sum whose error does not grow with k. a: (m, k) with rows
  /// lda apart, b: (n, k) with rows ldb apart, c: (m, n).
  void (*row_products)(KernelContext& ctx, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                       float* c, std::int64_t m, std::int64_t n, std::int64_t k);

  /// y = x w^T + bias. x: (tokens, in), w: (out, in), bias: (out) or null, y: (tokens, out).
  void (*linear_forward)(KernelContext& ctx, const float* x, const float* w, const float* bias, float* y,
                         LinearShape s);
  void (*linear_forward_bf16)(KernelContext& ctx, const bf16* x, WeightMatrix w, const float* bias, float* y,
                              LinearShape s);
  /// dx = dy w. dy: (tokens, out), w: (out, in), dx: (tokens, in).
  void (*linear_backward_input)(KernelContext& ctx, const float* dy, const float* w, float* dx,
                                LinearShape s);
  /// dw += dy^T x, dbias += the sum of dy's rows. dy: (tokens, out), x: (tokens, in), dw: (out, in), dbias:
  /// (out) or null.
  void (*linear_backward_weight)(KernelContext& ctx, const float* dy, const float* x, float* dw, float* dbias,
                                 LinearShape s);

  /// y += bias, row by row. y: (tokens, out), bias: (out).
  void (*add_bias)(KernelContext& ctx, const float* bias, float* y, std::int64_t tokens, std::int64_t out);
  /// dbias += the sum of dy's rows, in blocks of rows. dy: (tokens, out), dbias: (out).
  void (*bias_backward)(KernelContext& ctx, const float* dy, float* dbias, std::int64_t tokens,
                        std::int64_t out);

  /// y = x * inv_rms * weight, inv_rms = 1 / sqrt(mean of x^2 over dim + eps).
  /// x, y: (rows, dim), weight: (dim), inv_rms: (rows), kept for the backward pass. In place: y may be x.
  void (*rms_norm_forward)(KernelContext& ctx, const float* x, const float* weight, float* y, float* inv_rms,
                           std::int64_t rows, std::int64_t dim, float eps);
  /// dx, and dweight += the sum over rows of dy * x * inv_rms. dy, x, dx: (rows, dim), weight, dweight:
  /// (dim). In place: dx may be dy.
  void (*rms_norm_backward)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                            const float* inv_rms, float* dx, float* dweight, std::int64_t rows,
                            std::int64_t dim);

  /// y = (x - mean) * inv_std * weight + bias, mean and inv_std = 1 / sqrt(variance + eps) over dim, the
  /// variance being the mean of (x - mean)^2. x, y: (rows, dim), weight, bias: (dim), mean, inv_std: (rows),
  /// kept for the backward pass. In place: y may be x.
  void (*layer_norm_forward)(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                             float* y, float* mean, float* inv_std, std::int64_t rows, std::int64_t dim,
                             float eps);
  /// dx, dweight += the sum over rows of dy * (x - mean) * inv_std, dbias += the sum of dy's rows. dy, x, dx:
  /// (rows, dim), weight, dweight, dbias: (dim). In place: dx may be dy.
  void (*layer_norm_backward)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                              const float* mean, const float* inv_std, float* dx, float* dweight,
                              float* dbias, std::int64_t rows, std::int64_t dim);
  /// Layer norm of maps, over the channels of each pixel. x, y: (batch, channels, pixels), weight, bias:
  /// (channels), mean, inv_std: (batch, pixels). In place: y may be x.
  void (*channel_norm_forward)(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                               float* y, float* mean, float* inv_std, MapShape s, float eps);
  /// dx, dweight +=, dbias +=. dy, x, dx: (batch, channels, pixels), weight, dweight, dbias: (channels). In
  /// place: dx may be dy.
  void (*channel_norm_backward)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                                const float* mean, const float* inv_std, float* dx, float* dweight,
                                float* dbias, MapShape s);

  /// Normalises over each group of channels / groups channels of a sample and all their pixels. x, y: (batch,
  /// channels, pixels), weight, bias: (channels), mean, inv_std: (batch, groups). In place: y may be x.
  /// Throws bad_argument if groups does not divide channels.
  void (*group_norm_forward)(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                             float* y, float* mean, float* inv_std, MapShape s, std::int64_t groups,
                             float eps);
  /// dx, dweight +=, dbias +=. In place: dx may be dy.
  void (*group_norm_backward)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                              const float* mean, const float* inv_std, float* dx, float* dweight,
                              float* dbias, MapShape s, std::int64_t groups);

  /// sum = the sum of x over samples and pixels, squares = that of x^2, in f64. x: (batch, channels, pixels),
  /// sum, squares: (channels).
  void (*channel_moments)(KernelContext& ctx, const float* x, double* sum, double* squares, MapShape s);
  /// y = (x - mean) * inv_std * weight + bias, channel by channel. x, y: (batch, channels, pixels), weight,
  /// bias, mean, inv_std: (channels). In place: y may be x.
  void (*batch_norm_forward)(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                             const float* mean, const float* inv_std, float* y, MapShape s);
  /// sum_dy = the sum of dy over samples and pixels, sum_dyx = that of dy * (x - mean) * inv_std, in f64. dy,
  /// x: (batch, channels, pixels), the others: (channels).
  void (*batch_norm_backward_sums)(KernelContext& ctx, const float* dy, const float* x, const float* mean,
                                   const float* inv_std, double* sum_dy, double* sum_dyx, MapShape s);
  /// dx = weight * inv_std * (dy - mean_dy - (x - mean) * inv_std * mean_dyx). dy, x, dx: (batch, channels,
  /// pixels), the others: (channels). In place: dx may be dy.
  void (*batch_norm_backward)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                              const float* mean, const float* inv_std, const float* mean_dy,
                              const float* mean_dyx, float* dx, MapShape s);

  /// The statistics of a batch norm from the sums of its channels: mean = sum / count, inv_std = 1 /
  /// sqrt(variance + eps), where variance = squares / count - mean^2, at least 0; tracked_mean = mean,
  /// tracked_var = variance * count / (count - 1), both of them null if they are not wanted. All:
  /// (channels).
  void (*batch_norm_statistics)(KernelContext& ctx, const double* sum, const double* squares, double count,
                                double eps, float* mean, float* inv_std, double* tracked_mean,
                                double* tracked_var, std::int64_t channels);
  /// running = (1 - momentum) running + momentum * tracked / ranks, for both; batches += 1. All except
  /// batches, (1): (channels).
  void (*batch_norm_track)(KernelContext& ctx, const double* tracked_mean, const double* tracked_var,
                           double ranks, double momentum, float* running_mean, float* running_var,
                           std::int64_t* batches, std::int64_t channels);
  /// inv_std = 1 / sqrt(variance + eps). variance, inv_std: (n).
  void (*inverse_std)(KernelContext& ctx, const float* variance, double eps, float* inv_std, std::int64_t n);
  /// y = x / divisor, rounded to f32. x, y: (n).
  void (*divide_f64)(KernelContext& ctx, const double* x, double divisor, float* y, std::int64_t n);

  /// Adds sums of channels up to sums of groups of neighbouring channels: y = for each row and group the sum
  /// of its channels' x, each multiplied by its weight unless that is null. x: (rows, channels), weight:
  /// (channels), y: (rows, groups); groups divides channels.
  void (*group_sums)(KernelContext& ctx, const double* x, const float* weight, double* y, std::int64_t rows,
                     std::int64_t channels, std::int64_t groups);
  /// The way back for numbers of groups: y[r][c] = x[r][the group of c]. x: (rows, groups), y: (rows,
  /// channels).
  void (*spread_groups)(KernelContext& ctx, const float* x, float* y, std::int64_t rows,
                        std::int64_t channels, std::int64_t groups);
  /// y = the sum over rows of x, rounded to f32. x: (rows, columns), y: (columns).
  void (*sum_rows_f64)(KernelContext& ctx, const double* x, float* y, std::int64_t rows,
                       std::int64_t columns);

  /// y = (x - mean) * inv_std * weight + bias, with statistics of rows of which this may be a part. x, y:
  /// (rows, dim), weight, bias: (dim), mean, inv_std: (rows). In place: y may be x.
  void (*row_norm_forward)(KernelContext& ctx, const float* x, const float* weight, const float* bias,
                           const float* mean, const float* inv_std, float* y, std::int64_t rows,
                           std::int64_t dim);
  /// With n = (x - mean) * inv_std and g = dy * weight: sum_g, sum_gx = the sums of g and of g n over each
  /// row, in f64; dweight += the sum of dy n over rows, dbias += that of dy. dy, x: (rows, dim), weight,
  /// dweight, dbias: (dim), the others: (rows).
  void (*row_norm_backward_sums)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                                 const float* mean, const float* inv_std, double* sum_g, double* sum_gx,
                                 float* dweight, float* dbias, std::int64_t rows, std::int64_t dim);
  /// dx = inv_std * (g - mean_g - n * mean_gx). dy, x, dx: (rows, dim), weight: (dim), the others: (rows). In
  /// place: dx may be dy.
  void (*row_norm_backward)(KernelContext& ctx, const float* dy, const float* x, const float* weight,
                            const float* mean, const float* inv_std, const float* mean_g,
                            const float* mean_gx, float* dx, std::int64_t rows, std::int64_t dim);

  /// y += bias, channel by channel. y: (batch, channels, pixels), bias: (channels).
  void (*add_channel_bias)(KernelContext& ctx, const float* bias, float* y, MapShape s);
  /// dbias += the sum of dy over samples and pixels, made in f64. dy: (batch, channels, pixels), dbias:
  /// (channels).
  void (*channel_bias_backward)(KernelContext& ctx, const float* dy, float* dbias, MapShape s);
  /// y = x with its dimensions in another order. x: how.in.
  void (*permute)(KernelContext& ctx, const float* x, float* y, const Permutation& how);
  /// columns[c, i, j, r, s] = x[c, r stride + i dilation - padding, and so for s and j]. x: (channels,
  /// height, width), columns: (channels, kernel_height, kernel_width, out_height, out_width).
  void (*unfold)(KernelContext& ctx, const float* x, float* columns, const UnfoldShape& s);
  /// The adjoint: each pixel of dx is the sum of where it was put. dcolumns as columns, dx as x.
  void (*fold)(KernelContext& ctx, const float* dcolumns, float* dx, const UnfoldShape& s);

  /// y[m, r, s] = the sum over the taps of row r of weight times (the sum over the taps of column s of weight
  /// * x[m, i, j]). x: (maps, height, width), y: (maps, rows->outputs(), columns->outputs()). An element's
  /// bits depend on its own taps and inputs alone.
  void (*resample)(KernelContext& ctx, const float* x, float* y, const ResampleShape& s);
  /// y[c, r, s] = the largest of the pixels that the kernel sees, place[c, r, s] = which it is, i *
  /// kernel_width + j, the first of several; a NaN is the largest. Pixels beyond the border do not count; if
  /// the kernel sees no pixel, y is -infinity and place is -1. x: (channels, height, width), y, place:
  /// (channels, out_height, out_width).
  void (*max_pool_forward)(KernelContext& ctx, const float* x, float* y, std::int32_t* place,
                           const UnfoldShape& s);
  /// dx[c, i, j] = the sum of the dy whose place is this pixel, in their order; a place beyond the border of
  /// dx counts nowhere.
  void (*max_pool_backward)(KernelContext& ctx, const float* dy, const std::int32_t* place, float* dx,
                            const UnfoldShape& s);

  /// y[t] = table[ids[t] - vocab.first], 0 for an id that is not in the part. ids: (tokens), table:
  /// (vocab.count, dim), y: (tokens, dim). Throws bad_argument for an id outside of the whole.
  void (*embedding_forward)(KernelContext& ctx, const std::int64_t* ids, const float* table, float* y,
                            std::int64_t tokens, VocabPart vocab, std::int64_t dim);
  void (*embedding_forward_bf16)(KernelContext& ctx, const std::int64_t* ids, const bf16* table, float* y,
                                 std::int64_t tokens, VocabPart vocab, std::int64_t dim);
  /// dtable[ids[t] - vocab.first] += dy[t], in the order of t, for ids in the part. dy: (tokens, dim),
  /// dtable: (vocab.count, dim). Throws as forward does.
  void (*embedding_backward)(KernelContext& ctx, const std::int64_t* ids, const float* dy, float* dtable,
                             std::int64_t tokens, VocabPart vocab, std::int64_t dim);

  /// Turns the pair (i, i + head_dim/2) of every head by its position's angle. x, y: (batch, seq, heads,
  /// head_dim); cosine, sine: (at least seq, head_dim/2). In place: y may be x.
  void (*rope_forward)(KernelContext& ctx, const float* x, const float* cosine, const float* sine, float* y,
                       RopeShape s);
  /// The turn back: dx from dy. In place: dx may be dy.
  void (*rope_backward)(KernelContext& ctx, const float* dy, const float* cosine, const float* sine,
                        float* dx, RopeShape s);

  /// Causal attention: out = softmax(q k^T / sqrt(head_dim)) v, where position i sees positions 0..i. q, out:
  /// (batch, seq, heads, head_dim); k, v: (batch, seq, kv_heads, head_dim); softmax: (batch, heads, seq,
  /// kSoftmaxTerms), of the scaled scores, kept for the backward pass. Throws bad_argument if kv_heads
  /// does not divide heads.
  void (*attention_forward)(KernelContext& ctx, const float* q, const float* k, const float* v, float* out,
                            float* softmax, AttentionShape s);
  /// dq, dk, dv from dout and what the forward pass left. Shapes as there; dq like q, dk and dv like k.
  void (*attention_backward)(KernelContext& ctx, const float* dout, const float* q, const float* k,
                             const float* v, const float* out, const float* softmax, float* dq, float* dk,
                             float* dv, AttentionShape s);

  /// out = softmax(q k^T / sqrt(head_dim) + bias) v; every query sees every key that the bias does not hide.
  /// q, out: (batch, queries, heads, head_dim); k, v: (batch, keys, kv_heads, head_dim); bias: (queries,
  /// keys), for every sample and head, or as it says itself, or null; softmax: (batch, heads, queries,
  /// kSoftmaxTerms), of the scores with the bias, kept for the backward pass. If a query sees no key, out is
  /// 0, the largest score -infinity and the sum 0. Throws bad_argument if kv_heads does not divide heads.
  void (*full_attention_forward)(KernelContext& ctx, const float* q, const float* k, const float* v,
                                 ScoreBias bias, float* out, float* softmax, FullAttentionShape s);
  /// dq, dk, dv and, unless it is null, dbias, the sum over samples and heads, from dout and what the forward
  /// pass left. dbias is only of a bias (queries, keys): for another the call throws bad_argument.
  void (*full_attention_backward)(KernelContext& ctx, const float* dout, const float* q, const float* k,
                                  const float* v, ScoreBias bias, const float* out, const float* softmax,
                                  float* dq, float* dk, float* dv, float* dbias, FullAttentionShape s);

  /// attention_forward() and full_attention_forward() of keys in pieces, for any queries. softmax: as there,
  /// holds what is known between pieces, as out does; the piece that `ends` finishes out. q, out: (batch,
  /// queries, heads, head_dim), k, v: (batch, keys, kv_heads, head_dim), bias: of the queries and keys of the
  /// piece. Throws bad_argument if kv_heads does not divide heads, or first_key is no multiple of
  /// kAttentionKeys.
  void (*attention_piece_forward)(KernelContext& ctx, const float* q, const float* k, const float* v,
                                  ScoreBias bias, float* out, float* softmax, AttentionPiece s);
  /// delta = the sum of dout * out over head_dim. dout, out: (batch, queries, heads, head_dim), delta:
  /// (batch, heads, queries). s.keys and s.kv_heads are not used.
  void (*attention_delta)(KernelContext& ctx, const float* dout, const float* out, float* delta,
                          FullAttentionShape s);
  /// dq of keys in pieces, for any queries: overwritten by the piece that `begins`, added to by the others.
  /// dout, q, dq: (batch, queries, heads, head_dim), k, v: (batch, keys, kv_heads, head_dim), softmax:
  /// (batch, heads, queries, kSoftmaxTerms), delta: (batch, heads, queries). Throws as
  /// attention_piece_forward does.
  void (*attention_piece_backward_queries)(KernelContext& ctx, const float* dout, const float* q,
                                           const float* k, const float* v, ScoreBias bias,
                                           const float* softmax, const float* delta, float* dq,
                                           AttentionPiece s);
  /// dk and dv of queries in pieces, for any keys: the piece that `begins` overwrites them, and the others
  /// add. The piece that `begins` sees every key that any query sees; the gradients of other keys become 0.
  /// Throws bad_argument if kv_heads does not divide heads, or first_query is no multiple of
  /// kAttentionQueries.
  void (*attention_piece_backward_keys)(KernelContext& ctx, const float* dout, const float* q, const float* k,
                                        const float* v, ScoreBias bias, const float* softmax,
                                        const float* delta, float* dk, float* dv, AttentionPiece s);

  /// full_attention_forward() in two steps, for short sequences, so that a layer can change the weights
  /// between them. weights = softmax(q k^T / sqrt(head_dim) + bias). q: (batch, queries, heads, head_dim), k:
  /// (batch, keys, kv_heads, head_dim), bias: (queries, keys) or null, of which -infinity hides a key,
  /// weights: (batch, heads, queries, keys). Gradients of a query that sees no key are 0.
  void (*attention_weights_forward)(KernelContext& ctx, const float* q, const float* k, const float* bias,
                                    float* weights, FullAttentionShape s);
  /// dq, dk and, unless it is null, dbias, the sum over samples and heads. Shapes as there.
  void (*attention_weights_backward)(KernelContext& ctx, const float* dweights, const float* weights,
                                     const float* q, const float* k, float* dq, float* dk, float* dbias,
                                     FullAttentionShape s);
  /// out = weights v. v as k, out as q.
  void (*attention_apply_forward)(KernelContext& ctx, const float* weights, const float* v, float* out,
                                  FullAttentionShape s);
  /// dweights and dv from dout.
  void (*attention_apply_backward)(KernelContext& ctx, const float* dout, const float* weights,
                                   const float* v, float* dweights, float* dv, FullAttentionShape s);

  /// y = x * sigmoid(x). x, y: (n). In place: y may be x.
  void (*silu_forward)(KernelContext& ctx, const float* x, float* y, std::int64_t n);
  /// dx from dy. In place: dx may be dy.
  void (*silu_backward)(KernelContext& ctx, const float* dy, const float* x, float* dx, std::int64_t n);

  /// y = x Phi(x), where Phi is the distribution of the standard normal; tanh: y = x (1 + tanh(sqrt(2/pi) (x
  /// + 0.044715 x^3))) / 2. x, y: (n). In place: y may be x. D. Hendrycks, K. Gimpel, "Gaussian Error Linear
  /// Units", 2016.
  void (*gelu_forward)(KernelContext& ctx, const float* x, float* y, std::int64_t n, GeluForm form);
  /// dx from dy. In place: dx may be dy.
  void (*gelu_backward)(KernelContext& ctx, const float* dy, const float* x, float* dx, std::int64_t n,
                        GeluForm form);
  /// y = x where x > 0, otherwise 0; NaN stays NaN. x, y: (n). In place: y may be x.
  void (*relu_forward)(KernelContext& ctx, const float* x, float* y, std::int64_t n);
  /// dx = dy where y > 0, otherwise 0. dy, y, dx: (n). In place: dx may be dy.
  void (*relu_backward)(KernelContext& ctx, const float* dy, const float* y, float* dx, std::int64_t n);

  /// out = silu(gate) * up. All: (n). In place: out may be gate or up.
  void (*swiglu_forward)(KernelContext& ctx, const float* gate, const float* up, float* out, std::int64_t n);
  /// dgate and dup from dout. All: (n). In place: dgate or dup may be dout, gate or up.
  void (*swiglu_backward)(KernelContext& ctx, const float* dout, const float* gate, const float* up,
                          float* dgate, float* dup, std::int64_t n);

  /// out = a + b. All: (n). In place: out may be a or b.
  void (*add)(KernelContext& ctx, const float* a, const float* b, float* out, std::int64_t n);
  /// x *= factor. x: (n).
  void (*scale)(KernelContext& ctx, float* x, float factor, std::int64_t n);
  /// x = value. x: (n).
  void (*fill)(KernelContext& ctx, float* x, float value, std::int64_t n);
  /// y = x * run.scale where number run.first + i of the stream is at least run.p, otherwise 0. x, y: (n). In
  /// place: y may be x.
  void (*dropout)(KernelContext& ctx, const float* x, float* y, std::int64_t n, const DropoutRun& run);
  /// y = x, rounded to the nearest bf16. x, y: (n).
  void (*round_to_bf16)(KernelContext& ctx, const float* x, bf16* y, std::int64_t n);
  /// y = x, exactly. x, y: (n).
  void (*widen_bf16)(KernelContext& ctx, const bf16* x, float* y, std::int64_t n);

  /// The share of one part of the vocabulary in the loss, for each token: the largest logit of the part, the
  /// sum of e^(logit - largest) over the part, the target's logit (0 if it is in another part), and the
  /// sum of the logits (0 without smoothing). logits: (tokens, vocab.count), targets: (tokens), terms:
  /// (tokens, kLossTerms), count: as below. Throws bad_argument for a target that is neither in the whole
  /// vocabulary nor kIgnoredTarget, and unless count > 0.
  void (*cross_entropy_terms)(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                              double* terms, std::int64_t tokens, VocabPart vocab, const std::int64_t* count,
                              double smoothing);
  /// loss = the sum over tokens of -(1 - smoothing) log p[target] - smoothing (the mean of log p over the
  /// vocabulary), with p = softmax(logits), divided by `count`: the number of valid tokens of the whole
  /// batch, over all ranks. terms: (parts, tokens, kLossTerms) of all parts of the vocabulary, in their
  /// order, targets: (tokens), softmax: (tokens, kSoftmaxTerms), kept for the backward pass, loss, count:
  /// (1); vocab: of all parts. Summed in f64. C. Szegedy et al., Rethinking the Inception Architecture,
  /// arXiv:1512.00567, section 7 (smoothing).
  void (*cross_entropy_sum)(KernelContext& ctx, const double* terms, int parts, const std::int64_t* targets,
                            double* softmax, double* loss, std::int64_t tokens, std::int64_t vocab,
                            const std::int64_t* count, double smoothing);
  /// dlogits = (softmax(logits) - (1 - smoothing) onehot(target) - smoothing / vocab.whole) / count, times
  /// dloss, rows of ignored targets 0. logits, dlogits: (tokens, vocab.count); softmax: as cross_entropy_sum
  /// gave it; dloss: (1), or null for 1. In place: dlogits may be logits. Throws as cross_entropy_terms does.
  void (*cross_entropy_backward)(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                                 const double* softmax, const double* dloss, float* dlogits,
                                 std::int64_t tokens, VocabPart vocab, const std::int64_t* count,
                                 double smoothing);
  /// count = the number of targets that are not kIgnoredTarget. targets: (n), count: (1).
  void (*count_valid)(KernelContext& ctx, const std::int64_t* targets, std::int64_t* count, std::int64_t n);

  /// loss = the sum of the elements' terms in f64, each multiplied by the weight of its row unless weights is
  /// null, divided by count. y, target: (n), weights: (rows), loss, count: (1). Throws bad_argument for a
  /// count below 1, and of a binary cross entropy for a target that is not from 0 to 1.
  void (*element_loss_forward)(KernelContext& ctx, const float* y, const float* target, const float* weights,
                               double* loss, LossShape s, const std::int64_t* count, LossTerm term);
  /// dy of this loss, multiplied by dloss: (1), or by 1 if dloss is null. dy may be y.
  void (*element_loss_backward)(KernelContext& ctx, const float* y, const float* target, const float* weights,
                                const double* dloss, float* dy, LossShape s, const std::int64_t* count,
                                LossTerm term);

  /// x *= 1 / max(sqrt(squares), eps). x: (n), squares: (1), of x, or of a whole of which x is a part.
  void (*normalise)(KernelContext& ctx, float* x, const double* squares, double eps, std::int64_t n);
  /// x *= 1 / sigma; if inner is not null, x *= -inner / sigma^2. x: (n), sigma, inner: (1). Throws
  /// bad_argument for a sigma of 0 and for one that is not finite.
  void (*spectral_divide)(KernelContext& ctx, float* x, const float* sigma, const float* inner,
                          std::int64_t n);
  /// to = from if sigma is a finite number other than 0; otherwise `to` stays as it is. from, to: (n), sigma:
  /// (1).
  void (*spectral_keep)(KernelContext& ctx, const float* from, const float* sigma, float* to, std::int64_t n);

  /// sum = the sum of x^2 in f64. x: (n), sum: (1).
  void (*sum_of_squares)(KernelContext& ctx, const float* x, double* sum, std::int64_t n);

  /// p, m, v: (n), updated; g: (n).
  void (*adamw_step)(KernelContext& ctx, float* p, float* m, float* v, const float* g, std::int64_t n,
                     const AdamWStep& s);

  /// p, velocity: (n), updated; g: (n). With momentum 0 velocity is not used and may be null. Velocity starts
  /// as zeros.
  void (*sgd_step)(KernelContext& ctx, float* p, float* velocity, const float* g, std::int64_t n,
                   const SgdStep& s);
};

/// Every member of KernelTable, once: tables of devices and their callers are made from this list.
// clang-format off
#define WEFT_KERNELS(X) \
  X(matmul) X(matmul_bf16) X(row_products) X(linear_forward) X(linear_forward_bf16) X(linear_backward_input) X(linear_backward_weight) \
  X(add_bias) X(bias_backward) X(rms_norm_forward) X(rms_norm_backward) X(layer_norm_forward) X(layer_norm_backward) \
  X(channel_norm_forward) X(channel_norm_backward) X(group_norm_forward) X(group_norm_backward) \
  X(channel_moments) X(batch_norm_forward) X(batch_norm_backward_sums) X(batch_norm_backward) \
  X(batch_norm_statistics) X(batch_norm_track) X(inverse_std) X(divide_f64) X(group_sums) X(spread_groups) X(sum_rows_f64) \
  X(row_norm_forward) X(row_norm_backward_sums) X(row_norm_backward) \
  X(add_channel_bias) X(channel_bias_backward) X(permute) X(unfold) X(fold) X(resample) X(max_pool_forward) X(max_pool_backward) X(embedding_forward) X(embedding_forward_bf16) \
  X(embedding_backward) X(rope_forward) X(rope_backward) X(attention_forward) X(attention_backward) \
  X(full_attention_forward) X(full_attention_backward) X(attention_piece_forward) X(attention_delta) \
  X(attention_piece_backward_queries) X(attention_piece_backward_keys) X(attention_weights_forward) X(attention_weights_backward) \
  X(attention_apply_forward) X(attention_apply_backward) \
  X(silu_forward) X(silu_backward) X(gelu_forward) X(gelu_backward) X(relu_forward) X(relu_backward) X(swiglu_forward) X(swiglu_backward) X(add) X(scale) X(fill) X(dropout) \
  X(round_to_bf16) X(widen_bf16) X(cross_entropy_terms) X(cross_entropy_sum) X(cross_entropy_backward) X(count_valid) X(element_loss_forward) X(element_loss_backward) \
  X(normalise) X(spectral_divide) X(spectral_keep) X(sum_of_squares) \
  X(adamw_step) X(sgd_step)
// clang-format on

/// The kernels of the CPU.
const KernelTable& cpu_table() noexcept;
/// Gives a Context the kernels of a device that it has (Context::add_device); the table outlives it. Throws
/// bad_argument if there are some already, and where a kernel is null, naming it. Thread-safe.
void add_kernels(Context& context, Device device, const KernelTable& table);

namespace detail {
// A function object that calls one member of the context's table, with the arguments that the member has.
template <auto Member>
struct Call;
template <class... Args, void (*KernelTable::*Member)(KernelContext&, Args...)>
struct Call<Member> {
  void operator()(KernelContext& ctx, Args... args) const { (ctx.table().*Member)(ctx, args...); }
};
template <class... Calls>
struct Overloads : Calls... {
  using Calls::operator()...;
};
}  // namespace detail

inline constexpr detail::Overloads<detail::Call<&KernelTable::matmul>,
                                   detail::Call<&KernelTable::matmul_bf16>>
    matmul{};
inline constexpr detail::Overloads<detail::Call<&KernelTable::linear_forward>,
                                   detail::Call<&KernelTable::linear_forward_bf16>>
    linear_forward{};
inline constexpr detail::Call<&KernelTable::row_products> row_products{};
inline constexpr detail::Call<&KernelTable::linear_backward_input> linear_backward_input{};
inline constexpr detail::Call<&KernelTable::linear_backward_weight> linear_backward_weight{};
inline constexpr detail::Call<&KernelTable::add_bias> add_bias{};
inline constexpr detail::Call<&KernelTable::bias_backward> bias_backward{};
inline constexpr detail::Call<&KernelTable::rms_norm_forward> rms_norm_forward{};
inline constexpr detail::Call<&KernelTable::rms_norm_backward> rms_norm_backward{};
inline constexpr detail::Call<&KernelTable::layer_norm_forward> layer_norm_forward{};
inline constexpr detail::Call<&KernelTable::layer_norm_backward> layer_norm_backward{};
inline constexpr detail::Call<&KernelTable::channel_norm_forward> channel_norm_forward{};
inline constexpr detail::Call<&KernelTable::channel_norm_backward> channel_norm_backward{};
inline constexpr detail::Call<&KernelTable::group_norm_forward> group_norm_forward{};
inline constexpr detail::Call<&KernelTable::group_norm_backward> group_norm_backward{};
inline constexpr detail::Call<&KernelTable::channel_moments> channel_moments{};
inline constexpr detail::Call<&KernelTable::batch_norm_forward> batch_norm_forward{};
inline constexpr detail::Call<&KernelTable::batch_norm_backward_sums> batch_norm_backward_sums{};
inline constexpr detail::Call<&KernelTable::batch_norm_backward> batch_norm_backward{};
inline constexpr detail::Call<&KernelTable::batch_norm_statistics> batch_norm_statistics{};
inline constexpr detail::Call<&KernelTable::batch_norm_track> batch_norm_track{};
inline constexpr detail::Call<&KernelTable::inverse_std> inverse_std{};
inline constexpr detail::Call<&KernelTable::divide_f64> divide_f64{};
inline constexpr detail::Call<&KernelTable::group_sums> group_sums{};
inline constexpr detail::Call<&KernelTable::spread_groups> spread_groups{};
inline constexpr detail::Call<&KernelTable::sum_rows_f64> sum_rows_f64{};
inline constexpr detail::Call<&KernelTable::row_norm_forward> row_norm_forward{};
inline constexpr detail::Call<&KernelTable::row_norm_backward_sums> row_norm_backward_sums{};
inline constexpr detail::Call<&KernelTable::row_norm_backward> row_norm_backward{};
inline constexpr detail::Call<&KernelTable::add_channel_bias> add_channel_bias{};
inline constexpr detail::Call<&KernelTable::channel_bias_backward> channel_bias_backward{};
inline constexpr detail::Call<&KernelTable::permute> permute{};
inline constexpr detail::Call<&KernelTable::unfold> unfold{};
inline constexpr detail::Call<&KernelTable::resample> resample{};
inline constexpr detail::Call<&KernelTable::max_pool_forward> max_pool_forward{};
inline constexpr detail::Call<&KernelTable::max_pool_backward> max_pool_backward{};
inline constexpr detail::Call<&KernelTable::fold> fold{};
inline constexpr detail::Overloads<detail::Call<&KernelTable::embedding_forward>,
                                   detail::Call<&KernelTable::embedding_forward_bf16>>
    embedding_forward{};
inline constexpr detail::Call<&KernelTable::embedding_backward> embedding_backward{};
inline constexpr detail::Call<&KernelTable::rope_forward> rope_forward{};
inline constexpr detail::Call<&KernelTable::rope_backward> rope_backward{};
inline constexpr detail::Call<&KernelTable::attention_forward> attention_forward{};
inline constexpr detail::Call<&KernelTable::attention_backward> attention_backward{};
inline constexpr detail::Call<&KernelTable::full_attention_forward> full_attention_forward{};
inline constexpr detail::Call<&KernelTable::full_attention_backward> full_attention_backward{};
inline constexpr detail::Call<&KernelTable::attention_piece_forward> attention_piece_forward{};
inline constexpr detail::Call<&KernelTable::attention_delta> attention_delta{};
inline constexpr detail::Call<&KernelTable::attention_piece_backward_queries>
    attention_piece_backward_queries{};
inline constexpr detail::Call<&KernelTable::attention_piece_backward_keys> attention_piece_backward_keys{};
inline constexpr detail::Call<&KernelTable::attention_weights_forward> attention_weights_forward{};
inline constexpr detail::Call<&KernelTable::attention_weights_backward> attention_weights_backward{};
inline constexpr detail::Call<&KernelTable::attention_apply_forward> attention_apply_forward{};
inline constexpr detail::Call<&KernelTable::attention_apply_backward> attention_apply_backward{};
inline constexpr detail::Call<&KernelTable::silu_forward> silu_forward{};
inline constexpr detail::Call<&KernelTable::silu_backward> silu_backward{};
inline constexpr detail::Call<&KernelTable::gelu_forward> gelu_forward{};
inline constexpr detail::Call<&KernelTable::gelu_backward> gelu_backward{};
inline constexpr detail::Call<&KernelTable::relu_forward> relu_forward{};
inline constexpr detail::Call<&KernelTable::relu_backward> relu_backward{};
inline constexpr detail::Call<&KernelTable::swiglu_forward> swiglu_forward{};
inline constexpr detail::Call<&KernelTable::swiglu_backward> swiglu_backward{};
inline constexpr detail::Call<&KernelTable::add> add{};
inline constexpr detail::Call<&KernelTable::scale> scale{};
inline constexpr detail::Call<&KernelTable::fill> fill{};
inline constexpr detail::Call<&KernelTable::dropout> dropout{};
inline constexpr detail::Call<&KernelTable::round_to_bf16> round_to_bf16{};
inline constexpr detail::Call<&KernelTable::widen_bf16> widen_bf16{};
inline constexpr detail::Call<&KernelTable::cross_entropy_terms> cross_entropy_terms{};
inline constexpr detail::Call<&KernelTable::cross_entropy_sum> cross_entropy_sum{};
inline constexpr detail::Call<&KernelTable::cross_entropy_backward> cross_entropy_backward{};
inline constexpr detail::Call<&KernelTable::element_loss_forward> element_loss_forward{};
inline constexpr detail::Call<&KernelTable::element_loss_backward> element_loss_backward{};
inline constexpr detail::Call<&KernelTable::count_valid> count_valid{};
inline constexpr detail::Call<&KernelTable::sum_of_squares> sum_of_squares{};
inline constexpr detail::Call<&KernelTable::normalise> normalise{};
inline constexpr detail::Call<&KernelTable::spectral_divide> spectral_divide{};
inline constexpr detail::Call<&KernelTable::spectral_keep> spectral_keep{};
inline constexpr detail::Call<&KernelTable::adamw_step> adamw_step{};
inline constexpr detail::Call<&KernelTable::sgd_step> sgd_step{};

}  // namespace weft::kernels
