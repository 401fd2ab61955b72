// Products whose sums over k are trees: near the plain loops, and the parts of a tree give the bits of the
// whole.
#include "nn/kernel_support.hpp"
#include "nn/kernels/cpu_state.hpp"
#include "nn/kernels/reference.hpp"
#include "weft/base/exact.hpp"

namespace weft::kernels::tree_products_test {
namespace {

using kernels::test::Array;
using kernels::test::garbage;
using kernels::test::random_array;

TEST(ExactBlock, PartsOfPartsArePartsOfTheWhole) {
  for (const std::int64_t size : {0, 1, 7, 8, 12, 13, 64, 100})
    for (const int ranks : {1, 2, 4, 8}) {
      if (size % ranks != 0) continue;
      std::int64_t end = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Chunk part = exact_block(size, ranks, rank);
        EXPECT_EQ(part.size, size / ranks);
        for (int i = 0; i < kExactBlocks / ranks; ++i) {
          const Chunk inside = exact_block(part.size, kExactBlocks / ranks, i),
                      whole = exact_block(size, kExactBlocks, rank * (kExactBlocks / ranks) + i);
          EXPECT_EQ(part.offset + inside.offset, whole.offset);
          EXPECT_EQ(inside.size, whole.size);
          EXPECT_EQ(whole.offset, end);
          end += whole.size;
        }
      }
      EXPECT_EQ(end, size);
    }
}

struct Sizes {
  std::int64_t m, n, k;
};
const Sizes kSizes[] = {{1, 1, 8},      {3, 5, 13},   {17, 31, 64}, {65, 33, 127}, {200, 197, 72},
                        {390, 20, 264}, {5, 210, 16}, {0, 5, 8},    {5, 0, 8},     {5, 3, 0}};

template <class In>
void tree_equals_reference(const ProductTree& tree) {
  for (const int threads : {1, 2})
    for (const Sizes& s : kSizes)
      for (const Stored a_stored : {Stored::plain, Stored::transposed})
        for (const Stored b_stored : {Stored::plain, Stored::transposed}) {
          KernelContext ctx(threads);
          const auto a = random_array<In>(s.m * s.k, 1), b = random_array<In>(s.k * s.n, 2);
          auto want = garbage(s.m * s.n), got = want;
          reference::tree_matmul(a.data(), a_stored, b.data(), b_stored, want.data(), s.m, s.n, s.k, tree);
          tree_matmul(ctx, a.data(), a_stored, b.data(), b_stored, got.data(), s.m, s.n, s.k, tree);
          for (std::size_t i = 0; i < got.size(); ++i)
            ASSERT_NEAR(got[i], want[i], 1e-6 * static_cast<double>(s.k + 16))
                << s.m << "x" << s.n << "x" << s.k << " at " << i;
        }
}

TEST(TreeProducts, EqualReference) {
  for (const int leaves : {1, 2, 4, 8}) {
    tree_equals_reference<float>({.leaves = leaves});
    tree_equals_reference<bf16>({.leaves = leaves});
  }
}

TEST(TreeProducts, SumInTheOrderOfTheTree) {
  // 2^25 + 1 is 2^25 in f32, so that the value shows the order. Leaves have one element each.
  const float large = 33554432.0f;
  KernelContext ctx(1);
  const Array<float> a{large, 1, 1, -large, 1, 1, 1, 1}, one(8, 1.0f);
  float c = 0;
  tree_matmul(ctx, a.data(), Stored::plain, one.data(), Stored::plain, &c, 1, 1, 8, {});
  EXPECT_EQ(c, 4.0f) << "((2^25 + 1) + (1 - 2^25)) + ((1 + 1) + (1 + 1))";
  const std::int64_t segments[] = {4, 4};
  tree_matmul(ctx, a.data(), Stored::plain, one.data(), Stored::plain, &c, 1, 1, 8,
              {.leaves = 2, .segments = segments});
  EXPECT_EQ(c, 2.0f) << "leaf 0: (2^25 + 1) + (1 + 1), which is 2^25; leaf 1: (1 - 2^25) + (1 + 1)";
}

// The product as `ranks` ranks make it, each with its part of k (of each segment), and add it as a tree.
template <class In>
Array<float> in_parts(KernelContext& ctx, const Array<In>& a, const Array<In>& b, const Sizes& s, int ranks,
                      const std::vector<std::int64_t>& segments, std::int64_t unit) {
  std::vector<Array<float>> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> columns, here;  // of k
    std::int64_t first = 0;
    for (const std::int64_t size : segments) {
      const Chunk part = exact_block(size, ranks, rank);
      here.push_back(part.size);
      for (std::int64_t l = 0; l < part.size * unit; ++l) columns.push_back((first + part.offset) * unit + l);
      first += size;
    }
    const auto k = static_cast<std::int64_t>(columns.size());
    Array<In> own_a(static_cast<std::size_t>(s.m * k)), own_b(static_cast<std::size_t>(k * s.n));
    for (std::int64_t l = 0; l < k; ++l) {
      const std::int64_t from = columns[static_cast<std::size_t>(l)];
      for (std::int64_t i = 0; i < s.m; ++i)
        own_a[static_cast<std::size_t>(i * k + l)] = a[static_cast<std::size_t>(i * s.k + from)];
      for (std::int64_t j = 0; j < s.n; ++j)
        own_b[static_cast<std::size_t>(l * s.n + j)] = b[static_cast<std::size_t>(from * s.n + j)];
    }
    sums.push_back(garbage(s.m * s.n));
    tree_matmul(ctx, own_a.data(), Stored::plain, own_b.data(), Stored::plain, sums.back().data(), s.m, s.n,
                k, {.leaves = kExactBlocks / ranks, .segments = here, .unit = unit});
  }
  for (std::size_t step = 1; step < sums.size(); step *= 2)
    for (std::size_t r = 0; r + step < sums.size(); r += 2 * step)
      for (std::size_t i = 0; i < sums[r].size(); ++i) sums[r][i] += sums[r + step][i];
  return sums[0];
}

template <class In>
void parts_have_the_bits_of_the_whole() {
  const auto check = [](const Sizes& s, const std::vector<std::int64_t>& segments, std::int64_t unit) {
    KernelContext ctx(2);
    const auto a = random_array<In>(s.m * s.k, 1), b = random_array<In>(s.k * s.n, 2);
    const Array<float> one = in_parts(ctx, a, b, s, 1, segments, unit);
    for (const int ranks : {2, 4, 8}) {
      const Array<float> parts = in_parts(ctx, a, b, s, ranks, segments, unit);
      EXPECT_EQ(std::memcmp(parts.data(), one.data(), one.size() * sizeof(float)), 0)
          << s.m << "x" << s.n << "x" << s.k << ", " << ranks << " ranks, " << segments.size() << " segments";
    }
  };
  check({37, 45, 64}, {64}, 1);
  check({200, 300, 8 * 37}, {8 * 37}, 1);
  check({33, 65, 8 * 521}, {8 * 521}, 1);
  check({19, 21, 96}, {64, 16, 16}, 1);
  check({40, 30, 16 * 9}, {16}, 9);
}
TEST(TreeProducts, PartsHaveTheBitsOfTheWholeF32) { parts_have_the_bits_of_the_whole<float>(); }
TEST(TreeProducts, PartsHaveTheBitsOfTheWholeBf16) { parts_have_the_bits_of_the_whole<bf16>(); }

}  // namespace
}  // namespace weft::kernels::tree_products_test
