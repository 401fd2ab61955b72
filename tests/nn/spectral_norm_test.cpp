// A spectral norm on one rank: what it computes against plain loops in f64, its gradient against finite
// differences, and what it refuses. Over several ranks: tp/spectral_norm.
#include "weft/nn/spectral_norm.hpp"

#include <algorithm>
#include <limits>

#include "nn/support.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/linear.hpp"

namespace weft::spectral_norm_test {
namespace {

using test::doubles;
using test::error_text;
using test::random_tensor;

using Doubles = std::vector<double>;

double norm(const Doubles& x) {
  double squares = 0;
  for (const double e : x) squares += e * e;
  return std::sqrt(squares);
}

// One power iteration of W: (rows, columns); sigma afterwards.
double iterate(const Doubles& w, Doubles& u, Doubles& v) {
  const auto at = [&](std::size_t r, std::size_t c) { return w[r * v.size() + c]; };
  for (std::size_t c = 0; c < v.size(); ++c) {
    v[c] = 0;
    for (std::size_t r = 0; r < u.size(); ++r) v[c] += at(r, c) * u[r];
  }
  const double of_v = norm(v);
  for (double& e : v) e /= of_v;
  for (std::size_t r = 0; r < u.size(); ++r) {
    u[r] = 0;
    for (std::size_t c = 0; c < v.size(); ++c) u[r] += at(r, c) * v[c];
  }
  const double sigma = norm(u);
  for (double& e : u) e /= sigma;
  return sigma;
}

void set_up(Module& module, Compute& compute) {
  materialise(module, compute);
  initialise(module, 3);
}

TEST(SpectralNorm, DividesByTheLargestSingularValue) {
  test::Bench bench;
  Linear layer(5, 7, true, Normal{1.0});
  layer.add_spectral_norm({.power_iterations = 1});
  set_up(layer, bench.compute);
  EXPECT_EQ(layer.weight->path(), "weight_orig");
  ASSERT_EQ(layer.own_buffers().size(), 2u);
  EXPECT_EQ(layer.own_buffers()[0].first, "weight_u");
  EXPECT_EQ(layer.own_buffers()[1].first, "weight_v");
  const Tensor &u = layer.own_buffers()[0].second->tensor(), &v = layer.own_buffers()[1].second->tensor();
  Doubles of_u = doubles(u), of_v = doubles(v);
  EXPECT_NEAR(norm(of_u), 1, 0.7);
  const Doubles w = doubles(layer.weight->master());
  const Tensor x = random_tensor(bench.context, {4, 5}, "x");
  Tensor y;
  double sigma = 0;
  for (int pass = 0; pass < 3; ++pass) {  // each pass of a training makes one iteration
    Frame frame(bench.compute);
    y = layer.forward(x, frame)[0];
    sigma = iterate(w, of_u, of_v);
    test::expect_near(u, of_u, 1e-5, "u");
    test::expect_near(v, of_v, 1e-5, "v");
  }
  Doubles expected;
  for (std::size_t t = 0; t < 4; ++t)
    for (std::size_t o = 0; o < 7; ++o) {
      double sum = 0;
      for (std::size_t i = 0; i < 5; ++i) sum += doubles(x)[t * 5 + i] * w[o * 5 + i] / sigma;
      expected.push_back(sum);
    }
  test::expect_near(y, expected, 1e-5, "y");
  // Other passes leave u and v as they are.
  Frame inference = Frame::inference(bench.compute);
  test::expect_near(layer.forward(x, inference)[0], expected, 1e-5, "y of inference");
  test::expect_near(u, of_u, 1e-5, "u after inference");
  // After many iterations the largest singular value of Ŵ is 1, and |Ŵ x| <= |x|.
  for (int pass = 0; pass < 50; ++pass) {
    Frame frame(bench.compute);
    y = layer.forward(x, frame)[0];
  }
  EXPECT_LE(norm(doubles(y)), norm(doubles(x)) * (1 + 1e-4));
}

TEST(SpectralNorm, SeveralIterationsInAPass) {
  test::Bench bench;
  Linear layer(3, 4, false, Normal{1.0});
  layer.add_spectral_norm({.power_iterations = 5});
  set_up(layer, bench.compute);
  Doubles u = doubles(layer.spectral_norm()->u->tensor()), v = doubles(layer.spectral_norm()->v->tensor());
  for (int i = 0; i < 5; ++i) iterate(doubles(layer.weight->master()), u, v);
  Frame frame(bench.compute);
  layer.forward(random_tensor(bench.context, {2, 3}, "x"), frame);
  test::expect_near(layer.spectral_norm()->u->tensor(), u, 1e-5, "u");
  test::expect_near(layer.spectral_norm()->v->tensor(), v, 1e-5, "v");
}

TEST(SpectralNorm, GradientsAreThoseThroughSigma) {
  test::Bench bench;
  Linear linear(5, 7, true, Normal{1.0});
  linear.add_spectral_norm();
  set_up(linear, bench.compute);
  test::expect_gradients_match_differences(linear, random_tensor(bench.context, {2, 3, 5}, "x"),
                                           bench.compute);

  Conv2dConfig config{.in = 4, .out = 6, .kernel = 3, .padding = 1, .groups = 2, .init = Normal{1.0}};
  Conv2d conv(config);
  conv.add_spectral_norm();
  set_up(conv, bench.compute);
  EXPECT_EQ(conv.spectral_norm()->v->global_shape(), Shape({18}));
  test::expect_gradients_match_differences(conv, random_tensor(bench.context, {2, 4, 3, 3}, "maps"),
                                           bench.compute);
}

// dW = (dŴ - <dŴ, Ŵ> u vᵀ) / sigma, from the dŴ of a layer without one whose weight is Ŵ.
TEST(SpectralNorm, GradientsOfTwoUsesAreAdded) {
  test::Bench bench;
  Linear layer(4, 3, false, Normal{1.0}), plain(4, 3);
  layer.add_spectral_norm();
  set_up(layer, bench.compute);
  set_up(plain, bench.compute);
  const Tensor x = random_tensor(bench.context, {5, 4}, "x"), dy = random_tensor(bench.context, {5, 3}, "dy");
  Doubles expected(12, 0.0);
  for (int use = 0; use < 2; ++use) {
    Frame frame(bench.compute), beside(bench.compute);
    const Tensor y = layer.forward(x, frame)[0];
    layer.backward(dy, frame);
    // sigma by y = x Wᵀ / sigma, with u and v of this pass
    Doubles w = doubles(layer.weight->master()), u = doubles(layer.spectral_norm()->u->tensor()),
            v = doubles(layer.spectral_norm()->v->tensor());
    double sigma = 0, inner = 0;
    for (std::size_t r = 0; r < 3; ++r)
      for (std::size_t c = 0; c < 4; ++c) sigma += u[r] * w[r * 4 + c] * v[c];
    const Tensor of_plain = plain.weight->write_master();
    for (std::size_t i = 0; i < 12; ++i) of_plain.f32()[i] = static_cast<float>(w[i] / sigma);
    plain.weight->zero_gradient();
    test::expect_near(plain.forward(x, beside)[0], doubles(y), 1e-5, "y");
    plain.backward(dy, beside);
    const Doubles d = doubles(plain.weight->gradient());
    for (std::size_t i = 0; i < 12; ++i) inner += d[i] * w[i] / sigma;
    for (std::size_t i = 0; i < 12; ++i) expected[i] += (d[i] - inner * u[i / 4] * v[i % 4]) / sigma;
  }
  test::expect_near(layer.weight->gradient(), expected, 1e-4, "dW");
}

TEST(SpectralNorm, TakesAWeightInBf16) {
  test::Bench bench;
  Linear layer(6, 6, false, Normal{1.0}), wide(6, 6, false, Normal{1.0});
  layer.add_spectral_norm();
  wide.add_spectral_norm();
  layer.weight->set_dtype(DType::bf16);
  set_up(layer, bench.compute);
  set_up(wide, bench.compute);
  const Tensor x = random_tensor(bench.context, {3, 6}, "x");
  Frame frame(bench.compute), beside(bench.compute);
  const Tensor y = layer.forward(x, frame)[0];
  test::expect_near(y, doubles(wide.forward(x, beside)[0]), 0.03, "y");
  layer.backward(x, frame);
  wide.backward(x, beside);
  test::expect_near(layer.weight->gradient(), doubles(wide.weight->gradient()), 0.1, "dW");
}

TEST(SpectralNorm, OnAllLayersOfATree) {
  Sequential model;
  model.append(std::make_unique<Linear>(2, 2));
  model.append(std::make_unique<Conv2d>(Conv2dConfig{.in = 1, .out = 1}));
  model.append("last", std::make_unique<Linear>(2, 2));
  dynamic_cast<Linear&>(model.get("0")).add_spectral_norm();
  EXPECT_EQ(add_spectral_norm(model), 2);
  EXPECT_EQ(model.parameter("last.weight_orig")->path(), "last.weight_orig");
  EXPECT_EQ(model.buffers().size(), 6u);
  EXPECT_EQ(model.buffers()[5]->path(), "last.weight_v");
}

TEST(SpectralNorm, RefusesWhatItIsNotFor) {
  test::Bench bench;
  const auto text = [](Linear& layer, const SpectralNormConfig& config = {}) {
    return error_text(ErrorCode::bad_argument, [&] { layer.add_spectral_norm(config); });
  };
  Linear layer(2, 2);
  EXPECT_EQ(text(layer, {.power_iterations = 0}),
            "spectral norm of \"\": power_iterations is 0; expected at least 1");
  EXPECT_EQ(text(layer, {.eps = 0}), "spectral norm of \"\": eps is 0; expected more than 0");
  layer.add_spectral_norm();
  EXPECT_EQ(text(layer), "spectral norm of \"\": it has one already");
  Linear tied(2, 2), other(2, 2);
  tied.tie_weight(other.weight);
  EXPECT_EQ(text(other),
            "spectral norm of \"\": its weight \"weight\" is shared by 2 modules; expected one of its own");
  Linear late(2, 2);
  materialise(late, bench.compute);
  EXPECT_EQ(text(late),
            "spectral norm of \"\": its weight \"weight\" has memory already; add it before parallelize and "
            "materialise");

  Linear zero(2, 2, false, Constant{0.0});
  zero.add_spectral_norm();
  set_up(zero, bench.compute);
  Frame frame(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         zero.forward(random_tensor(bench.context, {1, 2}, "x"), frame);
                       }),
            "spectral norm of \"weight_orig\": sigma is 0; expected a number other than 0");
}

// An error leaves u and v as they were: from zeros, or from what is no number, no later pass would come back.
TEST(SpectralNorm, APassAfterAnErrorWorks) {
  test::Bench bench;
  Linear layer(3, 2, false, Normal{1});
  layer.add_spectral_norm();
  set_up(layer, bench.compute);
  const Doubles w = doubles(layer.weight->master());
  Doubles u = doubles(layer.spectral_norm()->u->tensor()), v = doubles(layer.spectral_norm()->v->tensor());
  const Tensor x = random_tensor(bench.context, {1, 3}, "x");
  Frame frame(bench.compute);
  for (const float wrong : {0.0f, std::numeric_limits<float>::quiet_NaN()}) {
    for (float& f : layer.weight->write_master().f32()) f = wrong;
    error_text(ErrorCode::bad_argument, [&] { layer.forward(x, frame); });
    frame.clear();
  }
  std::ranges::transform(w, layer.weight->write_master().f32().begin(),
                         [](double d) { return static_cast<float>(d); });
  const double sigma = iterate(w, u, v);
  Doubles y(2, 0.0);
  for (std::size_t r = 0; r < 2; ++r)
    for (std::size_t c = 0; c < 3; ++c) y[r] += w[r * 3 + c] * doubles(x)[c] / sigma;
  test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y");
}

}  // namespace
}  // namespace weft::spectral_norm_test
