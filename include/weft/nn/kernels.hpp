// The compute kernels of one rank. A kernel takes raw pointers and sizes, and layers call it. kernels.inl is
// the list of them, with what each computes and how many elements each operand has. Each device has a table
// of them. A call goes through the table of the KernelContext that it gets. Each call uses that context and
// nothing else. So ranks that are threads hold one context each and do not contend.
//
// Each is tested against plain loops of the same name. A layer gets its KernelContext from Frame::kernels().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
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
/// number of threads, packed weights, scratch memory that grows as needed. One per rank. One thread at a time
/// uses it, any thread.
class KernelContext {
 public:
  /// On the CPU. threads ≥ 1: exactly so many threads compute; the caller is one of them. Throws bad_argument
  /// otherwise.
  explicit KernelContext(int threads);
  /// On the device of `compute`, which must exist longer. Throws unsupported if the Context has no kernels of
  /// that device: `kernels: cuda:0 has none in this Context; add_kernels() adds them`.
  explicit KernelContext(Compute& compute);
  ~KernelContext();
  KernelContext(KernelContext&&) noexcept;
  KernelContext& operator=(KernelContext&&) noexcept;

  const KernelTable& table() const noexcept { return *table_; }
  int threads() const noexcept { return threads_; }
  Stream stream() const noexcept { return stream_; }
  /// The Compute of this context. Null if the context was made from a number of threads. Kernels of a device
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

/// Whether the stored matrix is a factor of the product, or its transpose is.
enum class Stored : bool { plain, transposed };

/// A bf16 matrix, and the key by which a kernel recognises it if the kernel keeps a packed copy. If two calls
/// on one KernelContext give the same `weight` and the same `version`, not 0, the elements are the same. A
/// weight gets another version when an element changes (Parameter::number() and weight_version()). Version 0:
/// the kernel keeps no copy.
struct WeightMatrix {
  const bf16* data;
  std::uint64_t weight = 0, version = 0;
  WeightMatrix(const bf16* elements) noexcept : data(elements) {}
  WeightMatrix(const bf16* elements, std::uint64_t of, std::uint64_t version_of) noexcept
      : data(elements), weight(of), version(version_of) {}
};

/// The second factor of a product, of elements T.
template <class T>
using WeightOf = std::conditional_t<std::is_same_v<T, bf16>, WeightMatrix, const T*>;

/// The facts about a part of a token's logits that cross-entropy needs; see cross_entropy_terms.
inline constexpr std::int64_t kLossTerms = 4;
/// The facts about all logits of a token, or all scores of a query, that the backward pass of a softmax
/// needs: the largest, and the sum of e^(logit - largest). They are kept as two numbers. The logarithm of the
/// sum of e^logit, as one number, has too few digits for that sum if logits are large.
inline constexpr std::int64_t kSoftmaxTerms = 2;

/// The sizes of a linear layer.
struct LinearShape {
  std::int64_t tokens, in, out;
};

/// How tree_matmul adds the products over k. k consists of segments, one after the other. Each segment is cut
/// into as many parts as there are leaves, by exact_block() (weft/base/exact.hpp). A leaf of a balanced
/// binary tree is the sum over its part of the first segment, then of the second, …, in the order of matmul.
struct ProductTree {
  int leaves = 8;  ///< 1, 2, 4 or 8
  /// The sizes of the segments, in units. Empty: one segment. On the host, for the time of the call.
  std::span<const std::int64_t> segments{};
  std::int64_t unit = 1;  ///< elements of k that are not cut
};

/// The sizes of the rotated tensor.
struct RopeShape {
  std::int64_t batch, seq, heads, head_dim;  // head_dim is even
  /// x: (batch, seq, heads, head_dim).
  constexpr std::int64_t elements() const noexcept { return batch * seq * heads * head_dim; }
};

/// The sizes of grouped-query attention. Query heads [h * heads/kv_heads, (h+1) * heads/kv_heads) use
/// key/value head h.
struct AttentionShape {
  std::int64_t batch, seq, heads, kv_heads, head_dim;  // kv_heads divides heads
  /// If the CPU multiplies bf16 (AVX-512 BF16), operands of products are rounded to bf16. All sums and the
  /// softmax are in f32. Elsewhere nothing changes.
  bool bf16_products = false;
  /// q, out: (batch, seq, heads, head_dim).
  constexpr std::int64_t q_elements() const noexcept { return batch * seq * heads * head_dim; }
  /// k, v: (batch, seq, kv_heads, head_dim).
  constexpr std::int64_t kv_elements() const noexcept { return batch * seq * kv_heads * head_dim; }
  /// softmax: (batch, heads, seq, kSoftmaxTerms).
  constexpr std::int64_t softmax_elements() const noexcept { return batch * heads * seq * kSoftmaxTerms; }
};

/// The sizes of attention in which every query sees every key, with grouped heads as in AttentionShape.
struct FullAttentionShape {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;  // kv_heads divides heads
  bool bf16_products = false;                                    ///< as in AttentionShape
  /// q, out: (batch, queries, heads, head_dim).
  constexpr std::int64_t q_elements() const noexcept { return batch * queries * heads * head_dim; }
  /// k, v: (batch, keys, kv_heads, head_dim).
  constexpr std::int64_t kv_elements() const noexcept { return batch * keys * kv_heads * head_dim; }
  /// softmax: (batch, heads, queries, kSoftmaxTerms).
  constexpr std::int64_t softmax_elements() const noexcept { return batch * heads * queries * kSoftmaxTerms; }
};

/// A piece of an attention: queries [first_query, first_query + queries) and keys [first_key, first_key +
/// keys) of the whole. If keys arrive in pieces, one after the other, the pieces are added up. `begins` and
/// `ends` mark the first and the last piece. On CPUs with AVX2, the sums of an attention in pieces have the
/// bits of the whole in one piece. So pieces of keys begin at multiples of kAttentionKeys and are given in
/// order. Pieces of queries begin at multiples of kAttentionQueries and are given from the last to the first.
struct AttentionPiece {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;  // kv_heads divides heads
  std::int64_t first_query, first_key;
  bool causal;  ///< true: query i of the whole sees its keys 0..i; false: all keys
  bool begins, ends;
  bool bf16_products = false;  ///< as in AttentionShape
  /// q, out: (batch, queries, heads, head_dim).
  constexpr std::int64_t q_elements() const noexcept { return batch * queries * heads * head_dim; }
  /// k, v: (batch, keys, kv_heads, head_dim).
  constexpr std::int64_t kv_elements() const noexcept { return batch * keys * kv_heads * head_dim; }
  /// softmax: (batch, heads, queries, kSoftmaxTerms).
  constexpr std::int64_t softmax_elements() const noexcept { return batch * heads * queries * kSoftmaxTerms; }
};
inline constexpr std::int64_t kAttentionKeys = 256, kAttentionQueries = 64;

/// The bias that full attention adds to its scores, the same for every head: (samples, rows, keys). Without
/// data there is no bias. -infinity hides a key.
template <class T>
struct ScoreBiasOf {
  ScoreBiasOf(const T* data_in = nullptr, bool of_each_sample_in = false, bool of_each_query_in = true)
      : data(data_in), of_each_sample(of_each_sample_in), of_each_query(of_each_query_in) {}
  const T* data;
  bool of_each_sample;  ///< true: the number of samples is the batch; false: 1, for all samples
  bool of_each_query;   ///< true: the number of rows is that of the queries; false: 1, for all queries
};
using ScoreBias = ScoreBiasOf<float>;

/// The term of each element of y in a loss, with its target t: (y - t)^2, or -t log p - (1 - t) log(1 - p),
/// with p = 1 / (1 + e^-y).
enum class LossTerm : unsigned char { squared_error, binary_cross_entropy };
/// Elements of a loss: n elements in rows of `width`. Each `rows` successive rows have the weights in turn.
/// Without weights, rows and width have no effect.
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
  /// x: (batch, channels, pixels).
  constexpr std::int64_t elements() const noexcept { return batch * channels * pixels; }
};

/// Another order of dimensions: dimension d of the result is dimension order[d] of the tensor with shape
/// `in`.
struct Permutation {
  Shape in;
  Dims order;
};

/// The value of pixels beyond the border of a map: 0, or another pixel. reflect: the mirrored pixel, without
/// the border pixel itself. replicate: the border pixel. circular: the map continues with its other side.
enum class Padding : unsigned char { zeros, reflect, replicate, circular };

/// The pixels that a convolution's kernel sees of one map. Padding is less than the extent for reflect, and
/// at most the extent for circular.
struct UnfoldShape {
  std::int64_t channels, height, width;
  std::int64_t kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width,
      dilation_height, dilation_width;
  std::int64_t out_height, out_width;
  Padding padding;
  /// x: (channels, height, width).
  constexpr std::int64_t in_elements() const noexcept { return channels * height * width; }
  /// y: (channels, out_height, out_width).
  constexpr std::int64_t out_elements() const noexcept { return channels * out_height * out_width; }
  /// columns: (channels, kernel_height, kernel_width, out_height, out_width).
  constexpr std::int64_t column_elements() const noexcept {
    return out_elements() * kernel_height * kernel_width;
  }
};

/// One dimension of a linear resampling. Output r is the sum of weight[e] times input index[e] over e in
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

/// One step of AdamW (Loshchilov and Hutter 2019, decoupled decay), in PyTorch's order of operations: p *= 1
/// - rate * decay; m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2; p -= rate / (1 - beta1^step) * m
/// / (sqrt(v) / sqrt(1 - beta2^step) + eps). For beta1 < 1/2 it is m = g - beta1 (g - m). If beta1 is 0, the
/// result is g.
struct AdamWStep {
  double rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // 1 at the first
};

/// One step of SGD: g' = g + weight_decay p; velocity = momentum velocity + g'; p -= rate velocity.
struct SgdStep {
  double rate, momentum, weight_decay;
};

/// One step of Lion (Chen et al. 2023): c = beta1 m + (1 - beta1) g; p -= rate (sign(c) + weight_decay p); m
/// = beta2 m + (1 - beta2) g. The sign of 0 is 0, and the sign of NaN is NaN.
struct LionStep {
  double rate, beta1, beta2, weight_decay;
};

/// One step of schedule-free AdamW (Defazio et al. 2024):
///   v = beta2 v + (1 - beta2) g^2;  d = g / (sqrt(v) / sqrt(1 - beta2^step) + eps) + weight_decay y;
///   y += weight (z - y) - rate (1 - beta1 (1 - weight)) d;  z -= rate d.
struct ScheduleFreeStep {
  double rate, beta1, beta2, eps, weight_decay, weight;
  std::int64_t step;  // 1 at the first
};

/// Which elements of a run are dropped. Number first + i of the stream, which is uniform on [0, 1), decides
/// for element i.
struct DropoutRun {
  RandomStream stream;
  std::uint64_t first;
  float p, scale;
};

/// The entries [first, first + count) of a vocabulary of `whole` entries. If the vocabulary is split, they
/// are the part of a rank. A single number means the whole vocabulary.
struct VocabPart {
  VocabPart(std::int64_t all) : count(all), whole(all) {}
  VocabPart(std::int64_t first_in, std::int64_t count_in, std::int64_t whole_in)
      : first(first_in), count(count_in), whole(whole_in) {}
  std::int64_t first = 0, count, whole;
};

/// A target that does not count in the loss.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// Angles of rotary positions: position p turns pair i by p * theta^(-2i/head_dim). cosine, sine: (positions,
/// head_dim/2). The tables are computed in f32 with one rounding per step (power, reciprocal, product), as in
/// PyTorch.
void rope_tables(float theta, std::int64_t head_dim, std::int64_t positions, float* cosine, float* sine);

namespace detail {
// The type of each kernel, by its element: KernelOf::add<float> is void(KernelContext&, const float* a, …).
struct KernelOf {
#define WEFT_PARAMETERS(...) __VA_ARGS__
#define WEFT_KERNEL(name, parameters, ...) \
  template <class T>                       \
  using name = void(KernelContext & ctx, WEFT_PARAMETERS parameters);
#define WEFT_KERNEL_F32_BF16(...) WEFT_KERNEL(__VA_ARGS__)
#include "weft/nn/kernels.inl"
#undef WEFT_PARAMETERS
};
}  // namespace detail

/// The kernels of a device: a pointer for each row of the list. It is `add` for kernels::add(), and `matmul`
/// and `matmul_bf16` for the two kernels::matmul(). Null: the device has no such kernel.
struct KernelTable {
#define WEFT_KERNEL(name, ...) detail::KernelOf::name<float>* name = nullptr;
#define WEFT_KERNEL_F32_BF16(name, ...)          \
  detail::KernelOf::name<float>* name = nullptr; \
  detail::KernelOf::name<bf16>* name##_bf16 = nullptr;
#include "weft/nn/kernels.inl"
};

/// The kernels of the CPU.
const KernelTable& cpu_table() noexcept;
/// Gives a Context the kernels of a device that it has (Context::add_device). The table must exist longer
/// than the Context. Throws bad_argument if the device has kernels already. Thread-safe.
///
/// A device need not have all kernels. weft composes a missing norm, linear layer or attention from other
/// kernels of the device, if the device has these (docs/kernels.md). A call of any other missing kernel
/// throws unsupported: `kernels: cuda:0 has no rope_forward; give it to add_kernels(), or set
/// WEFT_HOST_KERNELS=1 to run it on the host, on copies of its operands`. With WEFT_HOST_KERNELS=1, which
/// this function reads, such a call waits for the stream, copies the operands to the host, runs the CPU's
/// kernel there and copies the results back. Its first call logs a warning. It throws errors about data.
void add_kernels(Context& context, Device device, const KernelTable& table);

namespace detail {
// A function object that calls members of the context's table, chosen by the types of their arguments.
template <auto Member>
struct Call;
template <class... Args, void (*KernelTable::*Member)(KernelContext&, Args...)>
struct Call<Member> {
  void operator()(KernelContext& ctx, Args... args) const { (ctx.table().*Member)(ctx, args...); }
};
template <auto... Members>
struct Calls : Call<Members>... {
  using Call<Members>::operator()...;
};
}  // namespace detail

// The functions that layers call: kernels::add(ctx, a, b, out, n).
#define WEFT_KERNEL(name, ...) inline constexpr detail::Calls<&KernelTable::name> name{};
#define WEFT_KERNEL_F32_BF16(name, ...) \
  inline constexpr detail::Calls<&KernelTable::name, &KernelTable::name##_bf16> name{};
#include "weft/nn/kernels.inl"

}  // namespace weft::kernels
