// Matrix products, computed by the functions of gemm/gemm.hpp, and the linear layer made of them.
#include <algorithm>
#include <cstring>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/exact.hpp"

namespace weft::kernels::cpu {
namespace {

// A product is computed in pieces of rows or of columns, each on one thread. Pieces change no bits
// (gemm.hpp).
struct Pieces {
  bool of_rows;  // of m, not of n
  std::int64_t count, size;
};

// As many pieces as there are threads. Each piece packs the other matrix again, so pieces are large. Pieces
// of columns of a packed matrix begin at its panels, at multiples of `panel`. 0: it is not packed.
Pieces cut_for_threads(std::int64_t m, std::int64_t n, std::int64_t k, int threads, std::int64_t panel) {
  constexpr std::int64_t kLeastSize = 128, kMinProducts = std::int64_t{1} << 20, kAlign = 16;
  const bool of_rows = m >= n, of_panels = !of_rows && panel > 0;
  const std::int64_t extent = std::max(m, n), align = of_panels ? panel : kAlign,
                     least_size = of_panels ? panel : kLeastSize;
  for (auto count = std::clamp<std::int64_t>(m * n * k / kMinProducts, 1, threads);; --count) {
    const std::int64_t size = blocks_of(blocks_of(extent, count), align) * align;
    const Pieces p{of_rows, blocks_of(extent, size), size};
    if (p.count == 1 || std::min(p.size, extent - (p.count - 1) * p.size) >= least_size) return p;
  }
}

// The order of a stored matrix: element (row, column) is at row * row_step + column * column_step.
struct Walk {
  std::int64_t row_step, column_step;
};

Walk walk(Stored stored, std::int64_t stride) {
  return stored == Stored::transposed ? Walk{1, stride} : Walk{stride, 1};
}

gemm::Matrix matrix(const void* data, bool is_bf16, Stored stored, std::int64_t stride) {
  const Walk steps = walk(stored, stride);
  return {data, steps.row_step, steps.column_step, is_bf16};
}

// p, on all threads.
void product(KernelContext::State& state, const gemm::Kernel& kernel, const gemm::Product& p) {
  const Pieces pieces =
      cut_for_threads(p.m, p.n, p.k, state.threads, p.packed_b != nullptr ? kernel.columns : 0);
  state.reserve_products(kernel, pieces.of_rows ? p.n : std::min(p.n, pieces.size), p.k);
  parallel_for(state, pieces.count, [&](std::int64_t piece, int thread) {
    gemm::Product part = p;
    const std::int64_t begin = piece * pieces.size;
    if (pieces.of_rows) {
      part.m = std::min(pieces.size, p.m - begin);
      part.a = p.a.at(begin, 0);
      if (p.c_bf16 != nullptr)
        part.c_bf16 = p.c_bf16 + begin * p.ldc;
      else
        part.c = p.c + begin * p.ldc;
    } else {
      part.n = std::min(pieces.size, p.n - begin);
      part.b = p.b.at(0, begin);
      if (p.c_bf16 != nullptr)
        part.c_bf16 = p.c_bf16 + begin;
      else
        part.c = p.c + begin;
      if (p.bias != nullptr) part.bias = p.bias + begin;
      if (p.packed_b != nullptr) part.packed_b = p.packed_b + kernel.packed_floats(begin, p.k);
    }
    kernel.multiply(part, state.product_scratch(thread));
  });
}

// Each row of y is a copy of `row`. row: (dim), y: (rows, dim)
void copy_to_rows(KernelContext::State& state, const float* row, float* y, std::int64_t rows,
                  std::int64_t dim) {
  parallel_blocks(state, rows, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) std::copy_n(row, dim, y + r * dim);
  });
}

// partial = the sum of rows of x. x: (rows, dim), partial: (dim)
WEFT_CPU_CLONES_OF_T(void, sum_rows, (const T* x, float* partial, std::int64_t rows, std::int64_t dim),
                     (x, partial, rows, dim)) {
  std::memset(partial, 0, sizeof(float) * static_cast<std::size_t>(dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * dim;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) partial[i] += wide(from[i]);
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

// to += from, of rows that lie `stride` and `columns` apart.
WEFT_CPU_CLONES(void, add_tile,
                (float* to, std::int64_t stride, const float* from, std::int64_t rows, std::int64_t columns),
                (to, stride, from, rows, columns)) {
  for (std::int64_t i = 0; i < rows; ++i) {
    float* const sum = to + i * stride;
    const float* const term = from + i * columns;
#pragma GCC ivdep
    for (std::int64_t j = 0; j < columns; ++j) sum[j] += term[j];
  }
}

// A tile of c with its tree, so that the partial sums stay in the second-level cache.
constexpr std::int64_t kTreeRows = 192, kTreeColumns = 192, kTreeTile = kTreeRows * kTreeColumns;

// Calls use(first, size) for each segment of k, in units.
template <class Use>
void for_segments(const ProductTree& tree, std::int64_t k, const Use& use) {
  if (tree.segments.empty()) return use(0, k / tree.unit);
  std::int64_t first = 0;
  for (const std::int64_t size : tree.segments) {
    use(first, size);
    first += size;
  }
}

struct TreeTile {
  const gemm::Kernel& kernel;
  const gemm::Matrix &a, &b;  // of the tile: (rows, k), (k, columns)
  std::int64_t rows, columns, k;
  const ProductTree& tree;
  float* scratch;  // of the kernel

  // Leaf `index`, to rows of c that are `stride` apart. Or c += the leaf, if that is a single sum of the
  // kernel.
  void leaf(int index, float* c, std::int64_t stride, bool add) const {
    bool begun = add;
    for_segments(tree, k, [&](std::int64_t first, std::int64_t size) {
      const Chunk part = exact_block(size, tree.leaves, index);
      if (part.size == 0) return;
      const std::int64_t at = (first + part.offset) * tree.unit;
      kernel.multiply(
          {a.at(0, at), b.at(at, 0), c, stride, rows, columns, part.size * tree.unit, 1.0f, begun}, scratch);
      begun = true;
    });
    for (std::int64_t i = 0; i < rows && !begun; ++i) std::fill_n(c + i * stride, columns, 0.0f);
  }
  // Whether c += leaf has the bits of the sum of c and the leaf. An element of the leaf is rounded once, by
  // the last of its fma, and added to c as a number.
  bool leaf_is_one_sum() const {
    constexpr std::int64_t kLeastBlock = 256;  // of k in one sum, of all kernels (gemm.hpp)
    const std::int64_t units = k / tree.unit;
    return tree.segments.size() < 2 && exact_block(units, tree.leaves, 0).size * tree.unit <= kLeastBlock &&
           exact_block(units, tree.leaves, tree.leaves - 1).size > 0;
  }
  // `free`: memory for a tile for each further level of the tree.
  void sum(int first, int leaves, float* c, std::int64_t stride, float* free) const {
    if (leaves == 1) return leaf(first, c, stride, false);
    if (leaves == 2 && leaf_is_one_sum()) {
      leaf(first, c, stride, false);
      return leaf(first + 1, c, stride, true);
    }
    sum(first, leaves / 2, c, stride, free);
    sum(first + leaves / 2, leaves / 2, free, columns, free + kTreeTile);
    add_tile(c, stride, free, rows, columns);
  }
};

void tree_product(KernelContext::State& state, const gemm::Kernel& kernel, const gemm::Matrix& a,
                  const gemm::Matrix& b, float* c, std::int64_t m, std::int64_t n, std::int64_t k,
                  const ProductTree& tree) {
  constexpr int kLevels = 3;
  static_assert(1 << kLevels == kExactBlocks);
  for_segments(tree, k, [&](std::int64_t, std::int64_t size) {  // leaf 0 has the largest parts
    state.reserve_products(kernel, std::min(n, kTreeColumns),
                           exact_block(size, tree.leaves, 0).size * tree.unit);
  });
  state.reserve_per_thread(kLevels * kTreeTile);
  const std::int64_t across = blocks_of(n, kTreeColumns);
  parallel_for(state, blocks_of(m, kTreeRows) * across, [&](std::int64_t tile, int thread) {
    const std::int64_t row = tile / across * kTreeRows, column = tile % across * kTreeColumns;
    const gemm::Matrix of_a = a.at(row, 0), of_b = b.at(0, column);
    const TreeTile at{.kernel = kernel,
                      .a = of_a,
                      .b = of_b,
                      .rows = std::min(kTreeRows, m - row),
                      .columns = std::min(kTreeColumns, n - column),
                      .k = k,
                      .tree = tree,
                      .scratch = state.product_scratch(thread)};
    at.sum(0, tree.leaves, c + row * n + column, n, state.thread_scratch(thread));
  });
}

}  // namespace

template <>
void tree_matmul<float>(KernelContext& ctx, const float* a, Stored a_stored, const float* b, Stored b_stored,
                        float* c, std::int64_t m, std::int64_t n, std::int64_t k, ProductTree tree) {
  KernelContext::State& state = ctx.state();
  const std::int64_t lda = a_stored == Stored::transposed ? m : k,
                     ldb = b_stored == Stored::transposed ? k : n;
  tree_product(state, *state.f32, matrix(a, false, a_stored, lda), matrix(b, false, b_stored, ldb), c, m, n,
               k, tree);
}

template <>
void tree_matmul<bf16>(KernelContext& ctx, const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored,
                       float* c, std::int64_t m, std::int64_t n, std::int64_t k, ProductTree tree) {
  KernelContext::State& state = ctx.state();
  const std::int64_t lda = a_stored == Stored::transposed ? m : k,
                     ldb = b_stored == Stored::transposed ? k : n;
  tree_product(state, *state.bf16, matrix(a, true, a_stored, lda), matrix(b.data, true, b_stored, ldb), c, m,
               n, k, tree);
}

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
  state.f32->multiply(
      {matrix(a, false, a_stored, lda), matrix(b, false, b_stored, ldb), c, ldc, m, n, k, alpha, accumulate},
      state.product_scratch(thread));
}

template <>
void matmul<float>(KernelContext& ctx, const float* a, Stored a_stored, const float* b, Stored b_stored,
                   float* c, std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!accumulate) fill(ctx, c, 0.0f, m * n);
    return;
  }
  KernelContext::State& state = ctx.state();
  const std::int64_t lda = a_stored == Stored::transposed ? m : k,
                     ldb = b_stored == Stored::transposed ? k : n;
  product(
      state, *state.f32,
      {matrix(a, false, a_stored, lda), matrix(b, false, b_stored, ldb), c, n, m, n, k, 1.0f, accumulate});
}

namespace {

// c = a b, a b + bias or c += a b; bias: (n) or null; c: in f32, or in bf16 if `c_bf16` is not null.
void multiply_bf16(KernelContext& ctx, const bf16* a, Stored a_stored, const WeightMatrix& b, Stored b_stored,
                   const float* bias, float* c, std::int64_t m, std::int64_t n, std::int64_t k,
                   bool accumulate, bf16* c_bf16 = nullptr) {
  KernelContext::State& state = ctx.state();
  const std::int64_t lda = a_stored == Stored::transposed ? m : k,
                     ldb = b_stored == Stored::transposed ? k : n;
  const gemm::Matrix of_b = matrix(b.data, true, b_stored, ldb);
  product(state, *state.bf16,
          {matrix(a, true, a_stored, lda), of_b, c, n, m, n, k, 1.0f, accumulate, bias,
           state.packed.find(state, of_b, b, k, n), c_bf16 == nullptr ? nullptr : &c_bf16->bits});
}

}  // namespace

template <>
void matmul<bf16>(KernelContext& ctx, const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored,
                  float* c, std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k > 0) return multiply_bf16(ctx, a, a_stored, b, b_stored, nullptr, c, m, n, k, accumulate);
  if (!accumulate) fill(ctx, c, 0.0f, m * n);
}

void matmul_to_bf16(KernelContext& ctx, const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored,
                    const float* bias, bf16* c, std::int64_t m, std::int64_t n, std::int64_t k) {
  if (m == 0 || n == 0) return;
  if (k > 0) return multiply_bf16(ctx, a, a_stored, b, b_stored, bias, nullptr, m, n, k, false, c);
  for (std::int64_t i = 0; i < m * n; ++i) c[i] = bf16(bias == nullptr ? 0.0f : bias[i % n]);
}

namespace {

// y of a layer with no inputs.
void without_terms(KernelContext& ctx, const float* bias, float* y, LinearShape s) {
  if (bias != nullptr)
    copy_to_rows(ctx.state(), bias, y, s.tokens, s.out);
  else
    fill(ctx, y, 0.0f, s.tokens * s.out);
}

}  // namespace

template <>
void linear_forward<float>(KernelContext& ctx, const float* x, const float* w, const float* bias, float* y,
                           LinearShape s) {
  KernelContext::State& state = ctx.state();
  if (s.tokens > 0 && s.out > 0 && s.in > 0)
    return product(state, *state.f32,
                   {matrix(x, false, Stored::plain, s.in), matrix(w, false, Stored::transposed, s.in), y,
                    s.out, s.tokens, s.out, s.in, 1.0f, false, bias});
  without_terms(ctx, bias, y, s);
}

template <>
void linear_forward<bf16>(KernelContext& ctx, const bf16* x, WeightMatrix w, const float* bias, float* y,
                          LinearShape s) {
  if (s.tokens > 0 && s.out > 0 && s.in > 0)
    return multiply_bf16(ctx, x, Stored::plain, w, Stored::transposed, bias, y, s.tokens, s.out, s.in, false);
  without_terms(ctx, bias, y, s);
}

void linear_backward_input(KernelContext& ctx, const float* dy, const float* w, float* dx, LinearShape s) {
  matmul(ctx, dy, Stored::plain, w, Stored::plain, dx, s.tokens, s.in, s.out, false);
}

void linear_backward_weight(KernelContext& ctx, const float* dy, const float* x, float* dw, float* dbias,
                            LinearShape s) {
  matmul(ctx, dy, Stored::transposed, x, Stored::plain, dw, s.out, s.in, s.tokens, true);
  if (dbias != nullptr) bias_backward(ctx, dy, dbias, s.tokens, s.out);
}

template <class T>
void add_bias(KernelContext& ctx, const float* bias, T* y, std::int64_t tokens, std::int64_t out) {
  if (out == 0) return;
  parallel_blocks(ctx.state(), tokens, std::max<std::int64_t>(1, kElementBlock / out),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t)
                      for (std::int64_t i = 0; i < out; ++i)
                        y[t * out + i] = T(wide(y[t * out + i]) + bias[i]);
                  });
}

template <class T>
void bias_backward(KernelContext& ctx, const T* dy, float* dbias, std::int64_t tokens, std::int64_t out) {
  KernelContext::State& state = ctx.state();
  const std::int64_t blocks = blocks_of(tokens, kRowBlock);
  float* partials = state.scratch(blocks * out);
  parallel_blocks(state, tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    sum_rows(dy + begin * out, partials + begin / kRowBlock * out, end - begin, out);
  });
  add_partial_rows(state, partials, dbias, blocks, out);
}

WEFT_KERNEL_OF_BOTH(add_bias);
WEFT_KERNEL_OF_BOTH(bias_backward);

}  // namespace weft::kernels::cpu
