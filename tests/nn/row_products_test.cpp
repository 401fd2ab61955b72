// Products of rows with rows against plain loops in f64, and gradients of convolutions' weights on both sides
// of the size from which on a matrix product makes them.
#include <algorithm>
#include <cmath>

#include "nn/kernel_support.hpp"
#include "nn/support.hpp"
#include "weft/nn/conv.hpp"

namespace weft::row_products_test {
namespace {

using namespace kernels;
using kernels::test::Array;
using kernels::test::kUlp;
using kernels::test::random_array;

struct Case {
  std::int64_t m, n, k, more_a, more_b;  // rows of a and b lie k + more apart
};

// Sizes that leave every remainder of rows (by 4), columns (by 4 and 32), lanes (by 16) and chunks (by
// 1024); sizes of 0; and a sum of many chunks.
const Case kCases[] = {{1, 1, 1, 0, 0},     {4, 32, 16, 0, 0},    {3, 5, 7, 2, 1},      {2, 33, 1023, 0, 3},
                       {5, 31, 1024, 1, 0}, {7, 66, 1025, 5, 16}, {6, 2, 300000, 0, 0}, {9, 70, 4113, 0, 0},
                       {0, 5, 9, 0, 0},     {5, 0, 9, 0, 0},      {3, 6, 0, 1, 1}};

TEST(RowProducts, EqualSumsInF64) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << c.m << " x " << c.n << " x " << c.k);
    const std::int64_t lda = c.k + c.more_a, ldb = c.k + c.more_b;
    const auto a = random_array(c.m * lda, 1), b = random_array(c.n * ldb, 2, 0.0, 1.0);
    auto got = kernels::test::garbage(c.m * c.n + 1), other = got;
    KernelContext one(1), three(3);
    row_products(one, a.data(), lda, b.data(), ldb, got.data(), c.m, c.n, c.k);
    row_products(three, a.data(), lda, b.data(), ldb, other.data(), c.m, c.n, c.k);
    ASSERT_TRUE(kernels::test::same_bits(got, other));
    ASSERT_EQ(got.back(), 1e30f);
    for (std::int64_t i = 0; i < c.m; ++i)
      for (std::int64_t j = 0; j < c.n; ++j) {
        double want = 0, sizes = 0;
        for (std::int64_t p = 0; p < c.k; ++p) {
          const double x = static_cast<double>(a[static_cast<std::size_t>(i * lda + p)]) *
                           static_cast<double>(b[static_cast<std::size_t>(j * ldb + p)]);
          want += x, sizes += std::abs(x);
        }
        // 64 products in a lane and one more sum, whatever k is, then one rounding.
        ASSERT_NEAR(got[static_cast<std::size_t>(i * c.n + j)], want,
                    66 * kUlp * sizes + kUlp * std::abs(want))
            << i << ", " << j;
      }
  }
}

// dw of a convolution of 64 channels, kernel 3, padding 1, against loops in f64. With 113 channels out it has
// 65088 elements, with 128 it has 73728. Both in several blocks of pixels and samples, and accumulated twice.
TEST(RowProducts, GradientsOfSmallAndLargeWeights) {
  weft::test::Bench bench;
  constexpr std::int64_t kBatch = 2, kIn = 64, kHeight = 24, kWidth = 20;
  const Tensor x = weft::test::random_tensor(bench.context, {kBatch, kIn, kHeight, kWidth}, "x");
  for (const std::int64_t out : {113, 128}) {
    SCOPED_TRACE(out);
    Conv2d layer(Conv2dConfig{.in = kIn, .out = out, .kernel = 3, .padding = 1});
    materialise(layer, bench.compute);
    initialise(layer, 1);
    const Tensor dy = weft::test::random_tensor(bench.context, {kBatch, out, kHeight, kWidth}, "dy");
    for (int pass = 0; pass < 2; ++pass) {
      Frame frame(bench.compute);
      layer.forward(x, frame);
      layer.backward(dy, frame);
    }
    const auto got = layer.weight->gradient().f32();
    double largest = 0, worst = 0;
    std::size_t at = 0;
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < kIn; ++i)
        for (std::int64_t j = -1; j <= 1; ++j)
          for (std::int64_t k = -1; k <= 1; ++k) {
            double sum = 0;
            for (std::int64_t b = 0; b < kBatch; ++b)
              for (std::int64_t r = std::max<std::int64_t>(0, -j); r < kHeight - std::max<std::int64_t>(0, j);
                   ++r) {
                const float* const of_dy = dy.data_ptr<float>() + ((b * out + o) * kHeight + r) * kWidth;
                const float* const of_x =
                    x.data_ptr<float>() + ((b * kIn + i) * kHeight + r + j) * kWidth + k;
                for (std::int64_t s = std::max<std::int64_t>(0, -k);
                     s < kWidth - std::max<std::int64_t>(0, k); ++s)
                  sum += static_cast<double>(of_dy[s]) * static_cast<double>(of_x[s]);
              }
            largest = std::max(largest, std::abs(2 * sum));
            worst = std::max(worst, std::abs(static_cast<double>(got[at++]) - 2 * sum));
          }
    EXPECT_EQ(at, got.size());
    // By rows: one rounding of the sum of a block, and one for each sum of two. A matrix product: some for
    // each 256 pixels.
    EXPECT_LT(worst, (out == 113 ? 2e-7 : 6e-7) * largest);
  }
}

}  // namespace
}  // namespace weft::row_products_test
