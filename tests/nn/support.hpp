// Helpers of the nn tests.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/module.hpp"

namespace weft::test {

/// A context and one thread to compute with.
struct Bench {
  Context context;
  Compute compute{context, 1};
};

inline Tensor tensor_of(Context& context, const Shape& shape, std::vector<float> values) {
  Tensor t(context, shape);
  std::copy(values.begin(), values.end(), t.f32().begin());
  return t;
}

inline Tensor tokens_of(Context& context, const Shape& shape, std::vector<std::int64_t> values) {
  Tensor t(context, shape, DType::i64);
  std::copy(values.begin(), values.end(), t.as<std::int64_t>().begin());
  return t;
}

/// Standard normal numbers that depend on `name` alone.
inline Tensor random_tensor(Context& context, const Shape& shape, std::string_view name) {
  Tensor t(context, shape);
  RandomStream(11, name).normal(0, t.count(), t.f32().data());
  return t;
}

inline std::vector<double> doubles(const Tensor& t) { return {t.f32().begin(), t.f32().end()}; }
inline std::vector<float> floats(const Tensor& t) { return {t.f32().begin(), t.f32().end()}; }

inline void expect_near(const Tensor& got, const std::vector<double>& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(static_cast<std::size_t>(got.count()), expected.size()) << what;
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(got.f32()[i], expected[i], tolerance) << what << " [" << i << "]";
}

inline double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.count()); ++i)
    sum += static_cast<double>(a.f32()[i]) * static_cast<double>(b.f32()[i]);
  return sum;
}

/// Compares gradients with finite differences along random directions, for x (where floating) and every
/// parameter: the change of L = Σ y·cotangent between two points 2h apart, both from the f32 forward pass.
/// With h = 1/64 and values of order one the difference has about four digits. `floor` is what they may
/// differ by in any case, for gradients that are 0 up to rounding.
inline void expect_gradients_match_differences(Module& module, const Tensor& x, Compute& compute,
                                               double tolerance = 2e-3, double floor = 0) {
  Context& context = compute.context();
  Frame frame(compute);
  const Tensor y = module.forward(x, frame)[0];
  const Tensor cotangent = random_tensor(context, y.shape(), "cotangent");
  for (Parameter* p : module.parameters()) p->zero_gradient();
  const Tensors dx = module.backward(cotangent, frame);
  ASSERT_TRUE(frame.empty());

  constexpr float kStep = 1.0f / 64;
  const auto check = [&](const Tensor& at, const Tensor& gradient, const std::string& what) {
    const Tensor direction = random_tensor(context, at.shape(), "direction of " + what);
    const std::vector<float> kept = floats(at);
    double loss[2];
    for (int side = 0; side < 2; ++side) {
      for (std::size_t i = 0; i < kept.size(); ++i)
        at.f32()[i] = kept[i] + (side == 0 ? kStep : -kStep) * direction.f32()[i];
      Frame scratch = Frame::inference(compute);
      loss[side] = dot(module.forward(x, scratch)[0], cotangent);
    }
    std::copy(kept.begin(), kept.end(), at.f32().begin());
    const double difference = (loss[0] - loss[1]) / (2.0 * kStep);
    const double scale = std::sqrt(dot(gradient, gradient) * dot(direction, direction));
    EXPECT_NEAR(difference, dot(gradient, direction), tolerance * scale + floor) << what;
  };
  if (is_floating(x.dtype())) {
    ASSERT_EQ(dx.size(), 1u);
    check(x, dx[0], "x");
  }
  for (Parameter* p : module.parameters()) check(p->master(), p->gradient(), p->path());
}

}  // namespace weft::test
