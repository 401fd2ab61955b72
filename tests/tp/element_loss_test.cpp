// Losses of elements on plain vectors: each rank's part, in f32 and bf16, in place and not in place. Also the
// refused arguments.
#include "weft/tp/element_loss.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/errors.hpp"
#include "weft/base/error.hpp"

namespace weft::tp_element_loss_test {
namespace {

template <class T>
TensorView of(std::vector<T>& v) {
  const Shape shape{static_cast<std::int64_t>(v.size())};
  return {reinterpret_cast<std::byte*>(v.data()), dtype_of<T>, {}, shape, row_major(shape)};
}

TEST(ElementLossOnViews, PartsAddUpToTheWhole) {
  Context context;
  Compute compute(context, 1);
  std::vector<float> y{0.5f, -1, 2, 3, -0.25f}, t{1, 0, 0.5f, 1, 0.25f}, dy(5);
  const double whole = mean_squared_error(compute, of(y), of(t), {.count = 5}, of(dy));
  EXPECT_NEAR(whole, (0.25 + 1 + 2.25 + 4 + 0.25) / 5, 1e-12);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_FLOAT_EQ(dy[i], 2 * (y[i] - t[i]) / 5);
  std::vector<float> first(y.begin(), y.begin() + 2), rest(y.begin() + 2, y.end()),
      t1(t.begin(), t.begin() + 2), t2(t.begin() + 2, t.end());
  EXPECT_NEAR(mean_squared_error(compute, of(first), of(t1), {.count = 5}) +
                  mean_squared_error(compute, of(rest), of(t2), {.count = 5}, of(rest)),
              whole, 1e-12);
  EXPECT_FLOAT_EQ(rest[0], dy[2]);  // in place of y

  double expected = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    const auto x = static_cast<double>(y[i]), p = 1 / (1 + std::exp(-x)), to = static_cast<double>(t[i]);
    expected -= (to * std::log(p) + (1 - to) * std::log(1 - p)) / 10;
  }
  EXPECT_NEAR(binary_cross_entropy(compute, of(y), of(t), {.count = 10, .scale = 3}, of(dy)), expected,
              1e-12);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(dy[i], 0.3f * (1 / (1 + std::exp(-y[i])) - t[i]), 1e-7f);

  std::vector<bf16> half, half_t, half_dy(5);
  for (std::size_t i = 0; i < 5; ++i) half.push_back(bf16(y[i])), half_t.push_back(bf16(t[i]));
  EXPECT_NEAR(mean_squared_error(compute, of(half), of(half_t), {.count = 1}, of(half_dy)), 5 * whole, 1e-12);
  EXPECT_EQ(static_cast<float>(half_dy[1]), -2.0f);
}

// Infinite logits. If they have the right sign, the loss is 0. If they have the wrong sign, it is infinite,
// also if they are half right.
TEST(ElementLossOnViews, InfiniteLogitsHaveTheirLimits) {
  Context context;
  Compute compute(context, 1);
  const float inf = std::numeric_limits<float>::infinity();
  const auto loss = [&](float logit, float target) {
    std::vector<float> y{logit}, t{target}, dy(1);
    const double value = binary_cross_entropy(compute, of(y), of(t), {.count = 1}, of(dy));
    EXPECT_EQ(dy[0], (logit > 0 ? 1.0f : 0.0f) - target);
    return value;
  };
  EXPECT_EQ(loss(inf, 1), 0);
  EXPECT_EQ(loss(-inf, 0), 0);
  for (const float target : {0.0f, 0.5f}) EXPECT_EQ(loss(inf, target), inf);
  for (const float target : {1.0f, 0.5f}) EXPECT_EQ(loss(-inf, target), inf);
  std::vector<float> y{std::nanf("")}, t{0};
  EXPECT_TRUE(std::isnan(binary_cross_entropy(compute, of(y), of(t), {.count = 1})));
}

TEST(ElementLossOnViews, RefuseWhatDoesNotFit) {
  Context context;
  Compute compute(context, 1);
  std::vector<float> y(3), t(3), short_t(2);
  std::vector<double> wide(3);
  const auto text = [&](const TensorView& a, const TensorView& b, const ElementLossOptions& o,
                        const TensorView& dy = {}) {
    return test::error_text(ErrorCode::bad_argument, [&] { mean_squared_error(compute, a, b, o, dy); });
  };
  EXPECT_EQ(text(of(wide), of(t), {.count = 3}), "mean_squared_error: y is f64; expected f32 or bf16");
  EXPECT_EQ(text(of(y), of(short_t), {.count = 3}),
            "mean_squared_error: target is (2); expected (3), from y (3)");
  EXPECT_EQ(text(of(y), of(t), {.count = 3}, of(short_t)),
            "mean_squared_error: dy is (2); expected (3), from y (3)");
  EXPECT_EQ(text(of(y), of(t), {.count = 3}, of(t)),
            "mean_squared_error: dy overlaps target; expected memory of its own");
  EXPECT_EQ(
      text(of(y), of(t), {}),
      "mean_squared_error: count is 0; expected the number of elements of the whole batch, more than 0");
  EXPECT_EQ(text(of(y), of(t), {.count = 3, .scale = std::nan("")}),
            "mean_squared_error: scale is nan; expected a finite number");
  t[1] = -1;
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] { binary_cross_entropy(compute, of(y), of(t), {.count = 3}); }),
            "binary cross entropy: element 1 has target -1; expected 0 to 1");
}

}  // namespace
}  // namespace weft::tp_element_loss_test
