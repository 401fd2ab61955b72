// Tensors of random numbers, and the comparison of what several ranks computed with what one rank did.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>

#include "weft/base/random.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {

/// Normal numbers, the same ones for the same name.
inline Tensor random_tensor(Context& context, const Shape& shape, std::string_view name) {
  Tensor t(context, shape);
  RandomStream(5, name).normal(0, t.count(), t.f32().data());
  return t;
}

/// `tolerance`: of the largest number. Sums of at most 96 products, cut in up to four parts. Another order
/// moves them by no more than 96 · 2^-24 of the sum of magnitudes, which is some times the largest result.
inline void expect_near(const Tensor& got, const Tensor& expected, const std::string& what,
                        double tolerance = 2e-5) {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  double largest = 0, worst = 0;
  for (const float f : expected.f32()) largest = std::max(largest, std::abs(static_cast<double>(f)));
  for (std::size_t i = 0; i < expected.f32().size(); ++i)
    worst =
        std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(expected.f32()[i])));
  EXPECT_GT(largest, 0) << what;
  EXPECT_LE(worst, tolerance * largest) << what;
}

}  // namespace weft::test
