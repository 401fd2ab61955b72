// Matrix products, computed by oneDNN or by the functions of gemm/gemm.hpp, and the linear layer made of
// them.
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl_debug.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "nn/kernels/bf16/library_isa.hpp"
#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
namespace {

[[noreturn]] void throw_dnnl(const char* what, dnnl_status_t status) {
  throw Error(ErrorCode::system, fmt::format("{}: oneDNN failed with {}", what, dnnl_status2str(status)));
}

// A product is computed in pieces of rows or of columns, each on one thread: oneDNN would split it over
// threads in ways that change the order of its sums.
struct Pieces {
  bool of_rows;  // of m, not of n
  std::int64_t count, size;
};

Pieces equal_pieces(std::int64_t m, std::int64_t n, std::int64_t count, std::int64_t align) {
  const std::int64_t extent = std::max(m, n), size = blocks_of(blocks_of(extent, count), align) * align;
  return {m >= n, blocks_of(extent, size), size};
}

// As many pieces as there are threads, if pieces change no bits (gemm.hpp). Each piece packs the other matrix
// again, so pieces are large.
Pieces cut_for_threads(std::int64_t m, std::int64_t n, std::int64_t k, int threads) {
  constexpr std::int64_t kLeastSize = 128, kMinProducts = std::int64_t{1} << 20, kAlign = 16;
  const std::int64_t extent = std::max(m, n);
  for (auto count = std::clamp<std::int64_t>(m * n * k / kMinProducts, 1, threads);; --count) {
    const Pieces p = equal_pieces(m, n, count, kAlign);
    if (p.count == 1 || std::min(p.size, extent - (p.count - 1) * p.size) >= kLeastSize) return p;
  }
}

// Divides by the shape alone, because pieces change the bits of oneDNN's products.
Pieces cut_by_shape(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t most,
                    std::int64_t least_size, std::int64_t least_products) {
  constexpr std::int64_t kAlign = 16;
  std::int64_t count = 1;
  while (count < most && std::max(m, n) / (2 * count) >= least_size &&
         m * n * k / (2 * count) >= least_products)
    count *= 2;
  return equal_pieces(m, n, count, kAlign);
}

// The order of a stored matrix: element (row, column) is at row * row_step + column * column_step.
struct Walk {
  std::int64_t row_step, column_step;
};

Walk walk(Stored stored, std::int64_t stride) {
  return stored == Stored::transposed ? Walk{1, stride} : Walk{stride, 1};
}

// If b is packed in blocks of other sizes than the library's choice, the product runs at a fraction of the
// speed; so this code asks the library for its choice first.
PreparedProduct prepare(KernelContext::State& state, const ProductKey& key) {
  using dnnl::memory;
  const memory::desc a({key.m, key.k}, memory::data_type::bf16,
                       key.a_transposed ? memory::dims{1, key.lda} : memory::dims{key.lda, 1});
  const auto of_b = [&](const auto& strides_or_tag) {
    return memory::desc({key.k, key.n}, memory::data_type::bf16, strides_or_tag);
  };
  const memory::desc b = key.b_packed
                             ? of_b(memory::format_tag::any)
                             : of_b(key.b_transposed ? memory::dims{1, key.ldb} : memory::dims{key.ldb, 1});
  const memory::desc c({key.m, key.n}, memory::data_type::f32, memory::dims{key.ldc, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // the library's own belongs to one thread
  if (key.accumulate) {
    dnnl::post_ops after;
    after.append_sum(1.0f);
    attributes.set_post_ops(after);
  }
  const memory::desc bias =
      key.bias ? memory::desc({1, key.n}, memory::data_type::f32, memory::dims{key.n, 1}) : memory::desc();
  const auto product = key.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  const dnnl::matmul::primitive_desc description(product, attributes, state.engine);
  const bool usable = !key.b_packed || description.weights_desc() == of_b(memory::format_tag::BA16a64b2a);
  return {dnnl::matmul(description),     a,     description.weights_desc(), c, bias,
          description.scratchpad_desc(), usable};
}

// The reference stays valid until kMostPrepared - 1 other products were requested.
const PreparedProduct& prepared(KernelContext::State& state, const ProductKey& key) {
  auto found = state.prepared.find(key);
  if (found == state.prepared.end()) {
    if (state.prepared.size() >= kMostPrepared)
      state.prepared.erase(std::min_element(
          state.prepared.begin(), state.prepared.end(),
          [](const auto& x, const auto& y) { return x.second.last_use < y.second.last_use; }));
    found = state.prepared.emplace(key, prepare(state, key)).first;
  }
  found->second.last_use = ++state.prepared_uses;
  return found->second;
}

// Converts the numbers to f32, which is exact.
void widen(KernelContext::State& state, const bf16* from, float* to, std::int64_t count) {
  parallel_blocks(state, count, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    std::transform(from + begin, from + end, to + begin, [](bf16 x) { return static_cast<float>(x); });
  });
}

// c = a b, a b + bias or c += a b for a k that the library supports; see matmul. bias: (n) or null.
void bf16_product(KernelContext::State& state, const bf16* a, Stored a_stored, std::int64_t lda,
                  const WeightMatrix& b, Stored b_stored, std::int64_t ldb, const float* bias, float* c,
                  std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  constexpr std::int64_t kMostPieces = 16, kLongK = 2048, kLeastProducts = std::int64_t{1} << 26;
  const std::int64_t least_size = k > kLongK ? 1024 : 512;  // narrow pieces of a long k are slow
  const Pieces pieces = cut_by_shape(m, n, k, kMostPieces, least_size, kLeastProducts);
  const std::int64_t extent = pieces.of_rows ? m : n;
  // The library's faster products, and those of packed weights, need adjacent rows of c. If there are few
  // rows, a piece of columns is computed in scratch memory and copied.
  constexpr std::int64_t kFewRows = 256;
  // If rows of a piece of a, b or c are not adjacent, other code multiplies them, whose sums have another
  // order if k is long. So if all numbers of columns are to give equal bits, a piece is copied first: a piece
  // of columns of b and c, or a piece of rows of a transposed a.
  constexpr std::int64_t kShortK = 256;
  const bool in_columns = !pieces.of_rows && pieces.count > 1,
             keeps_bits = pieces.count > 1 && b.of_any_columns && b_stored == Stored::plain && k > kShortK;
  const bool copies_b = keeps_bits && in_columns,
             copies_a = keeps_bits && pieces.of_rows && a_stored == Stored::transposed;
  const bool dense = copies_b || (in_columns && m <= kFewRows && !accumulate);
  const auto key_of = [&](std::int64_t size, bool packed) {
    return ProductKey{pieces.of_rows ? size : m,
                      pieces.of_rows ? n : size,
                      k,
                      copies_a ? size : lda,
                      packed     ? 0
                      : copies_b ? size
                                 : ldb,
                      dense ? size : n,
                      a_stored == Stored::transposed,
                      !packed && b_stored == Stored::transposed,
                      accumulate,
                      bias != nullptr,
                      packed};
  };
  const std::int64_t first_size = std::min(extent, pieces.size),
                     last_size = extent - (pieces.count - 1) * pieces.size;
  const auto usable = [&](std::int64_t size) { return prepared(state, key_of(size, true)).usable; };
  const bool in_blocks = pieces.of_rows || pieces.count == 1 || pieces.size % PackedWeights::kColumns == 0;
  const bf16* const packed = b.version != 0 && in_blocks && usable(first_size) && usable(last_size)
                                 ? state.packed.find(state, b, b_stored, ldb, k, n)
                                 : nullptr;
  const PreparedProduct& full = prepared(state, key_of(first_size, packed != nullptr));
  const PreparedProduct& last = prepared(state, key_of(last_size, packed != nullptr));
  constexpr std::size_t kLine = 64;
  const std::size_t c_bytes = dense ? static_cast<std::size_t>(m * pieces.size) * sizeof(float) : 0,
                    copy_at = (c_bytes + kLine - 1) / kLine * kLine,
                    copy_bytes =
                        copies_a || copies_b ? static_cast<std::size_t>(k * pieces.size) * sizeof(bf16) : 0,
                    library_at = copy_at + (copy_bytes + kLine - 1) / kLine * kLine,
                    library_bytes = std::max(full.scratch.get_size(), last.scratch.get_size());
  state.reserve_per_thread(static_cast<std::int64_t>((library_at + library_bytes + kLine) / sizeof(float)));
  parallel_for(state, pieces.count, [&](std::int64_t piece, int thread) {
    const std::int64_t row = pieces.of_rows ? piece * pieces.size : 0,
                       column = pieces.of_rows ? 0 : piece * pieces.size;
    const PreparedProduct& p = piece == pieces.count - 1 ? last : full;
    const auto scratch =
        (reinterpret_cast<std::uintptr_t>(state.thread_scratch(thread)) + kLine - 1) / kLine * kLine;
    float* const of_c = dense ? reinterpret_cast<float*>(scratch) : c + row * n + column;
    const auto memory_at = [&](const dnnl::memory::desc& what, const void* data) {
      return dnnl::memory(what, state.engine, const_cast<void*>(data));  // the library only reads a and b
    };
    const std::int64_t size = std::min(pieces.size, extent - piece * pieces.size);
    const bf16* of_a = a + row * walk(a_stored, lda).row_step;
    const bf16* of_b = packed != nullptr ? PackedWeights::at_column(packed, column, k)
                                         : b.data + column * walk(b_stored, ldb).column_step;
    if (copies_a || copies_b) {
      const bf16*& from = copies_a ? of_a : of_b;
      auto* const to = reinterpret_cast<bf16*>(scratch + copy_at);
      for (std::int64_t i = 0; i < k; ++i)
        std::copy_n(from + i * (copies_a ? lda : ldb), size, to + i * size);
      from = to;
    }
    for (std::int64_t i = 0; dense && accumulate && i < m; ++i)
      std::copy_n(c + i * n + column, size, of_c + i * size);
    std::unordered_map<int, dnnl::memory> arguments = {
        {DNNL_ARG_SRC, memory_at(p.a, of_a)},
        {DNNL_ARG_WEIGHTS, memory_at(p.b, of_b)},
        {DNNL_ARG_DST, memory_at(p.c, of_c)},
        {DNNL_ARG_SCRATCHPAD, memory_at(p.scratch, reinterpret_cast<const void*>(scratch + library_at))}};
    if (bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, memory_at(p.bias, bias + column));
    p.product.execute(state.stream, arguments);
    for (std::int64_t i = 0; dense && i < m; ++i) std::copy_n(of_c + i * size, size, c + i * n + column);
  });
}

gemm::Matrix matrix(const void* data, bool is_bf16, Stored stored, std::int64_t stride) {
  const Walk steps = walk(stored, stride);
  return {data, steps.row_step, steps.column_step, is_bf16};
}

// p, on all threads.
void own_product(KernelContext::State& state, const gemm::Product& p) {
  const Pieces pieces = cut_for_threads(p.m, p.n, p.k, state.threads);
  state.reserve_products(pieces.of_rows ? p.n : std::min(p.n, pieces.size), p.k);
  parallel_for(state, pieces.count, [&](std::int64_t piece, int thread) {
    gemm::Product part = p;
    const std::int64_t begin = piece * pieces.size;
    if (pieces.of_rows) {
      part.m = std::min(pieces.size, p.m - begin);
      part.a = p.a.at(begin, 0);
      part.c = p.c + begin * p.ldc;
    } else {
      part.n = std::min(pieces.size, p.n - begin);
      part.b = p.b.at(0, begin);
      part.c = p.c + begin;
      if (p.bias != nullptr) part.bias = p.bias + begin;
    }
    state.own->multiply(part, state.product_scratch(thread));
  });
}

// oneDNN's, on the calling thread's current number of threads.
void library_product(Stored a_stored, Stored b_stored, std::int64_t m, std::int64_t n, std::int64_t k,
                     float alpha, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                     bool accumulate, float* c, std::int64_t ldc) {
  const dnnl_status_t status =
      dnnl_sgemm(a_stored == Stored::transposed ? 'T' : 'N', b_stored == Stored::transposed ? 'T' : 'N', m, n,
                 k, alpha, a, lda, b, ldb, accumulate ? 1.0f : 0.0f, c, ldc);
  if (status != dnnl_success) throw_dnnl("matmul", status);
}

// Each row of y is a copy of `row`. row: (dim), y: (rows, dim)
void copy_to_rows(KernelContext::State& state, const float* row, float* y, std::int64_t rows,
                  std::int64_t dim) {
  parallel_blocks(state, rows, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) std::copy_n(row, dim, y + r * dim);
  });
}

// partial = the sum of rows of x. x: (rows, dim), partial: (dim)
WEFT_CPU_CLONES(void, sum_rows, (const float* x, float* partial, std::int64_t rows, std::int64_t dim),
                (x, partial, rows, dim)) {
  std::memset(partial, 0, sizeof(float) * static_cast<std::size_t>(dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * dim;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) partial[i] += from[i];
  }
}

WEFT_CPU_CLONES(void, add_rows,
                (const float* partials, float* out, std::int64_t blocks, std::int64_t dim, std::int64_t begin,
                 std::int64_t end),
                (partials, out, blocks, dim, begin, end)) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    const float* from = partials + block * dim;
#pragma GCC ivdep
    for (std::int64_t i = begin; i < end; ++i) out[i] += from[i];
  }
}

}  // namespace

void add_partial_rows(KernelContext::State& state, const float* partials, float* out, std::int64_t blocks,
                      std::int64_t dim) {
  constexpr std::int64_t kColumns = 1024;
  parallel_blocks(state, dim, kColumns, [&](std::int64_t begin, std::int64_t end) {
    add_rows(partials, out, blocks, dim, begin, end);
  });
}

void strided_matmul(KernelContext::State& state, int thread, Stored a_stored, Stored b_stored, std::int64_t m,
                    std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
                    const float* b, std::int64_t ldb, bool accumulate, float* c, std::int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    for (std::int64_t i = 0; i < m && !accumulate; ++i) std::fill_n(c + i * ldc, n, 0.0f);
    return;
  }
  if (state.own != nullptr)
    state.own->multiply({matrix(a, false, a_stored, lda), matrix(b, false, b_stored, ldb), c, ldc, m, n, k,
                         alpha, accumulate},
                        state.product_scratch(thread));
  else
    library_product(a_stored, b_stored, m, n, k, alpha, a, lda, b, ldb, accumulate, c, ldc);
}

void matmul(KernelContext& ctx, const float* a, Stored a_stored, const float* b, Stored b_stored, float* c,
            std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!accumulate) fill(ctx, c, 0.0f, m * n);
    return;
  }
  KernelContext::State& state = ctx.state();
  const std::int64_t lda = a_stored == Stored::transposed ? m : k,
                     ldb = b_stored == Stored::transposed ? k : n;
  if (state.f32 == Products::own)
    return own_product(state, {matrix(a, false, a_stored, lda), matrix(b, false, b_stored, ldb), c, n, m, n,
                               k, 1.0f, accumulate});
  const ThreadCountGuard one_thread_per_piece(1);
  constexpr std::int64_t kMostPieces = 64, kLeastSize = 96, kLeastProducts = std::int64_t{1} << 22;
  const Pieces pieces = cut_by_shape(m, n, k, kMostPieces, kLeastSize, kLeastProducts);
  parallel_for(state, pieces.count, [&](std::int64_t piece, int) {
    const std::int64_t begin = piece * pieces.size,
                       size = std::min(pieces.size, (pieces.of_rows ? m : n) - begin);
    const std::int64_t row = pieces.of_rows ? begin : 0, column = pieces.of_rows ? 0 : begin;
    library_product(a_stored, b_stored, pieces.of_rows ? size : m, pieces.of_rows ? n : size, k, 1.0f,
                    a + row * walk(a_stored, lda).row_step, lda, b + column * walk(b_stored, ldb).column_step,
                    ldb, accumulate, c + row * n + column, n);
  });
}

namespace {

// c = a b, a b + bias or c += a b; bias: (n) or null.
void multiply_bf16(KernelContext& ctx, const bf16* a, Stored a_stored, const WeightMatrix& b, Stored b_stored,
                   const float* bias, float* c, std::int64_t m, std::int64_t n, std::int64_t k,
                   bool accumulate) {
  KernelContext::State& state = ctx.state();
  const std::int64_t lda = a_stored == Stored::transposed ? m : k,
                     ldb = b_stored == Stored::transposed ? k : n;
  // The gradient of a weight from few tokens: nearly all memory traffic is c's, and our own products write c
  // past the caches. The choice depends on k alone, which no division of m or n changes.
  const bool few_steps = state.own != nullptr && k <= gemm::kShortK;
  if (state.bf16 == Products::own || few_steps)  // widened where they are packed
    return own_product(state, {matrix(a, true, a_stored, lda), matrix(b.data, true, b_stored, ldb), c, n, m,
                               n, k, 1.0f, accumulate, bias});
  check_library(cpu_isa(), library_isa());
  if (!library_has_avx512()) {  // the products of bf16 are exact in f32, and the sums are f32's either way
    float* const wide_a = state.scratch(m * k + k * n);
    float* const wide_b = wide_a + m * k;
    widen(state, a, wide_a, m * k);
    widen(state, b.data, wide_b, k * n);
    if (bias != nullptr) copy_to_rows(state, bias, c, m, n);
    return matmul(ctx, wide_a, a_stored, wide_b, b_stored, c, m, n, k, accumulate || bias != nullptr);
  }
  if (b.of_any_columns && n == 1 &&
      b_stored == Stored::plain) {  // one column is multiplied as a vector, in another order
    Scratch two_columns;
    const std::int64_t b_bytes = (2 * k * static_cast<std::int64_t>(sizeof(bf16)) + 63) / 64 * 64;
    std::byte* const memory = two_columns.reserve(
        state.context, static_cast<std::size_t>(b_bytes) + static_cast<std::size_t>(2 * m) * sizeof(float));
    auto* const wide_b = reinterpret_cast<bf16*>(memory);
    auto* const wide_c = reinterpret_cast<float*>(memory + b_bytes);
    for (std::int64_t i = 0; i < k; ++i) wide_b[2 * i] = wide_b[2 * i + 1] = b.data[i];
    for (std::int64_t i = 0; accumulate && i < m; ++i) wide_c[2 * i] = wide_c[2 * i + 1] = c[i];
    WeightMatrix wide(wide_b);
    wide.of_any_columns = true;
    multiply_bf16(ctx, a, a_stored, wide, b_stored, nullptr, wide_c, m, 2, k, accumulate);
    for (std::int64_t i = 0; i < m; ++i) c[i] = wide_c[2 * i] + (bias == nullptr ? 0.0f : bias[0]);
    return;
  }
  const ThreadCountGuard one_thread_per_piece(1);
  // oneDNN 2.6 on AMX executes an illegal instruction if a long k ends in a part of a tile (48 x 48 x 8191,
  // for one). So that part becomes a separate product, even if AMX is not used, with the same bits.
  constexpr std::int64_t kTile = 32, kLong = 1024;
  const std::int64_t tail = k > kLong ? k % kTile : 0, head = k - tail;
  try {
    if (tail == 0)
      return bf16_product(state, a, a_stored, lda, b, b_stored, ldb, bias, c, m, n, k, accumulate);
    WeightMatrix of_head(b.data), of_tail(b.data + head * walk(b_stored, ldb).row_step);
    of_head.of_any_columns = of_tail.of_any_columns = b.of_any_columns;
    bf16_product(state, a, a_stored, lda, of_head, b_stored, ldb, bias, c, m, n, head, accumulate);
    bf16_product(state, a + head * walk(a_stored, lda).column_step, a_stored, lda, of_tail, b_stored, ldb,
                 nullptr, c, m, n, tail, true);
  } catch (const dnnl::error& e) {
    throw_dnnl("matmul", e.status);
  }
}

}  // namespace

void matmul_bf16(KernelContext& ctx, const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored,
                 float* c, std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k > 0) return multiply_bf16(ctx, a, a_stored, b, b_stored, nullptr, c, m, n, k, accumulate);
  if (!accumulate) fill(ctx, c, 0.0f, m * n);
}

void linear_forward(KernelContext& ctx, const float* x, const float* w, const float* bias, float* y,
                    LinearShape s) {
  KernelContext::State& state = ctx.state();
  if (state.f32 == Products::own && s.tokens > 0 && s.out > 0 && s.in > 0)
    return own_product(
        state, {matrix(x, false, Stored::plain, s.in), matrix(w, false, Stored::transposed, s.in), y, s.out,
                s.tokens, s.out, s.in, 1.0f, false, bias});
  if (bias != nullptr) copy_to_rows(state, bias, y, s.tokens, s.out);
  matmul(ctx, x, Stored::plain, w, Stored::transposed, y, s.tokens, s.out, s.in, bias != nullptr);
}

void linear_forward_bf16(KernelContext& ctx, const bf16* x, WeightMatrix w, const float* bias, float* y,
                         LinearShape s) {
  if (s.tokens > 0 && s.out > 0 && s.in > 0)
    return multiply_bf16(ctx, x, Stored::plain, w, Stored::transposed, bias, y, s.tokens, s.out, s.in, false);
  if (bias != nullptr)
    copy_to_rows(ctx.state(), bias, y, s.tokens, s.out);
  else
    fill(ctx, y, 0.0f, s.tokens * s.out);
}

void linear_backward_input(KernelContext& ctx, const float* dy, const float* w, float* dx, LinearShape s) {
  matmul(ctx, dy, Stored::plain, w, Stored::plain, dx, s.tokens, s.in, s.out, false);
}

void linear_backward_weight(KernelContext& ctx, const float* dy, const float* x, float* dw, float* dbias,
                            LinearShape s) {
  matmul(ctx, dy, Stored::transposed, x, Stored::plain, dw, s.out, s.in, s.tokens, true);
  if (dbias != nullptr) bias_backward(ctx, dy, dbias, s.tokens, s.out);
}

void add_bias(KernelContext& ctx, const float* bias, float* y, std::int64_t tokens, std::int64_t out) {
  if (out == 0) return;
  parallel_blocks(ctx.state(), tokens, std::max<std::int64_t>(1, kElementBlock / out),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t)
                      for (std::int64_t i = 0; i < out; ++i) y[t * out + i] += bias[i];
                  });
}

void bias_backward(KernelContext& ctx, const float* dy, float* dbias, std::int64_t tokens, std::int64_t out) {
  KernelContext::State& state = ctx.state();
  const std::int64_t blocks = blocks_of(tokens, kRowBlock);
  float* partials = state.scratch(blocks * out);
  parallel_blocks(state, tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    sum_rows(dy + begin * out, partials + begin / kRowBlock * out, end - begin, out);
  });
  add_partial_rows(state, partials, dbias, blocks, out);
}

}  // namespace weft::kernels::cpu
