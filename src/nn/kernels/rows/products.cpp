// Products of rows with rows: gradients of convolutions' weights, which are sums over the pixels of a map.
//
// A matrix product sums one element after the other, and its error grows with the number of elements. Here
// each sum runs in 16 lanes for 1024 elements, 64 elements in each lane. Then the lanes are added up in f64.
// This is as fast as other products, since both matrices are read along their rows, so nothing is packed.
#include <algorithm>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

constexpr std::int64_t kChunk = 1024;
// The size of one task: rows of a, and rows of b.
constexpr std::int64_t kRows = 4, kColumns = 32;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

// sums[i * kColumns + j] += Σ a[i, …] b[j, …] over one chunk of n elements. a: (M, n), b: (N, n)
template <int M, int N>
WEFT_INLINE inline void add_chunk(const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                                  double* sums, std::int64_t n) {
  Lanes acc[M][N];
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) acc[i][j] = Lanes{};
  const auto step = [&](const float* of_a, std::int64_t a_step, const float* of_b, std::int64_t b_step)
                        WEFT_INLINE {
                          Lanes rows[M];
#pragma GCC unroll 4
                          for (int i = 0; i < M; ++i)
                            rows[i] = *reinterpret_cast<const Lanes*>(of_a + i * a_step);
#pragma GCC unroll 4
                          for (int j = 0; j < N; ++j) {
                            const Lanes column = *reinterpret_cast<const Lanes*>(of_b + j * b_step);
#pragma GCC unroll 4
                            for (int i = 0; i < M; ++i) acc[i][j] += rows[i] * column;
                          }
                        };
  std::int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes) step(a + at, lda, b + at, ldb);
  if (at < n) {
    float rest_a[M * kLanes] = {}, rest_b[N * kLanes] = {};
    for (int i = 0; i < M; ++i)
      for (std::int64_t k = at; k < n; ++k) rest_a[i * kLanes + k - at] = a[i * lda + k];
    for (int j = 0; j < N; ++j)
      for (std::int64_t k = at; k < n; ++k) rest_b[j * kLanes + k - at] = b[j * ldb + k];
    step(rest_a, kLanes, rest_b, kLanes);
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      double sum = 0;
      for (int lane = 0; lane < kLanes / 2; ++lane)
        sum += static_cast<double>(acc[i][j][lane] + acc[i][j][lane + kLanes / 2]);
      sums[i * kColumns + j] += sum;
    }
}

template <int M>
WEFT_INLINE inline void add_strip(const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                                  double* sums, std::int64_t columns, std::int64_t n) {
  std::int64_t j = 0;
  for (; j + 4 <= columns; j += 4) add_chunk<M, 4>(a, lda, b + j * ldb, ldb, sums + j, n);
  for (; j < columns; ++j) add_chunk<M, 1>(a, lda, b + j * ldb, ldb, sums + j, n);
}

// One task. It computes c (rows, columns), with rows ldc apart.
WEFT_CPU_CLONES(void, products,
                (const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                 std::int64_t ldc, std::int64_t rows, std::int64_t columns, std::int64_t k),
                (a, lda, b, ldb, c, ldc, rows, columns, k)) {
  double sums[kRows * kColumns] = {};
  for (std::int64_t begin = 0; begin < k; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, k - begin);
    switch (rows) {
      case 1: add_strip<1>(a + begin, lda, b + begin, ldb, sums, columns, n); break;
      case 2: add_strip<2>(a + begin, lda, b + begin, ldb, sums, columns, n); break;
      case 3: add_strip<3>(a + begin, lda, b + begin, ldb, sums, columns, n); break;
      default: add_strip<4>(a + begin, lda, b + begin, ldb, sums, columns, n); break;
    }
  }
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) c[i * ldc + j] = static_cast<float>(sums[i * kColumns + j]);
}

}  // namespace

void row_products(KernelContext& ctx, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                  float* c, std::int64_t m, std::int64_t n, std::int64_t k) {
  const std::int64_t strips = blocks_of(m, kRows), blocks = blocks_of(n, kColumns);
  parallel_for(ctx.state(), strips * blocks, [&](std::int64_t task, int) {
    const std::int64_t i = task % strips * kRows, j = task / strips * kColumns;
    products(a + i * lda, lda, b + j * ldb, ldb, c + i * n + j, n, std::min(kRows, m - i),
             std::min(kColumns, n - j), k);
  });
}

}  // namespace weft::kernels::cpu
