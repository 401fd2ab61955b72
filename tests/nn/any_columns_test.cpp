// bf16 products whose columns are pixels of a map: the bits of an element depend neither on the number of
// columns nor on the number of threads.
#include <algorithm>
#include <cstring>

#include "nn/kernel_support.hpp"

namespace weft::any_columns_test {
namespace {

using namespace kernels;
using kernels::test::Array;
using kernels::test::random_array;

struct Case {
  std::int64_t m, k, n;
  Stored a;
};

// Products of one piece and of several: of columns, with a short and a long k, one that ends in a part of a
// tile; of rows.
const Case kCases[] = {{20, 70, 900, Stored::plain},        {128, 576, 2300, Stored::plain},
                       {300, 1170, 1100, Stored::plain},    {1200, 600, 1100, Stored::plain},
                       {64, 200, 3000, Stored::transposed}, {475, 1121, 1415, Stored::transposed},
                       {1106, 751, 700, Stored::transposed}};

TEST(Bf16Products, BitsOfAnElementAreThoseOfAnyNumberOfColumns) {
  for (const Case& c : kCases) {
    const auto a = random_array<bf16>(c.m * c.k, 1), b = random_array<bf16>(c.k * c.n, 2);
    // Columns [lo, hi) of b.
    const auto product = [&](KernelContext& ctx, std::int64_t lo, std::int64_t hi, bool accumulate) {
      Array<bf16> columns;
      for (std::int64_t p = 0; p < c.k; ++p)
        columns.insert(columns.end(), b.begin() + p * c.n + lo, b.begin() + p * c.n + hi);
      Array<float> out(static_cast<std::size_t>(c.m * (hi - lo)), accumulate ? 0.75f : 1e30f);
      matmul(ctx, a.data(), c.a, columns.data(), Stored::plain, out.data(), c.m, hi - lo, c.k, accumulate);
      return out;
    };
    for (const bool accumulate : {false, true}) {
      KernelContext one(1), three(3);
      const Array<float> whole = product(one, 0, c.n, accumulate);
      ASSERT_TRUE(kernels::test::same_bits(whole, product(three, 0, c.n, accumulate)));
      for (const auto& [lo, hi] :
           {std::pair<std::int64_t, std::int64_t>{0, 1}, {5, 22}, {c.n / 3, c.n}, {1, 513}}) {
        SCOPED_TRACE(testing::Message() << c.m << " x " << c.k << " x [" << lo << ", " << hi << ") of " << c.n
                                        << (accumulate ? ", added" : ""));
        const Array<float> part = product(one, lo, hi, accumulate);
        for (std::int64_t i = 0; i < c.m; ++i)
          ASSERT_EQ(std::memcmp(&part[static_cast<std::size_t>(i * (hi - lo))],
                                &whole[static_cast<std::size_t>(i * c.n + lo)],
                                static_cast<std::size_t>(hi - lo) * sizeof(float)),
                    0)
              << "row " << i;
      }
    }
  }
}

}  // namespace
}  // namespace weft::any_columns_test
