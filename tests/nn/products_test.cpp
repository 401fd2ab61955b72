// Products of bf16. The order of sums is the one that gemm.hpp states. No cut of rows or columns, no number
// of threads and no packed copy changes a bit. Runs for every instruction set of the CPU.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "nn/emulated_tiles.hpp"
#include "nn/kernel_support.hpp"
#include "nn/kernels/cpu_state.hpp"
#include "support/sanitizers.hpp"

namespace weft::kernels::products_test {
namespace {

using kernels::test::Array;
using kernels::test::garbage;
using kernels::test::kUlp;
using kernels::test::random_array;

// Matrices of a product as they are stored, with `gap` elements between rows.
struct Operands {
  Operands(std::int64_t rows, std::int64_t columns, Stored how, unsigned seed, std::int64_t gap = 0)
      : stored(how), stride((how == Stored::plain ? columns : rows) + gap) {
    elements = random_array<bf16>(stride * (how == Stored::plain ? rows : columns), seed);
  }
  gemm::Matrix matrix() const {
    const bool plain = stored == Stored::plain;
    return {elements.data(), plain ? stride : 1, plain ? 1 : stride, true};
  }
  float at(std::int64_t row, std::int64_t column) const {
    const gemm::Matrix m = matrix();
    return static_cast<float>(elements[static_cast<std::size_t>(row * m.row_step + column * m.column_step)]);
  }
  Stored stored;
  std::int64_t stride;
  Array<bf16> elements;
};

// --- what the instructions compute

float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float fused(float x, float y, float z) { return flushed(std::fma(flushed(x), flushed(y), flushed(z))); }

// The sum over [first, last) of k, as gemm.hpp states it for a kernel.
using Sum = float (*)(const Operands& a, const Operands& b, std::int64_t row, std::int64_t column,
                      std::int64_t first, std::int64_t last);

float by_vdpbf16ps(const Operands& a, const Operands& b, std::int64_t row, std::int64_t column,
                   std::int64_t first, std::int64_t last) {
  float sum = 0.0f;
  for (std::int64_t p = first; p < last; p += 2) {
    if (p + 1 < last) sum = fused(a.at(row, p + 1), b.at(p + 1, column), sum);
    sum = fused(a.at(row, p), b.at(p, column), sum);
  }
  return sum;
}

float by_tdpbf16ps(const Operands& a, const Operands& b, std::int64_t row, std::int64_t column,
                   std::int64_t first, std::int64_t last) {
  float sum = 0.0f;
  for (std::int64_t part = first; part < last; part += 32) {
    float even = 0.0f, odd = 0.0f;
    for (std::int64_t p = part; p < std::min(last, part + 32); p += 2) {
      even = fused(a.at(row, p), b.at(p, column), even);
      if (p + 1 < last) odd = fused(a.at(row, p + 1), b.at(p + 1, column), odd);
    }
    sum = flushed(sum + flushed(even + odd));
  }
  return sum;
}

struct Shape {
  std::int64_t m, n, k;
};

// All ways to store the operands; alpha, and what is added.
void expect_stated_bits(const gemm::Kernel& kernel, Sum sum_of, std::int64_t block, Shape s,
                        double scale = 1.0) {
  for (const Stored a_stored : {Stored::plain, Stored::transposed})
    for (const Stored b_stored : {Stored::plain, Stored::transposed})
      for (const int added : {0, 1, 2}) {  // nothing, c, a bias
        SCOPED_TRACE(testing::Message() << s.m << "x" << s.n << "x" << s.k << " added " << added);
        const std::int64_t gap = 3;
        Operands a(s.m, s.k, a_stored, 1, gap), b(s.k, s.n, b_stored, 2, gap);
        for (bf16& x : a.elements)
          x = bf16(static_cast<float>(static_cast<double>(static_cast<float>(x)) * scale));
        const auto before = random_array(s.m * s.n, 3), bias = random_array(s.n, 4);
        const float alpha = added == 1 ? 0.3f : 1.0f;
        Array<float> want(before.size());
        for (std::int64_t i = 0; i < s.m; ++i)
          for (std::int64_t j = 0; j < s.n; ++j) {
            float& c = want[static_cast<std::size_t>(i * s.n + j)];
            for (std::int64_t first = 0; first < s.k; first += block) {
              const float sum = sum_of(a, b, i, j, first, std::min(s.k, first + block));
              if (first > 0)
                c = std::fma(alpha, sum, c);
              else if (added == 0)
                c = alpha * sum;
              else
                c = std::fma(alpha, sum,
                             added == 1 ? before[static_cast<std::size_t>(i * s.n + j)]
                                        : bias[static_cast<std::size_t>(j)]);
            }
          }
        Array<float> scratch(static_cast<std::size_t>(kernel.scratch(s.n, s.k)));
        const auto beyond = garbage(s.m * (s.n + gap));
        auto c = beyond;
        for (std::int64_t i = 0; i < s.m && added == 1; ++i)
          std::copy_n(before.begin() + i * s.n, s.n, c.begin() + i * (s.n + gap));
        kernel.multiply({a.matrix(), b.matrix(), c.data(), s.n + gap, s.m, s.n, s.k, alpha, added == 1,
                         added == 2 ? bias.data() : nullptr},
                        scratch.data());
        for (std::int64_t i = 0; i < s.m; ++i) {
          for (std::int64_t j = 0; j < s.n; ++j)
            ASSERT_EQ(c[static_cast<std::size_t>(i * (s.n + gap) + j)],
                      want[static_cast<std::size_t>(i * s.n + j)])
                << "at " << i << ", " << j;
          for (std::int64_t j = s.n; j < s.n + gap; ++j)  // nothing beside c is written
            ASSERT_EQ(c[static_cast<std::size_t>(i * (s.n + gap) + j)], 1e30f);
        }
      }
}

const Shape kShapes[] = {{1, 1, 1},     {7, 31, 19},    {9, 50, 33},   {9, 51, 1025}, {5, 49, 2051},
                         {195, 71, 66}, {201, 5, 1100}, {397, 60, 15}, {8, 20, 8195}, {16, 193, 130}};

// Products below 2^-126 are 0.
constexpr Shape kOfTinyNumbers{9, 20, 70};

TEST(Bf16Products, OfAvx512HaveTheBitsThatAreStated) {
  const gemm::Kernel* const kernel = gemm::avx512_bf16();
  if (kernel == nullptr) GTEST_SKIP() << "this CPU has no AVX512-BF16, or WEFT_CPU_ISA forbids it";
  for (const Shape& s : kShapes) ASSERT_NO_FATAL_FAILURE(expect_stated_bits(*kernel, &by_vdpbf16ps, 1024, s));
  ASSERT_NO_FATAL_FAILURE(expect_stated_bits(*kernel, &by_vdpbf16ps, 1024, kOfTinyNumbers, 0x1p-126));
}

// The registers of the CPU, if it has AMX, and emulated ones.
TEST(Bf16Products, OfMatrixTilesHaveTheBitsThatAreStated) {
  if (kernels::test::emulated_matrix_tiles() == nullptr) GTEST_SKIP() << "this CPU has no AVX-512";
  for (const gemm::Kernel* kernel : {kernels::test::emulated_matrix_tiles(), gemm::amx()}) {
    if (kernel == nullptr) continue;
    SCOPED_TRACE(kernel->name);
    for (const Shape& s : kShapes)
      ASSERT_NO_FATAL_FAILURE(expect_stated_bits(*kernel, &by_tdpbf16ps, 1024, s));
    ASSERT_NO_FATAL_FAILURE(expect_stated_bits(*kernel, &by_tdpbf16ps, 1024, kOfTinyNumbers, 0x1p-126));
  }
}

// --- random products

struct Drawn {
  Shape shape;
  Stored a_stored, b_stored;
  bool accumulate, bias;
};

// Sizes of any order of magnitude, and at most some 2^20 terms.
Drawn draw(std::mt19937_64& random) {
  const auto up_to = [&](double most) {
    const double power = std::uniform_real_distribution<double>(0.0, std::log2(most))(random);
    return static_cast<std::int64_t>(std::exp2(power));
  };
  Drawn d{};
  d.shape.k = up_to(3000);
  d.shape.m = up_to(std::min(500.0, std::max(1.0, 0x1p20 / static_cast<double>(d.shape.k))));
  d.shape.n = up_to(std::min(1000.0, std::max(1.0, 0x1p20 / static_cast<double>(d.shape.k * d.shape.m))));
  d.a_stored = random() % 2 == 0 ? Stored::plain : Stored::transposed;
  d.b_stored = random() % 2 == 0 ? Stored::plain : Stored::transposed;
  d.accumulate = random() % 2 == 0;
  d.bias = !d.accumulate && random() % 2 == 0;
  return d;
}

// c of rows [row, row + m) and columns [column, column + n).
void part(const gemm::Kernel& kernel, const Operands& a, const Operands& b, const Drawn& d, const float* bias,
          Shape at, Shape size, Array<float>& c, const float* packed) {
  Array<float> scratch(static_cast<std::size_t>(kernel.scratch(size.n, size.k)));
  kernel.multiply(
      {a.matrix().at(at.m, 0), b.matrix().at(0, at.n), c.data() + at.m * d.shape.n + at.n, d.shape.n, size.m,
       size.n, size.k, 1.0f, d.accumulate, d.bias ? bias + at.n : nullptr, packed},
      scratch.data());
}

// The error of any order of sums, and the rounding of c's own terms.
void expect_within_bounds(const Operands& a, const Operands& b, const Drawn& d, const Array<float>& before,
                          const Array<float>& bias, const Array<float>& c, std::mt19937_64& random) {
  for (int probe = 0; probe < 20; ++probe) {
    const auto i = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(d.shape.m)),
               j = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(d.shape.n));
    const auto at = static_cast<std::size_t>(i * d.shape.n + j);
    double want = d.accumulate ? static_cast<double>(before[at])
                  : d.bias     ? static_cast<double>(bias[static_cast<std::size_t>(j)])
                               : 0.0;
    double absolute = std::abs(want);
    for (std::int64_t p = 0; p < d.shape.k; ++p) {
      const double term = static_cast<double>(a.at(i, p)) * static_cast<double>(b.at(p, j));
      want += term;
      absolute += std::abs(term);
    }
    ASSERT_NEAR(c[at], want, static_cast<double>(d.shape.k + 2) * kUlp * absolute) << "at " << i << ", " << j;
  }
}

void expect_no_bit_differs(const gemm::Kernel& kernel, const Drawn& d, unsigned seed) {
  const Shape& s = d.shape;
  SCOPED_TRACE(testing::Message() << "product " << seed << ": " << s.m << "x" << s.n << "x" << s.k
                                  << (d.accumulate ? " added"
                                      : d.bias     ? " bias"
                                                   : ""));
  std::mt19937_64 random(seed);
  const Operands a(s.m, s.k, d.a_stored, seed), b(s.k, s.n, d.b_stored, seed + 1);
  const auto before = random_array(s.m * s.n, seed + 2), bias = random_array(s.n, seed + 3);
  auto whole = before;
  part(kernel, a, b, d, bias.data(), {}, s, whole, nullptr);
  ASSERT_NO_FATAL_FAILURE(expect_within_bounds(a, b, d, before, bias, whole, random));
  const auto same = [&](const Array<float>& got, const char* what) {
    ASSERT_EQ(std::memcmp(got.data(), whole.data(), got.size() * sizeof(float)), 0) << what;
  };
  // Cut at random, m = 1 among the pieces.
  auto pieces = before;
  const auto next = [&](std::int64_t left) {
    return random() % 4 == 0 ? 1 : 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(left));
  };
  for (std::int64_t row = 0; row < s.m;) {
    // At most some pieces of one row each, and the other rows at once.
    const std::int64_t rows = row > 20 ? s.m - row : next(s.m - row);
    for (std::int64_t column = 0; column < s.n;) {
      const std::int64_t columns = column > 200 ? s.n - column : next(s.n - column);
      part(kernel, a, b, d, bias.data(), {row, column, 0}, {rows, columns, s.k}, pieces, nullptr);
      column += columns;
    }
    row += rows;
  }
  ASSERT_NO_FATAL_FAILURE(same(pieces, "in pieces"));
  // A packed copy.
  Array<float> memory(static_cast<std::size_t>(kernel.packed_floats(s.n, s.k)) + 16);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  float* const packed = memory.data() + (64 - address % 64) / 4 % 16;
  for (std::int64_t column = 0; column < s.n; column += kernel.columns)
    kernel.pack_b(b.matrix(), s.n, s.k, column, packed);
  auto of_packed = before;
  part(kernel, a, b, d, bias.data(), {}, s, of_packed, packed);
  ASSERT_NO_FATAL_FAILURE(same(of_packed, "packed"));
  if (d.accumulate) return;
  // Rounded once where it is stored.
  const std::int64_t gap = 1;
  Array<bf16> narrow(static_cast<std::size_t>(s.m * (s.n + gap)), bf16(7.0f));
  Array<float> scratch(static_cast<std::size_t>(kernel.scratch(s.n, s.k)));
  gemm::Product product{a.matrix(),
                        b.matrix(),
                        nullptr,
                        s.n + gap,
                        s.m,
                        s.n,
                        s.k,
                        1.0f,
                        false,
                        d.bias ? bias.data() : nullptr,
                        seed % 2 == 0 ? packed : nullptr};
  product.c_bf16 = reinterpret_cast<std::uint16_t*>(narrow.data());
  kernel.multiply(product, scratch.data());
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      const bf16 want(whole[static_cast<std::size_t>(i * s.n + j)]),
          got = narrow[static_cast<std::size_t>(i * (s.n + gap) + j)];
      ASSERT_EQ(std::memcmp(&got, &want, sizeof want), 0) << "in bf16, at " << i << ", " << j;
    }
    ASSERT_EQ(static_cast<float>(narrow[static_cast<std::size_t>(i * (s.n + gap) + s.n)]), 7.0f);
  }
}

TEST(Bf16Products, NoCutOfRowsOrColumnsChangesABit) {
  std::mt19937_64 random(20261128);
  const unsigned count = weft::test::does_everything() ? 2000 : 100;
  for (unsigned product = 0; product < count; ++product)
    ASSERT_NO_FATAL_FAILURE(expect_no_bit_differs(*gemm::best_bf16(), draw(random), product));
}

TEST(Bf16Products, NoCutChangesABitOfMatrixTiles) {
  const gemm::Kernel* const kernel = kernels::test::emulated_matrix_tiles();
  if (kernel == nullptr) GTEST_SKIP() << "this CPU has no AVX-512";
  std::mt19937_64 random(5);
  const unsigned count = weft::test::does_everything() ? 200 : 20;
  for (unsigned product = 0; product < count; ++product)
    ASSERT_NO_FATAL_FAILURE(expect_no_bit_differs(*kernel, draw(random), product));
}

// The threads cut, and the kernel that is the best one here.
TEST(Bf16Products, NoNumberOfThreadsChangesABit) {
  std::mt19937_64 random(7);
  KernelContext one(1), two(2), three(3), five(5);
  for (unsigned product = 0; product < 100; ++product) {
    const Drawn d = draw(random);
    const Shape s{d.shape.m * 2, d.shape.n * 3, d.shape.k};
    const Operands a(s.m, s.k, d.a_stored, product), b(s.k, s.n, d.b_stored, product + 1);
    const auto before = random_array(s.m * s.n, product + 2);
    Array<float> whole;
    for (KernelContext* ctx : {&one, &two, &three, &five}) {
      auto c = before;
      matmul(*ctx, a.elements.data(), d.a_stored, b.elements.data(), d.b_stored, c.data(), s.m, s.n, s.k,
             d.accumulate);
      if (ctx == &one) whole = c;
      ASSERT_EQ(c, whole) << "product " << product << ": " << s.m << "x" << s.n << "x" << s.k;
    }
  }
}

// A row depends on its row of a alone. Rows that arrive one at a time, as of a key/value cache, have the bits
// of the whole. The transposed product has them, too.
TEST(Bf16Products, OneRowHasTheBitsOfTheWhole) {
  const Shape s{37, 160, 1100};
  const Operands x(s.m, s.k, Stored::plain, 1), w(s.k, s.n, Stored::transposed, 2);
  KernelContext ctx(1);
  auto whole = garbage(s.m * s.n), rows = whole, turned = whole;
  matmul(ctx, x.elements.data(), Stored::plain, w.elements.data(), Stored::transposed, whole.data(), s.m, s.n,
         s.k, false);
  for (std::int64_t row = 0; row < s.m; ++row)
    matmul(ctx, x.elements.data() + row * s.k, Stored::plain, WeightMatrix(w.elements.data(), 1, 1),
           Stored::transposed, rows.data() + row * s.n, 1, s.n, s.k, false);
  EXPECT_TRUE(kernels::test::same_bits(rows, whole));
  matmul(ctx, w.elements.data(), Stored::plain, x.elements.data(), Stored::transposed, turned.data(), s.n,
         s.m, s.k, false);
  for (std::int64_t i = 0; i < s.m; ++i)
    for (std::int64_t j = 0; j < s.n; ++j)
      ASSERT_EQ(turned[static_cast<std::size_t>(j * s.m + i)], whole[static_cast<std::size_t>(i * s.n + j)]);
}

}  // namespace
}  // namespace weft::kernels::products_test
