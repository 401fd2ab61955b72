// Compares the fast kernels with the plain-loop reference, and the reference's backward passes with finite
// differences of its forward passes in double. Tests independence of the number of threads, and the checks.
//
// Tolerances. kUlp = 2^-24 is the largest relative error of one f32 rounding. A sum of n products, in any
// order, is off by at most (n + 2) kUlp times the sum of the products' absolute values, to first order.
// Matrix products must be within exactly that. Elsewhere a result is compared relative to the largest
// reference value of its array, with a multiple of kUlp that counts the roundings on its way and is stated
// where it is used.
#include "weft/nn/kernels.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "nn/kernel_support.hpp"
#include "nn/kernels/attention/products.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "nn/kernels/cpu_state.hpp"
#include "nn/kernels/reference.hpp"
#include "nn/kernels/reference_maps.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels::kernels_test {
namespace {

using namespace test;

// --- building blocks

TEST(Exp, IsWithinItsBoundOfTheTrueValue) {
  double worst = 0.0;
  for (double at = -86.4; at < 88.7; at += 0.00037) {
    const auto x = static_cast<float>(at);
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(static_cast<double>(exp_f32(x)) - want) / ulp);
  }
  EXPECT_LE(worst, 1.1);
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
}

TEST(Exp, EndsOfTheRange) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_f32(-infinity), 0.0f);
  EXPECT_EQ(exp_f32(-100.0f), 0.0f);
  EXPECT_EQ(exp_f32(infinity), infinity);
  EXPECT_EQ(exp_f32(88.73f), infinity);
  EXPECT_EQ(exp_f32(1000.0f), infinity);
  EXPECT_TRUE(std::isnan(exp_f32(std::numeric_limits<float>::quiet_NaN())));
}

// --- matrix products

struct Product {
  std::int64_t m, n, k;
};
const Product kProducts[] = {{1, 1, 1},      {1, 7, 3},     {5, 1, 13},     {3, 5, 1},      {17, 31, 13},
                             {64, 64, 64},   {65, 33, 127}, {128, 1, 257},  {640, 96, 160}, {96, 640, 150},
                             {48, 17, 4099}, {1, 129, 65},  {0, 5, 3},      {5, 0, 3},      {5, 3, 0},
                             {0, 0, 3},      {0, 0, 0},     {197, 25, 601}, {193, 4150, 3}};

// The products of f32, and of bf16 that are widened, that this machine has.
std::vector<const gemm::Kernel*> all_products() {
  std::vector<const gemm::Kernel*> all = {gemm::plain()};
  for (const gemm::Kernel* own : {gemm::avx2(), gemm::avx512()})
    if (own != nullptr) all.push_back(own);
  return all;
}
std::vector<const gemm::Kernel*> all_bf16_products() {
  std::vector<const gemm::Kernel*> all = all_products();
  if (gemm::avx512_bf16() != nullptr) all.push_back(gemm::avx512_bf16());
  return all;
}
// In f32, too, if `kernel` has such products.
void choose(KernelContext& ctx, const gemm::Kernel* kernel) {
  ctx.state().bf16 = kernel;
  if (kernel != gemm::avx512_bf16()) ctx.state().f32 = kernel;
}

// In is float or bf16. Held to the bound of the file's head.
template <class In>
void matmul_equals_reference() {
  KernelContext ctx(1);
  for (const Product& p : kProducts) {
    for (const Stored a_stored : {Stored::plain, Stored::transposed}) {
      for (const Stored b_stored : {Stored::plain, Stored::transposed}) {
        for (const bool accumulate : {false, true}) {
          const auto a = random_array<In>(p.m * p.k, 1), b = random_array<In>(p.k * p.n, 2);
          const auto before = accumulate ? random_array(p.m * p.n, 3) : garbage(p.m * p.n);
          auto want = before;
          Array<double> abs_a(a.size()), abs_b(b.size()), bound(before.size());
          for (std::size_t i = 0; i < a.size(); ++i)
            abs_a[i] = std::abs(static_cast<double>(static_cast<float>(a[i])));
          for (std::size_t i = 0; i < b.size(); ++i)
            abs_b[i] = std::abs(static_cast<double>(static_cast<float>(b[i])));
          for (std::size_t i = 0; accumulate && i < before.size(); ++i)
            bound[i] = std::abs(static_cast<double>(before[i]));
          reference::matmul(a.data(), a_stored, b.data(), b_stored, want.data(), p.m, p.n, p.k, accumulate);
          reference::matmul(abs_a.data(), a_stored, abs_b.data(), b_stored, bound.data(), p.m, p.n, p.k,
                            accumulate);
          for (const gemm::Kernel* own : std::is_same_v<In, bf16> ? all_bf16_products() : all_products()) {
            SCOPED_TRACE(own->name);
            choose(ctx, own);
            auto got = before;
            matmul(ctx, a.data(), a_stored, b.data(), b_stored, got.data(), p.m, p.n, p.k, accumulate);
            for (std::size_t i = 0; i < got.size(); ++i) {
              ASSERT_NEAR(got[i], want[i], static_cast<double>(p.k + 2) * kUlp * bound[i])
                  << p.m << "x" << p.n << "x" << p.k << " accumulate " << accumulate << " at " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Matmul, F32EqualsReference) { matmul_equals_reference<float>(); }
TEST(Matmul, Bf16EqualsReference) { matmul_equals_reference<bf16>(); }

// The bits of a product are those that gemm.hpp promises: whole, in pieces, on matrices with other steps,
// and in a c with other steps.
template <class In>
void own_bits(const gemm::Kernel& own, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
              bool accumulate, bool with_bias, Stored a_stored, Stored b_stored) {
  SCOPED_TRACE(testing::Message() << m << "x" << n << "x" << k << " alpha " << alpha << " accumulate "
                                  << accumulate << " bias " << with_bias);
  const std::int64_t gap = 5;  // between the rows of what is stored, here and there
  const bool a_flip = a_stored == Stored::transposed, b_flip = b_stored == Stored::transposed;
  const std::int64_t a_stride = (a_flip ? m : k) + gap, b_stride = (b_flip ? k : n) + gap;
  const auto a = random_array<In>(a_stride * (a_flip ? k : m), 1),
             b = random_array<In>(b_stride * (b_flip ? n : k), 2);
  const auto bias = random_array(n, 3), before = random_array(m * n, 4);
  const auto matrix = [](const In* data, bool flip, std::int64_t stride) {
    return gemm::Matrix{data, flip ? 1 : stride, flip ? stride : 1, std::is_same_v<In, bf16>};
  };
  const gemm::Matrix of_a = matrix(a.data(), a_flip, a_stride), of_b = matrix(b.data(), b_flip, b_stride);
  const auto at = [](const gemm::Matrix& x, std::int64_t row, std::int64_t column) {
    return static_cast<float>(static_cast<const In*>(x.data)[row * x.row_step + column * x.column_step]);
  };
  const bool fused = &own != gemm::plain() || weft::kernels::gemm::plain_is_fused();
  const auto multiply_add = [&](float x, float y, float z) {
    if (fused) return std::fma(x, y, z);
    const volatile float rounded = x * y;
    return rounded + z;
  };
  Array<float> want(before.size());
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      float& result = want[static_cast<std::size_t>(i * n + j)];
      for (std::int64_t first = 0; first < k; first += 256) {
        float sum = 0.0f;
        for (std::int64_t p = first; p < std::min(k, first + 256); ++p)
          sum = multiply_add(at(of_a, i, p), at(of_b, p, j), sum);
        if (first > 0)
          result = multiply_add(alpha, sum, result);
        else if (accumulate)
          result = multiply_add(alpha, sum, before[static_cast<std::size_t>(i * n + j)]);
        else if (with_bias)
          result = multiply_add(alpha, sum, bias[static_cast<std::size_t>(j)]);
        else
          result = alpha * sum;
      }
    }
  Array<float> scratch(static_cast<std::size_t>(own.scratch(n, k)));
  for (const auto& [rows, columns] : {std::pair{m, n}, {std::int64_t{3}, n}, {m, std::int64_t{29}}}) {
    auto c = garbage(m * (n + gap));
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; accumulate && j < n; ++j)
        c[static_cast<std::size_t>(i * (n + gap) + j)] = before[static_cast<std::size_t>(i * n + j)];
    for (std::int64_t row = 0; row < m; row += rows)
      for (std::int64_t column = 0; column < n; column += columns)
        own.multiply({of_a.at(row, 0), of_b.at(0, column), c.data() + row * (n + gap) + column, n + gap,
                      std::min(rows, m - row), std::min(columns, n - column), k, alpha, accumulate,
                      with_bias ? bias.data() + column : nullptr},
                     scratch.data());
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j)
        ASSERT_EQ(c[static_cast<std::size_t>(i * (n + gap) + j)], want[static_cast<std::size_t>(i * n + j)])
            << rows << " rows, " << columns << " columns at a time, at " << i << ", " << j;
      for (std::int64_t j = n; j < n + gap; ++j)  // nothing beside c is written
        ASSERT_EQ(c[static_cast<std::size_t>(i * (n + gap) + j)], 1e30f);
    }
  }
}

TEST(OwnProducts, HaveTheBitsThatAreStated) {
  for (const gemm::Kernel* own : all_products())
    for (const Stored a_stored : {Stored::plain, Stored::transposed})
      for (const Stored b_stored : {Stored::plain, Stored::transposed}) {
        SCOPED_TRACE(own->name);
        own_bits<float>(*own, 1, 1, 1, 1.0f, false, false, a_stored, b_stored);
        own_bits<float>(*own, 7, 31, 19, 0.3f, true, false, a_stored, b_stored);
        own_bits<float>(*own, 9, 50, 257, 1.0f, false, true, a_stored, b_stored);
        own_bits<float>(*own, 195, 71, 515, 0.3f, false, false, a_stored, b_stored);
        own_bits<float>(*own, 20, 97, 600, 1.0f, true, false, a_stored, b_stored);
        own_bits<bf16>(*own, 6, 77, 261, 1.0f, true, false, a_stored, b_stored);
        own_bits<bf16>(*own, 194, 24, 33, 1.0f, false, true, a_stored, b_stored);
        // Several blocks of columns of few rows, more steps than a is packed for at once, and few steps of
        // many rows.
        own_bits<float>(*own, 21, 401, 520, 1.0f, false, true, a_stored, b_stored);
        own_bits<float>(*own, 5, 60, 4100, 0.3f, true, false, a_stored, b_stored);
        own_bits<float>(*own, 18, 50, 4100, 1.0f, false, false, a_stored, b_stored);
        own_bits<bf16>(*own, 397, 110, 16, 0.3f, false, true, a_stored, b_stored);
        own_bits<float>(*own, 260, 53, 7, 1.0f, true, false, a_stored, b_stored);
      }
}

// A large c of few steps is written past the caches: the bits of the same in parts that are not.
TEST(OwnProducts, AreTheSameInAndPastTheCaches) {
  constexpr std::int64_t m = 4099, n = 1040, k = 8;  // 17 MB
  const auto a = random_array<bf16>(m * k, 1), b = random_array<bf16>(k * n, 2);
  const auto bias = random_array(n, 3);
  for (const gemm::Kernel* own : all_bf16_products()) {
    SCOPED_TRACE(own->name);
    Array<float> scratch(static_cast<std::size_t>(own->scratch(n, k)));
    for (const float* added : {static_cast<const float*>(nullptr), bias.data()})
      for (const std::int64_t offset : {16, 1}) {  // aligned, or not
        auto large = garbage(m * n + 32), parts = garbage(m * n);
        const auto address = reinterpret_cast<std::uintptr_t>(large.data());
        float* const c = large.data() + (64 - address % 64) / 4 % 16 + offset % 16;
        const gemm::Matrix of_a{a.data(), 1, m, true}, of_b{b.data(), n, 1, true};
        own->multiply({of_a, of_b, c, n, m, n, k, 1.0f, false, added}, scratch.data());
        for (std::int64_t row = 0; row < m; row += 1000)
          own->multiply({of_a.at(row, 0), of_b, parts.data() + row * n, n,
                         std::min<std::int64_t>(1000, m - row), n, k, 1.0f, false, added},
                        scratch.data());
        ASSERT_EQ(std::memcmp(c, parts.data(), sizeof(float) * static_cast<std::size_t>(m * n)), 0);
        ASSERT_EQ(c[m * n], 1e30f);  // nothing beside c is written
      }
  }
}

TEST(Matmul, NumberOfThreadsChangesNoBits) {
  for (const Product& p : {Product{560, 392, 1136}, {128, 1024, 2048}, {8, 2048, 1030}}) {
    const auto a = random_array(p.m * p.k, 1), b = random_array(p.k * p.n, 2);
    const auto narrow_a = random_array<bf16>(p.m * p.k, 1), narrow_b = random_array<bf16>(p.k * p.n, 2);
    for (const Stored stored : {Stored::plain, Stored::transposed}) {
      Array<float> want, narrow_want;
      for (const int threads : {1, 2, 3}) {
        KernelContext ctx(threads);
        auto got = garbage(p.m * p.n), narrow = garbage(p.m * p.n);
        matmul(ctx, a.data(), Stored::plain, b.data(), stored, got.data(), p.m, p.n, p.k, false);
        matmul(ctx, narrow_a.data(), Stored::plain, narrow_b.data(), stored, narrow.data(), p.m, p.n, p.k,
               false);
        if (threads == 1) want = got, narrow_want = narrow;
        ASSERT_EQ(got, want) << p.m << "x" << p.n << "x" << p.k << " on " << threads << " threads";
        ASSERT_EQ(narrow, narrow_want) << "bf16 " << p.m << "x" << p.n << "x" << p.k;
      }
    }
  }
}

TEST(Linear, Bf16AddsTheBias) {
  for (const gemm::Kernel* own : all_bf16_products())
    for (const LinearShape s : {LinearShape{1, 1, 1}, LinearShape{7, 13, 5}, LinearShape{131, 67, 129},
                                LinearShape{3, 1100, 1060}, LinearShape{0, 3, 4}, LinearShape{3, 0, 4}}) {
      KernelContext ctx(1);
      choose(ctx, own);
      const auto x = random_array<bf16>(s.tokens * s.in, 1), w = random_array<bf16>(s.out * s.in, 2);
      Array<float> wide_x(x.begin(), x.end()), wide_w(w.begin(), w.end());
      const auto bias = random_array(s.out, 3);
      for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
        auto got = garbage(s.tokens * s.out), want = garbage(s.tokens * s.out);
        linear_forward(ctx, x.data(), w.data(), b, got.data(), s);
        reference::linear_forward(wide_x.data(), wide_w.data(), b, want.data(), s);
        expect_close(got, want, static_cast<double>(s.in + 2), "y");
      }
    }
}

TEST(Matmul,
     IntegersAreExactInBf16) {  // small integers: no rounding anywhere, so any misplaced element shows
  KernelContext ctx(1);
  const std::int64_t m = 33, n = 47, k = 65;
  Array<bf16> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n));
  for (std::size_t i = 0; i < a.size(); ++i)
    a[i] = bf16(static_cast<float>(static_cast<int>(i * 7 % 17) - 8));
  for (std::size_t i = 0; i < b.size(); ++i)
    b[i] = bf16(static_cast<float>(static_cast<int>(i * 5 % 13) - 6));
  auto got = zeros(m * n), want = zeros(m * n);
  matmul(ctx, a.data(), Stored::plain, b.data(), Stored::plain, got.data(), m, n, k, false);
  reference::matmul(a.data(), Stored::plain, b.data(), Stored::plain, want.data(), m, n, k, false);
  EXPECT_EQ(got, want);
}

TEST(Linear, EqualsReference) {
  for (const gemm::Kernel* own : all_products())
    for (const LinearShape s : {LinearShape{1, 1, 1}, LinearShape{7, 13, 5}, LinearShape{131, 67, 129},
                                LinearShape{0, 3, 4}, LinearShape{3, 0, 4}}) {
      KernelContext ctx(1);
      choose(ctx, own);
      const auto x = random_array(s.tokens * s.in, 1), w = random_array(s.out * s.in, 2),
                 bias = random_array(s.out, 3), dy = random_array(s.tokens * s.out, 4);
      // A sum of n terms of size up to 1. The largest result is near sqrt(n)/2, so n + 2 ulps of it allow
      // more than the roundings of a random sum and far less than one misplaced term.
      for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
        auto got = garbage(s.tokens * s.out), want = garbage(s.tokens * s.out);
        linear_forward(ctx, x.data(), w.data(), b, got.data(), s);
        reference::linear_forward(x.data(), w.data(), b, want.data(), s);
        expect_close(got, want, static_cast<double>(s.in + 2), "y");
      }
      auto dx = garbage(s.tokens * s.in), dx_want = dx;
      linear_backward_input(ctx, dy.data(), w.data(), dx.data(), s);
      reference::linear_backward_input(dy.data(), w.data(), dx_want.data(), s);
      expect_close(dx, dx_want, static_cast<double>(s.out + 2), "dx");
      auto dw = random_array(s.out * s.in, 5), dw_want = dw, dbias = random_array(s.out, 6),
           dbias_want = dbias;
      linear_backward_weight(ctx, dy.data(), x.data(), dw.data(), dbias.data(), s);
      reference::linear_backward_weight(dy.data(), x.data(), dw_want.data(), dbias_want.data(), s);
      expect_close(dw, dw_want, static_cast<double>(s.tokens + 2), "dw");
      expect_close(dbias, dbias_want, static_cast<double>(s.tokens + 2), "dbias");
      linear_backward_weight(ctx, dy.data(), x.data(), dw.data(), nullptr, s);  // without a bias
      reference::linear_backward_weight<float>(dy.data(), x.data(), dw_want.data(), nullptr, s);
      expect_close(dw, dw_want, static_cast<double>(s.tokens + 2), "dw");
    }
}

// --- norm, embedding, rope

struct RowsByDim {
  std::int64_t rows, dim;
};

TEST(RmsNorm, EqualsReference) {
  KernelContext ctx(1);
  for (const RowsByDim s :
       {RowsByDim{1, 1}, RowsByDim{3, 7}, RowsByDim{65, 31}, RowsByDim{129, 192}, RowsByDim{0, 8}}) {
    const auto x = random_array(s.rows * s.dim, 1), w = random_array(s.dim, 2),
               dy = random_array(s.rows * s.dim, 3);
    const float eps = 1e-5f;
    auto y = garbage(s.rows * s.dim), inv = garbage(s.rows), y_want = y, inv_want = inv;
    rms_norm_forward(ctx, x.data(), w.data(), y.data(), inv.data(), s.rows, s.dim, eps);
    reference::rms_norm_forward(x.data(), w.data(), y_want.data(), inv_want.data(), s.rows, s.dim, eps);
    // Sixteen interleaved sums of dim/16 squares, then a root, a quotient and two products.
    const double ulps = static_cast<double>(s.dim) / 16.0 + 12.0;
    expect_close(y, y_want, ulps, "y");
    expect_close(inv, inv_want, ulps, "inv_rms");
    auto dx = garbage(s.rows * s.dim), dw = random_array(s.dim, 4), dx_want = dx, dw_want = dw;
    rms_norm_backward(ctx, dy.data(), x.data(), w.data(), inv.data(), dx.data(), dw.data(), s.rows, s.dim);
    reference::rms_norm_backward(dy.data(), x.data(), w.data(), inv.data(), dx_want.data(), dw_want.data(),
                                 s.rows, s.dim);
    // dx is a difference of two terms of its own size (at dim 1 they all but cancel), both made of inv_rms^3.
    expect_close(dx, dx_want, s.dim == 1 ? 1e6 : 2.0 * ulps, "dx");
    expect_close(dw, dw_want, static_cast<double>(s.rows) + 8.0, "dweight");
    auto in_place = x;
    rms_norm_forward(ctx, in_place.data(), w.data(), in_place.data(), inv.data(), s.rows, s.dim, eps);
    EXPECT_TRUE(same_bits(in_place, y));
    in_place = dy;
    auto dw_again = random_array(s.dim, 4);
    rms_norm_backward(ctx, in_place.data(), x.data(), w.data(), inv.data(), in_place.data(), dw_again.data(),
                      s.rows, s.dim);
    EXPECT_TRUE(same_bits(in_place, dx));
    EXPECT_TRUE(same_bits(dw_again, dw));
  }
}

TEST(Embedding, EqualsReferenceToTheBit) {  // copies, and sums in the same order
  KernelContext ctx(1);
  const std::int64_t tokens = 201, vocab = 11;
  for (const std::int64_t dim : {1, 63, 65, 130}) {
    Array<std::int64_t> ids(tokens);
    for (std::int64_t t = 0; t < tokens; ++t) ids[static_cast<std::size_t>(t)] = t * t % vocab;
    const auto dy = random_array(tokens * dim, 2);
    for (const VocabPart& part :
         {VocabPart(vocab), VocabPart(0, 4, vocab), VocabPart(4, 7, vocab), VocabPart(11, 0, vocab)}) {
      const auto table = random_array(part.count * dim, 1);
      auto y = garbage(tokens * dim), y_want = y, dtable = random_array(part.count * dim, 3),
           dtable_want = dtable;
      embedding_forward(ctx, ids.data(), table.data(), y.data(), tokens, part, dim);
      reference::embedding_forward(ids.data(), table.data(), y_want.data(), tokens, part, dim);
      EXPECT_TRUE(same_bits(y, y_want));
      embedding_backward(ctx, ids.data(), dy.data(), dtable.data(), tokens, part, dim);
      reference::embedding_backward(ids.data(), dy.data(), dtable_want.data(), tokens, part, dim);
      EXPECT_TRUE(same_bits(dtable, dtable_want));
    }
  }
}

TEST(Embedding, NamesAnIdOutsideTheVocabulary) {
  KernelContext ctx(1);
  const std::int64_t ids[] = {3, 300};
  auto table = zeros(4 * 256), y = zeros(2 * 4);
  EXPECT_EQ(message_of([&] { embedding_forward(ctx, ids, table.data(), y.data(), 2, 256, 4); }),
            "embedding: token 1 has id 300; expected 0 <= id < 256 (vocab)");
  EXPECT_EQ(message_of([&] { embedding_backward(ctx, ids, y.data(), table.data(), 2, 256, 4); }),
            "embedding: token 1 has id 300; expected 0 <= id < 256 (vocab)");
}

TEST(Rope, TablesAreTheF32Angles) {
  const std::int64_t head_dim = 32, positions = 1024, half = head_dim / 2;
  auto cosine = zeros(positions * half), sine = zeros(positions * half);
  rope_tables(10000.0f, head_dim, positions, cosine.data(), sine.data());
  Array<double> cosine_want(cosine.size()), sine_want(sine.size());
  reference::rope_tables(10000.0, head_dim, positions, cosine_want.data(), sine_want.data());
  for (std::int64_t p = 0; p < positions; ++p) {
    for (std::int64_t i = 0; i < half; ++i) {
      const auto at = static_cast<std::size_t>(p * half + i);
      // exponent, power, reciprocal, product: each off by one ulp at most, and the exponent's by |ln theta|
      // times as much
      const double angle = static_cast<double>(p) *
                           std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      ASSERT_NEAR(cosine[at], cosine_want[at], (angle * 16.0 + 2.0) * kUlp);
      ASSERT_NEAR(sine[at], sine_want[at], (angle * 16.0 + 2.0) * kUlp);
    }
  }
}

TEST(Rope, EqualsReferenceAndTurnsBack) {
  KernelContext ctx(1);
  for (const RopeShape s :
       {RopeShape{1, 1, 1, 2}, RopeShape{2, 67, 3, 10}, RopeShape{3, 5, 2, 64}, RopeShape{0, 4, 1, 8}}) {
    const std::int64_t n = s.batch * s.seq * s.heads * s.head_dim;
    auto cosine = zeros(s.seq * s.head_dim / 2), sine = cosine;
    rope_tables(10000.0f, s.head_dim, s.seq, cosine.data(), sine.data());
    const auto x = random_array(n, 1);
    auto y = garbage(n), want = y;
    rope_forward(ctx, x.data(), cosine.data(), sine.data(), y.data(), s);
    reference::rope_forward(x.data(), cosine.data(), sine.data(), want.data(), s);
    expect_close(y, want, 4.0, "y");  // two products and a sum
    auto back = y, back_want = garbage(n);
    rope_backward(ctx, back.data(), cosine.data(), sine.data(), back.data(), s);  // in place
    reference::rope_backward(y.data(), cosine.data(), sine.data(), back_want.data(), s);
    expect_close(back, back_want, 4.0, "dx");
    expect_close(back, x, 16.0, "turned and turned back");  // cos^2 + sin^2 is 1 to a few ulps
  }
}

// --- attention

const AttentionShape kAttentions[] = {{1, 1, 1, 1, 1},   {2, 3, 4, 2, 5},   {1, 64, 2, 1, 16},
                                      {2, 65, 6, 2, 16}, {1, 131, 3, 3, 7}, {1, 200, 4, 1, 32},
                                      {0, 7, 2, 1, 8},   {2, 0, 2, 2, 8}};

TEST(Attention, EqualsReference) {
  for (const gemm::Kernel* own : all_products())
    for (const AttentionShape& s : kAttentions) {
      KernelContext ctx(1);
      choose(ctx, own);
      const std::int64_t nq = s.batch * s.seq * s.heads * s.head_dim,
                         nk = s.batch * s.seq * s.kv_heads * s.head_dim;
      const auto q = random_array(nq, 1, -2.0, 2.0), k = random_array(nk, 2, -2.0, 2.0),
                 v = random_array(nk, 3), dout = random_array(nq, 4);
      auto out = garbage(nq), out_want = out, softmax = garbage(s.batch * s.heads * s.seq * kSoftmaxTerms),
           softmax_want = softmax;
      attention_forward(ctx, q.data(), k.data(), v.data(), out.data(), softmax.data(), s);
      reference::attention_forward(q.data(), k.data(), v.data(), out_want.data(), softmax_want.data(), s);
      // Scores are up to about sqrt(head_dim) * 4/3. Their error, head_dim ulps of the terms at most, is the
      // relative error of a probability. A result is an average of values of size 1 with these probabilities.
      const double ulps = 8.0 * static_cast<double>(s.head_dim) + 16.0;
      expect_close(out, out_want, ulps, "out");
      expect_close(log_sums(softmax), log_sums(softmax_want), ulps, "log of the sum");
      auto dq = garbage(nq), dk = garbage(nk), dv = garbage(nk), dq_want = dq, dk_want = dk, dv_want = dv;
      attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), out.data(), softmax.data(),
                         dq.data(), dk.data(), dv.data(), s);
      reference::attention_backward(dout.data(), q.data(), k.data(), v.data(), out_want.data(),
                                    softmax_want.data(), dq_want.data(), dk_want.data(), dv_want.data(), s);
      if (s.seq == 1) {  // one key: its probability is 1, so dq and dk are 0 up to rounding
        for (float x : dq) EXPECT_NEAR(x, 0.0, 1e-5);
        for (float x : dk) EXPECT_NEAR(x, 0.0, 1e-5);
      } else {
        expect_close(dq, dq_want, 4.0 * ulps, "dq");
        expect_close(dk, dk_want, 4.0 * ulps, "dk");
      }
      expect_close(dv, dv_want, 4.0 * ulps, "dv");
    }
}

TEST(Attention, LargeScoresStayFinite) {
  KernelContext ctx(1);
  const AttentionShape s{1, 70, 1, 1, 8};
  const auto q = random_array(70 * 8, 1, -100.0, 100.0), k = random_array(70 * 8, 2, -100.0, 100.0),
             v = random_array(70 * 8, 3);
  auto out = garbage(70 * 8), softmax = garbage(70 * kSoftmaxTerms);
  attention_forward(ctx, q.data(), k.data(), v.data(), out.data(), softmax.data(), s);
  for (float x : out) EXPECT_LE(std::abs(x), 1.0001f);
  for (float x : softmax) EXPECT_TRUE(std::isfinite(x));
}

// q, k, v and dout as reference and kernels take them.
struct Operands {
  Array<float> q, k, v, dout;
};
Array<double> in_f64(const Array<float>& x) { return {x.begin(), x.end()}; }

// Scores near `score` that f32 holds exactly, as it does all products and sums on the way: halves up to 3,
// and in front of each query 4 score, of each key 1. head_dim: 16
Operands operands_of_exact_scores(std::int64_t nq, std::int64_t nk, float score) {
  const auto halves = [](std::int64_t n, unsigned seed, float first) {
    Array<float> x = random_array(n, seed, -6.5, 6.5);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % 16 == 0 ? first : std::round(x[i]) / 2;
    return x;
  };
  return {halves(nq, 1, 4 * score), halves(nk, 2, 1), random_array(nk, 3), random_array(nq, 4)};
}

// The expected value in f64. Feature 0, which scores are large in, has a tolerance of its own.
void expect_near(const Array<float>& got, const Array<double>& want, double tolerance,
                 const std::string& what) {
  double largest[2] = {0, 0};
  for (std::size_t i = 0; i < want.size(); ++i)
    largest[i % 16 == 0] = std::max(largest[i % 16 == 0], std::abs(want[i]));
  for (std::size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(got[i], want[i], tolerance * std::max(largest[i % 16 == 0], largest[0]))
        << what << "[" << i << "]";
}

// One f32 for the logarithm of the sum of e^score would be off by 0.03 at 524288, and each probability by 3
// %.
TEST(Attention, ProbabilitiesKeepTheirDigitsWhereScoresAreLarge) {
  for (const gemm::Kernel* own : all_products())
    for (const bool bf16 : {false, true})
      for (const float score : {0.0f, 512.0f, 524288.0f, -524288.0f})
        for (const FullAttentionShape& s : {FullAttentionShape{2, 70, 70, 4, 2, 16, bf16},
                                            {1, 300, 300, 2, 1, 16, bf16},
                                            {1, 65, 300, 2, 1, 16, bf16}}) {
          SCOPED_TRACE(testing::Message() << "scores near " << score << ", " << s.queries << " queries, "
                                          << s.keys << " keys" << (bf16 ? ", bf16" : ""));
          KernelContext ctx(s.batch == 1 ? 3 : 1);  // dq apart from dk and dv, and together with them
          choose(ctx, own);
          const std::int64_t nq = s.batch * s.queries * s.heads * s.head_dim,
                             nk = s.batch * s.keys * s.kv_heads * s.head_dim,
                             terms = s.batch * s.heads * s.queries * kSoftmaxTerms;
          const Operands x = operands_of_exact_scores(nq, nk, score);
          auto out = garbage(nq), softmax = garbage(terms), dq = out, dk = garbage(nk), dv = dk;
          const auto q = in_f64(x.q), k = in_f64(x.k), v = in_f64(x.v), dout = in_f64(x.dout);
          auto out_want = in_f64(out), softmax_want = in_f64(softmax), dq_want = out_want,
               dk_want = in_f64(dk), dv_want = dk_want;
          if (s.queries == s.keys) {
            const AttentionShape of{s.batch, s.keys, s.heads, s.kv_heads, s.head_dim, bf16};
            attention_forward(ctx, x.q.data(), x.k.data(), x.v.data(), out.data(), softmax.data(), of);
            attention_backward(ctx, x.dout.data(), x.q.data(), x.k.data(), x.v.data(), out.data(),
                               softmax.data(), dq.data(), dk.data(), dv.data(), of);
            reference::attention_forward(q.data(), k.data(), v.data(), out_want.data(), softmax_want.data(),
                                         of);
            reference::attention_backward(dout.data(), q.data(), k.data(), v.data(), out_want.data(),
                                          softmax_want.data(), dq_want.data(), dk_want.data(), dv_want.data(),
                                          of);
          } else {
            full_attention_forward(ctx, x.q.data(), x.k.data(), x.v.data(), nullptr, out.data(),
                                   softmax.data(), s);
            full_attention_backward(ctx, x.dout.data(), x.q.data(), x.k.data(), x.v.data(), nullptr,
                                    out.data(), softmax.data(), dq.data(), dk.data(), dv.data(), nullptr, s);
            reference::full_attention_forward(q.data(), k.data(), v.data(), {}, out_want.data(),
                                              softmax_want.data(), s);
            reference::full_attention_backward(dout.data(), q.data(), k.data(), v.data(), {}, out_want.data(),
                                               softmax_want.data(), dq_want.data(), dk_want.data(),
                                               dv_want.data(), static_cast<double*>(nullptr), s);
          }
          const double tolerance = bf16 && blocks::avx512_bf16() != nullptr ? 3 * 0x1p-8 : 64 * kUlp;
          expect_near(out, out_want, tolerance, "out");
          expect_near(dq, dq_want, tolerance, "dq");
          expect_near(dk, dk_want, tolerance, "dk");
          expect_near(dv, dv_want, tolerance, "dv");
        }
}

TEST(Attention, NanIsNotHidden) {
  KernelContext ctx(1);
  const AttentionShape s{1, 20, 1, 1, 4};
  auto q = random_array(80, 1);
  const auto k = random_array(80, 2), v = random_array(80, 3);
  q[10 * 4] = std::numeric_limits<float>::quiet_NaN();
  auto out = garbage(80), softmax = garbage(20 * kSoftmaxTerms);
  attention_forward(ctx, q.data(), k.data(), v.data(), out.data(), softmax.data(), s);
  for (std::size_t i = 0; i < 80; ++i) EXPECT_EQ(std::isnan(out[i]), i / 4 == 10) << i;
}

TEST(Attention, RefusesHeadsThatDoNotDivide) {
  KernelContext ctx(1);
  constexpr const float* kNone = nullptr;
  EXPECT_EQ(message_of([&] {
              attention_forward(ctx, kNone, nullptr, nullptr, nullptr, nullptr, {1, 0, 5, 2, 4});
            }),
            "attention_forward: 5 query heads over 2 key/value heads; expected a multiple");
  EXPECT_EQ(message_of([&] {
              attention_backward(ctx, kNone, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                 nullptr, {1, 0, 5, 0, 4});
            }),
            "attention_backward: 5 query heads over 0 key/value heads; expected a multiple");
}

// --- activations and element-wise

const std::int64_t kLengths[] = {0, 1, 2, 15, 17, 97, (1 << 14) + 1};

TEST(Activation, EqualReference) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    const auto gate = random_array(n, 1, -20.0, 20.0), up = random_array(n, 2), d = random_array(n, 3);
    auto got = garbage(n), want = garbage(n), got_up = garbage(n), want_up = garbage(n);
    const double ulps = 16.0;  // one exponential, a quotient and up to six products and sums
    silu_forward(ctx, gate.data(), got.data(), n);
    reference::silu_forward(gate.data(), want.data(), n);
    expect_close(got, want, ulps, "silu");
    silu_backward(ctx, d.data(), gate.data(), got.data(), n);
    reference::silu_backward(d.data(), gate.data(), want.data(), n);
    expect_close(got, want, 4.0 * ulps, "silu dx");  // x (1 - s) loses up to log2(20) bits where s is near 1
    swiglu_forward(ctx, gate.data(), up.data(), got.data(), n);
    reference::swiglu_forward(gate.data(), up.data(), want.data(), n);
    expect_close(got, want, ulps, "swiglu");
    swiglu_backward(ctx, d.data(), gate.data(), up.data(), got.data(), got_up.data(), n);
    reference::swiglu_backward(d.data(), gate.data(), up.data(), want.data(), want_up.data(), n);
    expect_close(got, want, 4.0 * ulps, "dgate");
    expect_close(got_up, want_up, ulps, "dup");
    auto dgate = gate, dup = d;  // in place: dgate over gate, dup over dout
    swiglu_backward(ctx, dup.data(), dgate.data(), up.data(), dgate.data(), dup.data(), n);
    EXPECT_TRUE(same_bits(dgate, got));
    EXPECT_TRUE(same_bits(dup, got_up));
  }
}

TEST(Activation, FarEnds) {
  KernelContext ctx(1);
  const float x[] = {-1000.0f, -90.0f, 0.0f, 90.0f, 1000.0f};
  float y[5], dx[5];
  const float dy[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  silu_forward(ctx, x, y, 5);
  silu_backward(ctx, dy, x, dx, 5);
  EXPECT_THAT(y, ::testing::ElementsAre(0.0f, ::testing::FloatNear(0.0f, 1e-30f), 0.0f, 90.0f, 1000.0f));
  EXPECT_THAT(dx, ::testing::ElementsAre(0.0f, ::testing::FloatNear(0.0f, 1e-30f), 0.5f, 1.0f, 1.0f));
}

TEST(Elementwise, EqualsReferenceToTheBit) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    const auto a = random_array(n, 1), b = random_array(n, 2);
    auto got = garbage(n), want = garbage(n);
    add(ctx, a.data(), b.data(), got.data(), n);
    reference::add(a.data(), b.data(), want.data(), n);
    EXPECT_TRUE(same_bits(got, want));
    scale(ctx, got.data(), 0.3f, n);
    reference::scale(want.data(), 0.3f, n);
    EXPECT_TRUE(same_bits(got, want));
    fill(ctx, got.data(), 2.5f, n);
    reference::fill(want.data(), 2.5f, n);
    EXPECT_TRUE(same_bits(got, want));
  }
}

TEST(RoundToBf16, EqualsTheConstructor) {
  KernelContext ctx(1);
  auto x = random_array(1000, 1, -1e3, 1e3);
  for (const std::uint32_t bits :
       {0u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x7f7fffffu,
        0x3f808000u, 0x3f818000u, 0x3f808001u, 0x00000001u, 0x00008000u}) {
    x.push_back(std::bit_cast<float>(bits));
  }
  const auto n = static_cast<std::int64_t>(x.size());
  Array<bf16> got(x.size()), want(x.size());
  round_to_bf16(ctx, x.data(), got.data(), n);
  reference::round_to_bf16(x.data(), want.data(), n);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(got[i].bits, want[i].bits) << x[i];
}

double squares_of(KernelContext& ctx, const float* x, std::int64_t n) {
  double sum = -1;
  sum_of_squares(ctx, x, &sum, n);
  return sum;
}
Array<double> wide_garbage(std::int64_t n) { return Array<double>(static_cast<std::size_t>(n), 1e30); }
double loss_of(KernelContext& ctx, const float* logits, const std::int64_t* targets, double* softmax,
               std::int64_t tokens, std::int64_t vocab, std::int64_t count, double smoothing = 0,
               double z_loss = 0) {
  double loss = -1;
  auto terms = wide_garbage(tokens * kLossTerms);
  cross_entropy_terms(ctx, logits, targets, terms.data(), tokens, vocab, &count, smoothing);
  cross_entropy_sum(ctx, terms.data(), 1, targets, softmax, &loss, tokens, vocab, &count, smoothing, z_loss);
  return loss;
}
void loss_backward(KernelContext& ctx, const float* logits, const std::int64_t* targets,
                   const double* softmax, float* d, std::int64_t tokens, std::int64_t vocab,
                   std::int64_t count, double smoothing = 0, double z_loss = 0) {
  cross_entropy_backward(ctx, logits, targets, softmax, nullptr, d, tokens, vocab, &count, smoothing, z_loss);
}
template <class T>
double reference_loss(const T* logits, const std::int64_t* targets, double* softmax, std::int64_t tokens,
                      std::int64_t vocab, double count, double smoothing = 0, double z_loss = 0) {
  Array<double> terms(static_cast<std::size_t>(tokens * kLossTerms));
  reference::cross_entropy_terms(logits, targets, terms.data(), tokens, vocab, smoothing);
  return reference::cross_entropy_sum(terms.data(), 1, targets, softmax, tokens, vocab, count, smoothing,
                                      z_loss);
}

TEST(SumOfSquares, IsExactForIntegersAndCloseOtherwise) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    Array<float> integers(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < integers.size(); ++i) integers[i] = static_cast<float>(i % 1000);
    EXPECT_EQ(squares_of(ctx, integers.data(), n), reference::sum_of_squares(integers.data(), n));
    const auto x = random_array(n, 1);
    const double want = reference::sum_of_squares(x.data(), n);
    EXPECT_NEAR(squares_of(ctx, x.data(), n), want, want * static_cast<double>(n) * 0x1p-53);
  }
}

// --- loss

TEST(CrossEntropy, EqualsReference) {
  KernelContext ctx(1);
  for (const auto& [smoothing, z_loss] : {std::pair{0.0, 0.0}, {0.3, 0.0}, {0.0, 1e-2}, {0.3, 1e-2}})
    for (const RowsByDim s :
         {RowsByDim{1, 1}, RowsByDim{5, 2}, RowsByDim{67, 31}, RowsByDim{130, 257}, RowsByDim{0, 5}}) {
      const std::int64_t n = s.rows * s.dim;
      const auto logits = random_array(n, 1, -8.0, 8.0);
      Array<std::int64_t> targets(static_cast<std::size_t>(s.rows));
      for (std::int64_t t = 0; t < s.rows; ++t)
        targets[static_cast<std::size_t>(t)] = t % 5 == 3 ? kIgnoredTarget : t * 7 % s.dim;
      auto softmax = wide_garbage(s.rows * kSoftmaxTerms), softmax_want = softmax;
      auto d = garbage(n), d_want = d;
      const std::int64_t count = 77;  // given, not the number of valid tokens here
      const double loss = loss_of(ctx, logits.data(), targets.data(), softmax.data(), s.rows, s.dim, count,
                                  smoothing, z_loss);
      const double want = reference_loss(logits.data(), targets.data(), softmax_want.data(), s.rows, s.dim,
                                         static_cast<double>(count), smoothing, z_loss);
      // Per token a log of a sum of vocab exponentials, each within 2 ulps, summed in 16 interleaved parts.
      const double ulps = static_cast<double>(s.dim) / 16.0 + 4.0;
      EXPECT_NEAR(loss, want, ulps * kUlp * static_cast<double>(s.rows) / static_cast<double>(count));
      for (std::size_t i = 0; i < softmax.size(); ++i)
        EXPECT_NEAR(softmax[i], softmax_want[i], i % 2 == 0 ? 0.0 : ulps * kUlp * softmax_want[i]) << i;
      loss_backward(ctx, logits.data(), targets.data(), softmax.data(), d.data(), s.rows, s.dim, count,
                    smoothing, z_loss);
      reference::cross_entropy_backward(logits.data(), targets.data(), softmax_want.data(), d_want.data(),
                                        s.rows, s.dim, static_cast<double>(count), smoothing, z_loss);
      if (s.dim == 1 && z_loss == 0) {  // the only class: gradient 0
        for (float x : d) EXPECT_NEAR(x, 0.0, 1e-7);
      } else {
        expect_close(d, d_want, 2.0 * ulps, "dlogits");
      }
      auto in_place = logits;
      loss_backward(ctx, in_place.data(), targets.data(), softmax.data(), in_place.data(), s.rows, s.dim,
                    count, smoothing, z_loss);
      EXPECT_TRUE(same_bits(in_place, d));
    }
}

// Columns [first, first + count) of a matrix of `width` columns.
Array<float> columns_of(const Array<float>& m, std::int64_t width, const VocabPart& part) {
  Array<float> out;
  for (std::size_t row = 0; row < m.size(); row += static_cast<std::size_t>(width))
    for (std::int64_t j = 0; j < part.count; ++j)
      out.push_back(m[row + static_cast<std::size_t>(part.first + j)]);
  return out;
}

// A vocabulary in parts gives the loss, the log of the sum and the gradient of the whole. One part is empty,
// and one part of one row holds nothing above -infinity.
TEST(CrossEntropy, OfAVocabularyInParts) {
  KernelContext ctx(2);
  const std::int64_t tokens = 5, vocab = 23, count = 4;
  auto logits = random_array(tokens * vocab, 1, -30.0, 30.0);
  for (std::size_t j = 0; j < 9; ++j) logits[2 * 23 + j] = -std::numeric_limits<float>::infinity();
  const std::int64_t targets[] = {0, 22, 11, kIgnoredTarget, 9};
  const VocabPart parts[] = {{0, 9, vocab}, {9, 2, vocab}, {11, 0, vocab}, {11, 12, vocab}};
  for (const auto& [smoothing, z_loss] : {std::pair{0.0, 0.0}, {0.1, 0.0}, {0.1, 1e-2}}) {
    auto softmax = wide_garbage(tokens * kSoftmaxTerms), softmax_whole = softmax;
    auto d_whole = garbage(tokens * vocab);
    Array<float> masked = logits;
    if (smoothing > 0)  // else the loss is infinite
      for (float& x : masked) x = std::max(x, -40.0f);
    const double whole =
        loss_of(ctx, masked.data(), targets, softmax_whole.data(), tokens, vocab, count, smoothing, z_loss);
    ASSERT_TRUE(std::isfinite(whole));
    loss_backward(ctx, masked.data(), targets, softmax_whole.data(), d_whole.data(), tokens, vocab, count,
                  smoothing, z_loss);
    auto terms = wide_garbage(4 * tokens * kLossTerms);
    double loss = -1;
    for (std::int64_t p = 0; p < 4; ++p)
      cross_entropy_terms(ctx, columns_of(masked, vocab, parts[p]).data(), targets,
                          terms.data() + p * tokens * kLossTerms, tokens, parts[p], &count, smoothing);
    cross_entropy_sum(ctx, terms.data(), 4, targets, softmax.data(), &loss, tokens, vocab, &count, smoothing,
                      z_loss);
    EXPECT_NEAR(loss, whole, 8 * 0x1p-23 * whole);
    for (std::size_t i = 0; i < softmax.size(); ++i)
      EXPECT_NEAR(softmax[i], softmax_whole[i], i % 2 == 0 ? 0.0 : 8 * kUlp * softmax_whole[i]) << i;
    for (const VocabPart& part : parts) {
      auto d = garbage(tokens * part.count);
      cross_entropy_backward(ctx, columns_of(masked, vocab, part).data(), targets, softmax_whole.data(),
                             nullptr, d.data(), tokens, part, &count, smoothing, z_loss);
      EXPECT_TRUE(same_bits(d, columns_of(d_whole, vocab, part)));
    }
  }
}

// If logits are large, one number that holds the log of their sum has few digits left for the sum. Held to
// a plain computation in f64.
TEST(CrossEntropy, KeepsItsDigitsWhereLogitsAreLarge) {
  KernelContext ctx(1);
  constexpr std::int64_t kTokens = 16, kVocab = 3000, kCount = kTokens;
  for (const double size : {1.0, 100.0, 1e5, -1e5})
    for (const double smoothing : {0.0, 0.1}) {
      SCOPED_TRACE(testing::Message() << "logits near " << size << ", smoothing " << smoothing);
      auto logits = random_array(kTokens * kVocab, 1, size - 4, size + 4);
      Array<std::int64_t> targets(kTokens);
      for (std::size_t t = 0; t < targets.size(); ++t)
        targets[t] = static_cast<std::int64_t>(t) * 61 % kVocab;
      double want = 0;
      Array<double> d_want(logits.size());
      for (std::size_t t = 0; t < targets.size(); ++t) {
        const float* const row = logits.data() + t * kVocab;
        const double largest = *std::max_element(row, row + kVocab);
        double sum = 0, mean = 0;
        for (std::int64_t j = 0; j < kVocab; ++j) {
          sum += std::exp(static_cast<double>(row[j]) - largest);
          mean += static_cast<double>(row[j]) / kVocab;
        }
        const auto of_target = static_cast<double>(row[targets[t]]);
        want +=
            (std::log(sum) + (1 - smoothing) * (largest - of_target) + smoothing * (largest - mean)) / kCount;
        for (std::int64_t j = 0; j < kVocab; ++j)
          d_want[t * kVocab + static_cast<std::size_t>(j)] =
              (std::exp(static_cast<double>(row[j]) - largest) / sum - smoothing / kVocab -
               (j == targets[t] ? 1 - smoothing : 0)) /
              kCount;
      }
      auto softmax = wide_garbage(kTokens * kSoftmaxTerms);
      auto d = garbage(kTokens * kVocab);
      EXPECT_NEAR(
          loss_of(ctx, logits.data(), targets.data(), softmax.data(), kTokens, kVocab, kCount, smoothing),
          want, 1e-7 * want);
      loss_backward(ctx, logits.data(), targets.data(), softmax.data(), d.data(), kTokens, kVocab, kCount,
                    smoothing);
      for (std::size_t i = 0; i < d.size(); ++i) {
        const double subtracted = smoothing / kVocab / kCount;
        ASSERT_NEAR(d[i], d_want[i], 1e-6 * (std::abs(d_want[i]) + subtracted)) << i;
      }
    }
}

TEST(CrossEntropy, IgnoredTokensCostNothing) {
  KernelContext ctx(1);
  const auto logits = random_array(3 * 4, 1);
  const std::int64_t targets[] = {kIgnoredTarget, kIgnoredTarget, kIgnoredTarget};
  auto softmax = wide_garbage(3 * kSoftmaxTerms);
  auto d = garbage(12);
  EXPECT_EQ(loss_of(ctx, logits.data(), targets, softmax.data(), 3, 4, 1), 0.0);
  loss_backward(ctx, logits.data(), targets, softmax.data(), d.data(), 3, 4, 1);
  EXPECT_EQ(d, zeros(12));
}

TEST(CrossEntropy, GradientIsTimesTheLosss) {
  KernelContext ctx(1);
  const auto logits = random_array(2 * 4, 1);
  const std::int64_t targets[] = {0, 3}, count = 2;
  auto softmax = wide_garbage(2 * kSoftmaxTerms);
  auto d = zeros(8), scaled = zeros(8);
  loss_of(ctx, logits.data(), targets, softmax.data(), 2, 4, count);
  loss_backward(ctx, logits.data(), targets, softmax.data(), d.data(), 2, 4, count);
  const double dloss = 0.5;
  cross_entropy_backward(ctx, logits.data(), targets, softmax.data(), &dloss, scaled.data(), 2, 4, &count, 0,
                         0);
  for (float& x : d) x *= 0.5f;
  EXPECT_EQ(scaled, d);
}

TEST(CountValid, LeavesOutIgnoredTargets) {
  KernelContext ctx(1);
  const std::int64_t targets[] = {0, kIgnoredTarget, 7, kIgnoredTarget, 2};
  std::int64_t count = -1;
  for (const std::int64_t n : {0, 1, 2, 5}) {
    count_valid(ctx, targets, &count, n);
    EXPECT_EQ(count, n == 5 ? 3 : n == 0 ? 0 : 1);
  }
}

TEST(CrossEntropy, NamesWhatIsWrong) {
  KernelContext ctx(1);
  const auto logits = random_array(2 * 4, 1);
  const std::int64_t targets[] = {0, 4};
  auto softmax = wide_garbage(2 * kSoftmaxTerms);
  auto d = zeros(8);
  EXPECT_EQ(message_of([&] { loss_of(ctx, logits.data(), targets, softmax.data(), 2, 4, 2); }),
            "cross_entropy: token 1 has target 4; expected 0 <= target < 4 (vocab) or -100");
  EXPECT_EQ(
      message_of([&] { loss_backward(ctx, logits.data(), targets, softmax.data(), d.data(), 1, 4, 0); }),
      "cross_entropy_backward: count is 0; expected the number of valid tokens of all ranks, more than 0");
}

// --- optimizers

TEST(AdamW, EqualsReferenceOverSeveralSteps) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    auto p = random_array(n, 1), m = zeros(n), v = zeros(n);
    Array<double> p_want(p.begin(), p.end()), m_want(p.size()), v_want(p.size());
    for (std::int64_t step = 1; step <= 5; ++step) {
      const auto g = random_array(n, static_cast<unsigned>(10 + step));
      const Array<double> g_wide(g.begin(), g.end());
      const AdamWStep s{
          .rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = step};
      adamw_step(ctx, p.data(), m.data(), v.data(), g.data(), n, s);
      reference::adamw_step(p_want.data(), m_want.data(), v_want.data(), g_wide.data(), n, s);
    }
    // Per step, p is rounded three times at size up to 1. The move, at most a few rates, is off by about ten
    // ulps of itself.
    for (std::size_t i = 0; i < p.size(); ++i) {
      ASSERT_NEAR(p[i], p_want[i], 5 * 4 * kUlp) << i;
      ASSERT_NEAR(m[i], m_want[i], 5 * 4 * kUlp) << i;
      ASSERT_NEAR(v[i], v_want[i], 5 * 4 * kUlp) << i;
    }
  }
}

// After a gradient of 1e6 one of 1. m + (1 - beta1) (g - m) has lost most of its digits, and a beta1 of 0
// leaves none of m.
TEST(AdamW, TheFirstMomentOfASmallBeta1IsNearTheGradient) {
  KernelContext ctx(1);
  for (const double beta1 : {0.0, 0.1, 0.3, 0.49})
    for (const std::int64_t n : kLengths) {
      const float most = std::numeric_limits<float>::max();
      for (const auto& [before, now] :
           {std::pair{1e6f, 1.0f}, {1e-6f, 1.1f}, {-most, most}, {3e-7f, -1e6f}}) {
        if (beta1 != 0 && now == most) continue;
        Array<float> p(static_cast<std::size_t>(n), 1), m(p.size(), before), v(p.size(), 1), g(p.size(), now);
        Array<double> p_want(p.begin(), p.end()), m_want(m.begin(), m.end()), v_want(v.begin(), v.end());
        const Array<double> g_wide(g.begin(), g.end());
        const AdamWStep s{
            .rate = 1e-2, .beta1 = beta1, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0, .step = 2};
        adamw_step(ctx, p.data(), m.data(), v.data(), g.data(), n, s);
        reference::adamw_step(p_want.data(), m_want.data(), v_want.data(), g_wide.data(), n, s);
        const double want = beta1 * static_cast<double>(before) + (1 - beta1) * static_cast<double>(now);
        const double sizes =
            beta1 * std::abs(static_cast<double>(before)) + std::abs(static_cast<double>(now));
        for (const float x : m) {
          if (beta1 == 0) {
            ASSERT_EQ(x, now);
          }
          ASSERT_NEAR(x, want, 4 * kUlp * sizes) << beta1 << " " << before << " " << now;
        }
        for (const double x : m_want) ASSERT_NEAR(x, want, 1e-15 * sizes);
      }
    }
}

TEST(Sgd, EqualsReferenceOverSeveralSteps) {
  KernelContext ctx(1);
  for (const double momentum : {0.0, 0.9}) {
    const std::int64_t n = 131;
    auto p = random_array(n, 1), velocity = zeros(n);
    Array<double> p_want(p.begin(), p.end()), velocity_want(p.size());
    for (unsigned step = 1; step <= 5; ++step) {
      const auto g = random_array(n, 10 + step);
      const Array<double> g_wide(g.begin(), g.end());
      const SgdStep s{.rate = 0.1, .momentum = momentum, .weight_decay = 0.01};
      sgd_step(ctx, p.data(), momentum == 0.0 ? nullptr : velocity.data(), g.data(), n, s);
      reference::sgd_step(p_want.data(), velocity_want.data(), g_wide.data(), n, s);
    }
    for (std::size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(p[i], p_want[i], 5 * 8 * kUlp) << i;
  }
}

TEST(Lion, EqualsReferenceOverSeveralSteps) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    auto p = random_array(n, 1), m = zeros(n);
    Array<double> p_want(p.begin(), p.end()), m_want(p.size());
    for (unsigned step = 1; step <= 5; ++step) {
      auto g = random_array(n, 10 + step);
      if (step == 1) std::fill_n(g.begin(), g.size() / 4, 0.0f);  // the sign of 0 is 0
      const Array<double> g_wide(g.begin(), g.end());
      const LionStep s{.rate = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};
      lion_step(ctx, p.data(), m.data(), g.data(), n, s);
      reference::lion_step(p_want.data(), m_want.data(), g_wide.data(), n, s);
    }
    for (std::size_t i = 0; i < p.size(); ++i) {
      ASSERT_NEAR(p[i], p_want[i], 5 * 4 * kUlp) << i;
      ASSERT_NEAR(m[i], m_want[i], 5 * 4 * kUlp) << i;
    }
  }
}

TEST(Lion, ANaNStaysANaN) {
  KernelContext ctx(1);
  Array<float> p{1, 1}, m{0, 0};
  const Array<float> g{std::numeric_limits<float>::quiet_NaN(), 0};
  lion_step(ctx, p.data(), m.data(), g.data(), 2,
            {.rate = 0.5, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0});
  EXPECT_TRUE(std::isnan(p[0]));
  EXPECT_EQ(p[1], 1.0f);
}

TEST(ScheduleFree, EqualsReferenceOverSeveralSteps) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    auto y = random_array(n, 1), z = y, v = zeros(n);
    Array<double> y_want(y.begin(), y.end()), z_want = y_want, v_want(y.size());
    for (std::int64_t step = 1; step <= 5; ++step) {
      const auto g = random_array(n, static_cast<unsigned>(10 + step));
      const Array<double> g_wide(g.begin(), g.end());
      const ScheduleFreeStep s{.rate = 1e-2,
                               .beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .weight = 1.0 / static_cast<double>(step),
                               .step = step};
      schedule_free_step(ctx, y.data(), z.data(), v.data(), g.data(), n, s);
      reference::schedule_free_step(y_want.data(), z_want.data(), v_want.data(), g_wide.data(), n, s);
    }
    for (std::size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], y_want[i], 5 * 6 * kUlp) << i;
      ASSERT_NEAR(z[i], z_want[i], 5 * 6 * kUlp) << i;
      ASSERT_NEAR(v[i], v_want[i], 5 * 4 * kUlp) << i;
    }
  }
}

// --- finite differences of the reference, in double

TEST(FiniteDifferences, Linear) {
  const LinearShape s{3, 5, 4};
  auto x = random_array<double>(15, 1), w = random_array<double>(20, 2), bias = random_array<double>(4, 3);
  const auto dy = random_array<double>(12, 4);
  const auto loss = [&] {
    Array<double> y(12);
    reference::linear_forward(x.data(), w.data(), bias.data(), y.data(), s);
    return dot(y, dy);
  };
  Array<double> dx(15), dw(20), dbias(4);
  reference::linear_backward_input(dy.data(), w.data(), dx.data(), s);
  reference::linear_backward_weight(dy.data(), x.data(), dw.data(), dbias.data(), s);
  expect_gradient(x, dx, loss, "dx");
  expect_gradient(w, dw, loss, "dw");
  expect_gradient(bias, dbias, loss, "dbias");
}

TEST(FiniteDifferences, RmsNorm) {
  auto x = random_array<double>(21, 1), w = random_array<double>(7, 2);
  const auto dy = random_array<double>(21, 3);
  Array<double> inv(3);
  const auto loss = [&] {
    Array<double> y(21);
    reference::rms_norm_forward(x.data(), w.data(), y.data(), inv.data(), 3, 7, 1e-5);
    return dot(y, dy);
  };
  loss();
  Array<double> dx(21), dw(7);
  reference::rms_norm_backward(dy.data(), x.data(), w.data(), inv.data(), dx.data(), dw.data(), 3, 7);
  expect_gradient(x, dx, loss, "dx");
  expect_gradient(w, dw, loss, "dweight");
}

TEST(FiniteDifferences, Embedding) {
  auto table = random_array<double>(12, 1);
  const std::int64_t ids[] = {2, 0, 2, 3, 2};
  const auto dy = random_array<double>(15, 2);
  const auto loss = [&] {
    Array<double> y(15);
    reference::embedding_forward(ids, table.data(), y.data(), 5, 4, 3);
    return dot(y, dy);
  };
  Array<double> dtable(12);
  reference::embedding_backward(ids, dy.data(), dtable.data(), 5, 4, 3);
  expect_gradient(table, dtable, loss, "dtable");
}

TEST(FiniteDifferences, Rope) {
  const RopeShape s{2, 3, 2, 4};
  auto x = random_array<double>(48, 1);
  const auto dy = random_array<double>(48, 2);
  Array<double> cosine(6), sine(6), dx(48);
  reference::rope_tables(10000.0, s.head_dim, s.seq, cosine.data(), sine.data());
  const auto loss = [&] {
    Array<double> y(48);
    reference::rope_forward(x.data(), cosine.data(), sine.data(), y.data(), s);
    return dot(y, dy);
  };
  reference::rope_backward(dy.data(), cosine.data(), sine.data(), dx.data(), s);
  expect_gradient(x, dx, loss, "dx");
}

TEST(FiniteDifferences, Attention) {
  const AttentionShape s{2, 5, 4, 2, 3};
  const std::int64_t nq = 2 * 5 * 4 * 3, nk = 2 * 5 * 2 * 3;
  auto q = random_array<double>(nq, 1), k = random_array<double>(nk, 2), v = random_array<double>(nk, 3);
  const auto dout = random_array<double>(nq, 4);
  Array<double> out(static_cast<std::size_t>(nq)), softmax(2 * 4 * 5 * kSoftmaxTerms);
  const auto loss = [&] {
    reference::attention_forward(q.data(), k.data(), v.data(), out.data(), softmax.data(), s);
    return dot(out, dout);
  };
  loss();
  Array<double> dq(q.size()), dk(k.size()), dv(v.size());
  reference::attention_backward(dout.data(), q.data(), k.data(), v.data(), out.data(), softmax.data(),
                                dq.data(), dk.data(), dv.data(), s);
  expect_gradient(q, dq, loss, "dq");
  expect_gradient(k, dk, loss, "dk");
  expect_gradient(v, dv, loss, "dv");
}

TEST(FiniteDifferences, SiluAndSwiglu) {
  auto gate = random_array<double>(9, 1, -4.0, 4.0), up = random_array<double>(9, 2);
  const auto d = random_array<double>(9, 3);
  const auto silu_loss = [&] {
    Array<double> y(9);
    reference::silu_forward(gate.data(), y.data(), 9);
    return dot(y, d);
  };
  const auto swiglu_loss = [&] {
    Array<double> y(9);
    reference::swiglu_forward(gate.data(), up.data(), y.data(), 9);
    return dot(y, d);
  };
  Array<double> dx(9), dgate(9), dup(9);
  reference::silu_backward(d.data(), gate.data(), dx.data(), 9);
  expect_gradient(gate, dx, silu_loss, "silu dx");
  reference::swiglu_backward(d.data(), gate.data(), up.data(), dgate.data(), dup.data(), 9);
  expect_gradient(gate, dgate, swiglu_loss, "dgate");
  expect_gradient(up, dup, swiglu_loss, "dup");
}

TEST(FiniteDifferences, CrossEntropy) {
  auto logits = random_array<double>(4 * 5, 1, -3.0, 3.0);
  const std::int64_t targets[] = {4, kIgnoredTarget, 0, 2};
  Array<double> softmax(4 * kSoftmaxTerms), d(20);
  const auto loss = [&] {
    return reference_loss(logits.data(), targets, softmax.data(), 4, 5, 6.0, 0.2, 0.1);
  };
  loss();
  reference::cross_entropy_backward(logits.data(), targets, softmax.data(), d.data(), 4, 5, 6.0, 0.2, 0.1);
  expect_gradient(logits, d, loss, "dlogits");
}

// --- threads

TEST(KernelContext, RefusesNoThreads) {
  EXPECT_EQ(message_of([] { KernelContext ctx(0); }), "KernelContext: threads is 0; expected at least 1");
}

// Everything that sums, on `threads` threads; all results in one array.
Array<float> results(int threads, const gemm::Kernel* own) {
  KernelContext ctx(threads);
  choose(ctx, own);
  Array<float> all;
  const auto keep = [&](const Array<float>& a) { all.insert(all.end(), a.begin(), a.end()); };
  for (const Product& p :
       {Product{512, 512, 192}, Product{192, 64, 2048}, Product{48, 48, 8191}, Product{1, 33, 4096},
        Product{257, 131, 67}, Product{33, 1, 3000}, Product{128, 600, 64}, Product{700, 32, 64}}) {
    for (const Stored a_stored : {Stored::plain, Stored::transposed}) {
      for (const Stored b_stored : {Stored::plain, Stored::transposed}) {
        auto c = random_array(p.m * p.n, 3);
        matmul(ctx, random_array(p.m * p.k, 1).data(), a_stored, random_array(p.k * p.n, 2).data(), b_stored,
               c.data(), p.m, p.n, p.k, true);
        matmul(ctx, random_array<bf16>(p.m * p.k, 1).data(), a_stored,
               random_array<bf16>(p.k * p.n, 2).data(), b_stored, c.data(), p.m, p.n, p.k, true);
        keep(c);
      }
    }
  }
  const LinearShape linear{517, 96, 65};
  auto dw = zeros(linear.in * linear.out), dbias = zeros(linear.out);
  linear_backward_weight(ctx, random_array(linear.tokens * linear.out, 1).data(),
                         random_array(linear.tokens * linear.in, 2).data(), dw.data(), dbias.data(), linear);
  keep(dw), keep(dbias);
  const std::int64_t rows = 517, dim = 96, n = rows * dim;
  const auto x = random_array(n, 4), dy = random_array(n, 5), w = random_array(dim, 6);
  auto y = garbage(n), inv = garbage(rows), dx = garbage(n), dweight = zeros(dim);
  rms_norm_forward(ctx, x.data(), w.data(), y.data(), inv.data(), rows, dim, 1e-5f);
  rms_norm_backward(ctx, dy.data(), x.data(), w.data(), inv.data(), dx.data(), dweight.data(), rows, dim);
  keep(y), keep(dx), keep(dweight);
  Array<std::int64_t> ids(static_cast<std::size_t>(rows));
  for (std::size_t t = 0; t < ids.size(); ++t) ids[t] = static_cast<std::int64_t>(t * t % 13);
  auto dtable = zeros(13 * dim);
  embedding_backward(ctx, ids.data(), dy.data(), dtable.data(), rows, 13, dim);
  keep(dtable);
  const AttentionShape s{3, 130, 6, 3, 16};
  const std::int64_t nq = 3 * 130 * 6 * 16, nk = nq / 2;
  const auto q = random_array(nq, 7), k = random_array(nk, 8), v = random_array(nk, 9),
             dout = random_array(nq, 10);
  auto out = garbage(nq), softmax_of_scores = garbage(3 * 6 * 130 * kSoftmaxTerms), dq = garbage(nq),
       dk = garbage(nk), dv = garbage(nk);
  attention_forward(ctx, q.data(), k.data(), v.data(), out.data(), softmax_of_scores.data(), s);
  attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), out.data(), softmax_of_scores.data(),
                     dq.data(), dk.data(), dv.data(), s);
  keep(out), keep(softmax_of_scores), keep(dq), keep(dk), keep(dv);
  const AttentionShape few{1, 400, 2, 1, 24};  // fewer heads of keys than threads
  const std::int64_t few_q = 400 * 2 * 24, few_k = few_q / 2;
  auto few_out = garbage(few_q), few_softmax = garbage(800 * kSoftmaxTerms), few_dq = garbage(few_q),
       few_dk = garbage(few_k), few_dv = garbage(few_k);
  const auto few_qs = random_array(few_q, 13), few_ks = random_array(few_k, 14),
             few_vs = random_array(few_k, 15), few_dout = random_array(few_q, 16);
  attention_forward(ctx, few_qs.data(), few_ks.data(), few_vs.data(), few_out.data(), few_softmax.data(),
                    few);
  attention_backward(ctx, few_dout.data(), few_qs.data(), few_ks.data(), few_vs.data(), few_out.data(),
                     few_softmax.data(), few_dq.data(), few_dk.data(), few_dv.data(), few);
  keep(few_out), keep(few_softmax), keep(few_dq), keep(few_dk), keep(few_dv);
  const FullAttentionShape across{1, 130, 300, 2, 1, 16};
  const std::int64_t across_q = 130 * 2 * 16, across_k = 300 * 16;
  auto across_out = garbage(across_q), across_softmax = garbage(260 * kSoftmaxTerms),
       across_dq = garbage(across_q), across_dk = garbage(across_k), across_dv = garbage(across_k);
  const auto across_qs = random_array(across_q, 17), across_ks = random_array(across_k, 18),
             across_vs = random_array(across_k, 19), across_dout = random_array(across_q, 20),
             across_bias = random_array(130 * 300, 21);
  full_attention_forward(ctx, across_qs.data(), across_ks.data(), across_vs.data(), across_bias.data(),
                         across_out.data(), across_softmax.data(), across);
  full_attention_backward(ctx, across_dout.data(), across_qs.data(), across_ks.data(), across_vs.data(),
                          across_bias.data(), across_out.data(), across_softmax.data(), across_dq.data(),
                          across_dk.data(), across_dv.data(), nullptr, across);
  keep(across_out), keep(across_softmax), keep(across_dq), keep(across_dk), keep(across_dv);
  auto gate = random_array(n, 11), up = random_array(n, 12), dgate = garbage(n), dup = garbage(n);
  swiglu_backward(ctx, dy.data(), gate.data(), up.data(), dgate.data(), dup.data(), n);
  keep(dgate), keep(dup);
  auto softmax = wide_garbage(rows * kSoftmaxTerms);
  auto dlogits = garbage(n);
  const double loss = loss_of(ctx, x.data(), ids.data(), softmax.data(), rows, dim, 3);
  loss_backward(ctx, x.data(), ids.data(), softmax.data(), dlogits.data(), rows, dim, 3);
  const double squares = squares_of(ctx, x.data(), n);
  for (const double scalar : {loss, squares}) {  // both halves of the f64, so that every bit counts
    float halves[2];
    std::memcpy(halves, &scalar, sizeof scalar);
    all.insert(all.end(), halves, halves + 2);
  }
  keep(dlogits);
  return all;
}

TEST(Threads, DoNotChangeABit) {
  for (const gemm::Kernel* own : all_products()) {
    const auto one = results(1, own);
    EXPECT_TRUE(same_bits(results(1, own), one));
    EXPECT_TRUE(same_bits(results(2, own), one));
    EXPECT_TRUE(same_bits(results(3, own), one));
  }
}

}  // namespace
}  // namespace weft::kernels::kernels_test
