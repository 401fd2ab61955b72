// The products inside attention, and attention with bf16 products.
#include "nn/kernel_support.hpp"
#include "nn/kernels/attention/products.hpp"
#include "nn/kernels/gemm/gemm.hpp"
#include "nn/kernels/reference.hpp"

namespace weft::attention_products_test {
namespace {

using namespace kernels;
using namespace kernels::test;

std::vector<const blocks::Kernel*> all_kernels() {
  std::vector<const blocks::Kernel*> all;
  for (const blocks::Kernel* kernel : {blocks::avx512(), blocks::avx512_bf16()})
    if (kernel != nullptr) all.push_back(kernel);
  return all;
}

struct Case {
  std::int64_t m, n, k;
};
const Case kCases[] = {{1, 1, 1},     {6, 64, 64},  {64, 64, 256}, {256, 64, 64}, {13, 50, 7},
                       {5, 129, 300}, {11, 17, 33}, {2, 96, 513},  {3, 5, 0}};

// c (=, or +=) alpha a b, where c, which has a gap beside each row, is 0.5 before. a: (m, k) or,
// `by_columns`, (k, m).
Array<float> product(const blocks::Kernel& kernel, const Case& c, const Array<float>& a, bool by_columns,
                     const Array<float>& b, float alpha, bool accumulate) {
  const std::int64_t units = kernel.units(c.k), a_line = blocks::padded(by_columns ? c.m : units),
                     b_line = blocks::padded(c.n), ldc = c.n + 3;
  Array<float> of_a = garbage((by_columns ? units : c.m) * a_line), of_b = garbage(units * b_line),
               result(static_cast<std::size_t>(c.m * ldc), 0.5f);
  if (by_columns)
    kernel.down_columns(a.data(), c.m, c.k, c.m, of_a.data(), a_line);
  else
    kernel.along_rows(a.data(), c.k, c.m, c.k, of_a.data(), a_line);
  kernel.down_columns(b.data(), c.n, c.k, c.n, of_b.data(), b_line);
  kernel.multiply({of_a.data(), by_columns ? 1 : a_line, by_columns ? a_line : 1, of_b.data(), b_line,
                   result.data(), ldc, c.m, c.n, units, alpha, accumulate});
  return result;
}

TEST(AttentionProducts, OfFloatsHaveTheBitsOfTheOthers) {
  if (blocks::avx512() == nullptr) GTEST_SKIP() << "this CPU has no AVX-512";
  for (const Case& c : kCases) {
    if (c.k == 0) continue;  // which the others do not make
    const auto b = random_array(c.k * c.n, 2);
    for (const bool by_columns : {false, true})
      for (const bool accumulate : {false, true}) {
        const auto a = random_array(c.m * c.k, 1);
        Array<float> want(static_cast<std::size_t>(c.m * (c.n + 3)), 0.5f),
            scratch(static_cast<std::size_t>(gemm::avx512()->scratch(c.n, c.k)));
        gemm::avx512()->multiply({{a.data(), by_columns ? 1 : c.k, by_columns ? c.m : 1, false},
                                  {b.data(), c.n, 1, false},
                                  want.data(),
                                  c.n + 3,
                                  c.m,
                                  c.n,
                                  c.k,
                                  0.3f,
                                  accumulate},
                                 scratch.data());
        EXPECT_TRUE(same_bits(product(*blocks::avx512(), c, a, by_columns, b, 0.3f, accumulate), want))
            << c.m << " x " << c.n << " x " << c.k;
      }
  }
}

// Numbers of few bits: products and sums are exact in both formats.
TEST(AttentionProducts, OfSmallIntegersAreExact) {
  if (all_kernels().empty()) GTEST_SKIP() << "this CPU has no AVX-512";
  const auto integers = [](std::int64_t n, unsigned seed) {
    Array<float> x = random_array(n, seed, -8, 8);
    for (float& v : x) v = std::trunc(v);
    return x;
  };
  for (const blocks::Kernel* kernel : all_kernels())
    for (const Case& c : kCases)
      for (const bool by_columns : {false, true})
        for (const bool accumulate : {false, true}) {
          const auto a = integers(c.m * c.k, 1), b = integers(c.k * c.n, 2);
          const auto got = product(*kernel, c, a, by_columns, b, 0.25f, accumulate);
          for (std::int64_t i = 0; i < c.m; ++i)
            for (std::int64_t j = 0; j < c.n + 3; ++j) {
              float want = accumulate || j >= c.n ? 0.5f : 0.0f;
              for (std::int64_t p = 0; p < c.k && j < c.n; ++p)
                want += 0.25f * a[static_cast<std::size_t>(by_columns ? p * c.m + i : i * c.k + p)] *
                        b[static_cast<std::size_t>(p * c.n + j)];
              ASSERT_EQ(got[static_cast<std::size_t>(i * (c.n + 3) + j)], want)
                  << c.m << " x " << c.n << " x " << c.k << ", " << kernel->steps << " steps, (" << i << ", "
                  << j << ")";
            }
        }
}

TEST(AttentionProducts, TransposedIsDownTheColumnsOfTheTranspose) {
  if (all_kernels().empty()) GTEST_SKIP() << "this CPU has no AVX-512";
  for (const blocks::Kernel* kernel : all_kernels())
    for (const auto& [rows, columns] : {std::pair{64, 64}, {1, 1}, {16, 32}, {17, 31}, {40, 7}, {64, 33}}) {
      const std::int64_t line = blocks::padded(rows), units = kernel->units(columns), stride = columns + 2;
      const auto from = random_array(rows * stride, 3);
      Array<float> turned(static_cast<std::size_t>(rows * columns)), got = garbage(units * line), want = got;
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j)
          turned[static_cast<std::size_t>(j * rows + i)] = from[static_cast<std::size_t>(i * stride + j)];
      kernel->transposed(from.data(), stride, rows, columns, got.data(), line);
      kernel->down_columns(turned.data(), rows, columns, rows, want.data(), line);
      for (std::int64_t p = 0; p < units; ++p)
        EXPECT_EQ(std::memcmp(got.data() + p * line, want.data() + p * line,
                              static_cast<std::size_t>(rows) * sizeof(float)),
                  0)
            << rows << " x " << columns << ", " << kernel->steps << " steps, row " << p;
    }
}

// Against the reference in f32. A probability's relative error is that of its score. The rounding of q and k
// to 8 bits moves the score by 2^-8 of the scores' size. Sums of dscores and of probabilities have operands
// that are rounded once more. If the CPU does not multiply bf16, the results do not change.
TEST(AttentionInBf16, IsNearTheReference) {
  for (const AttentionShape& s :
       {AttentionShape{1, 1, 1, 1, 1, true}, AttentionShape{2, 3, 4, 2, 5, true},
        AttentionShape{1, 65, 6, 2, 16, true}, AttentionShape{1, 300, 3, 3, 7, true},
        AttentionShape{1, 200, 4, 1, 64, true}}) {
    KernelContext ctx(1);
    const std::int64_t nq = s.batch * s.seq * s.heads * s.head_dim,
                       nk = s.batch * s.seq * s.kv_heads * s.head_dim;
    const auto q = random_array(nq, 1), k = random_array(nk, 2), v = random_array(nk, 3),
               dout = random_array(nq, 4);
    auto out = garbage(nq), want = out, softmax = garbage(s.batch * s.heads * s.seq * kSoftmaxTerms),
         softmax_want = softmax, dq = out, dq_want = out, dk = garbage(nk), dk_want = dk, dv = dk,
         dv_want = dk;
    attention_forward(ctx, q.data(), k.data(), v.data(), out.data(), softmax.data(), s);
    reference::attention_forward(q.data(), k.data(), v.data(), want.data(), softmax_want.data(), s);
    attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), out.data(), softmax.data(), dq.data(),
                       dk.data(), dv.data(), s);
    reference::attention_backward(dout.data(), q.data(), k.data(), v.data(), want.data(), softmax_want.data(),
                                  dq_want.data(), dk_want.data(), dv_want.data(), s);
    constexpr double kUlps = 0x1p16;  // 2^-8
    expect_close(out, want, 2 * kUlps, "out");
    expect_close(log_sums(softmax), log_sums(softmax_want), 2 * kUlps, "log of the sum");
    expect_close(dv, dv_want, 3 * kUlps, "dv");
    if (s.seq > 1) {  // one key: its probability is 1, so dq and dk are 0 up to rounding
      expect_close(dq, dq_want, 4 * kUlps, "dq");
      expect_close(dk, dk_want, 4 * kUlps, "dk");
    }
    if (blocks::avx512_bf16() != nullptr) {
      AttentionShape exact = s;
      exact.bf16_products = false;
      auto other = garbage(nq);
      attention_forward(ctx, q.data(), k.data(), v.data(), other.data(), softmax.data(), exact);
      EXPECT_FALSE(same_bits(out, other));
    }
  }
}

}  // namespace
}  // namespace weft::attention_products_test
