// Losses of elements: values and gradients compared with f64, on one rank and cut over samples and space;
// refused arguments.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "nn/support.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/loss.hpp"

namespace weft::element_loss_test {
namespace {

using test::error_text;
using test::random_tensor;

enum class Kind { mse, bce };

std::unique_ptr<ElementLoss> make(Kind kind) {
  if (kind == Kind::mse) return std::make_unique<MeanSquaredError>();
  return std::make_unique<BinaryCrossEntropy>();
}
// The term of an element, and the derivative.
double term(Kind kind, double y, double t) {
  if (kind == Kind::mse) return (y - t) * (y - t);
  const double p = 1 / (1 + std::exp(-y));
  return -t * std::log(p) - (1 - t) * std::log1p(-p);
}
double slope(Kind kind, double y, double t) {
  return kind == Kind::mse ? 2 * (y - t) : 1 / (1 + std::exp(-y)) - t;
}

// Targets from 0 to 1: both losses take them.
Tensor targets(Context& context, const Shape& shape) {
  const Tensor t = random_tensor(context, shape, "target");
  for (float& x : t.f32()) x = 0.5f + 0.5f * std::sin(3.0f * x);
  return t;
}

class ElementLosses : public ::testing::TestWithParam<Kind> {};

TEST_P(ElementLosses, AreMeansOverAllElementsAndTheirGradients) {
  test::Bench bench;
  const auto layer = make(GetParam());
  for (const Shape& shape : {Shape{2, 3, 5}, Shape{}, Shape{3, 4099}, Shape{0, 4}})
    for (const std::int64_t more : {1, 3}) {  // 3: as if other ranks had twice as many
      SCOPED_TRACE(to_string(shape));
      const Tensor y = random_tensor(bench.context, shape, "y"), t = targets(bench.context, shape);
      const std::int64_t count = std::max<std::int64_t>(1, y.count() * more);
      double expected = 0;
      std::vector<double> gradient;
      for (std::size_t i = 0; i < static_cast<std::size_t>(y.count()); ++i) {
        const auto at = static_cast<double>(y.f32()[i]), to = static_cast<double>(t.f32()[i]);
        expected += term(GetParam(), at, to) / static_cast<double>(count);
        gradient.push_back(slope(GetParam(), at, to) / static_cast<double>(count));
      }
      Frame frame(bench.compute);
      const Tensor loss = layer->forward({y, t, scalar(bench.context, count)}, frame)[0];
      EXPECT_NEAR(loss.as<double>()[0], expected, 1e-12 + 1e-12 * expected);
      test::expect_near(layer->backward({}, frame)[0], gradient, 2e-6 / static_cast<double>(count), "dy");
      layer->forward({y, t, scalar(bench.context, count)}, frame);
      const Tensor dloss(bench.context, {1}, DType::f64);
      dloss.as<double>()[0] = -4;
      for (double& d : gradient) d *= -4;
      test::expect_near(layer->backward(dloss, frame)[0], gradient, 8e-6 / static_cast<double>(count), "dy");
      EXPECT_TRUE(frame.empty());
    }
}

TEST(BinaryCrossEntropy, HoldsForLogitsFarFromZero) {
  test::Bench bench;
  BinaryCrossEntropy layer;
  Frame frame(bench.compute);
  const Tensor y = test::tensor_of(bench.context, {4}, {200, -200, 200, -200}),
               t = test::tensor_of(bench.context, {4}, {1, 0, 0, 1});
  EXPECT_EQ(layer.forward({y, t, scalar(bench.context, 4)}, frame)[0].as<double>()[0], 100.0);
  test::expect_near(layer.backward({}, frame)[0], {0, 0, 0.25, -0.25}, 0, "dy");
}

TEST_P(ElementLosses, HaveTheSameBitsOnAnyNumberOfThreads) {
  const auto results = [&](int threads) {
    Context context;
    Compute compute(context, threads);
    const auto layer = make(GetParam());
    const Tensor y = random_tensor(context, {40, 1000}, "y"), t = targets(context, {40, 1000});
    Frame frame(compute);
    const double loss = layer->forward({y, t, global_count(compute, y)}, frame)[0].as<double>()[0];
    return std::pair(loss, test::floats(layer->backward({}, frame)[0]));
  };
  EXPECT_EQ(results(1), results(3));
}

// Samples on one axis and rows of the maps on another, unevenly. The sum of the parts is the loss of one
// rank. The gradients are those of one rank, too.
TEST_P(ElementLosses, CutOverSamplesAndSpaceAreAsOnOneRank) {
  test::run_ranks(test::Ranks::threads, 6, [&](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"y", 3}});
    const auto layer = make(GetParam());
    const Tensor y = random_tensor(rank.context, {3, 2, 7, 5}, "y"), t = targets(rank.context, y.shape());
    Frame frame(compute);
    const double want = layer->forward({y, t, global_count(compute, y)}, frame)[0].as<double>()[0];
    const Tensor dy = layer->backward({}, frame)[0];
    const LayoutRef cut = make_layout(mesh, {{"dp", Shard{0}}, {"y", Shard{2}}}, y.shape());
    const Tensor part = distribute(y, cut), part_t = distribute(t, cut), count = global_count(compute, part);
    EXPECT_EQ(count.as<std::int64_t>()[0], 210);
    const Tensor loss = layer->forward({part, part_t, count}, frame)[0];
    EXPECT_EQ(to_string(loss.layout()->on("y")), "Partial(sum)");
    EXPECT_NEAR(full(loss).as<double>()[0], want, 1e-14);
    const Tensor got = layer->backward({}, frame)[0];
    EXPECT_EQ(got.layout(), cut);
    const Tensor whole = full(got);
    EXPECT_EQ(std::memcmp(whole.data(), dy.data(), static_cast<std::size_t>(dy.bytes())), 0);

    const std::string name = GetParam() == Kind::mse ? "mean squared error" : "binary cross entropy";
    const auto text = [&](const Tensor& a, const Tensor& b, const Tensor& c) {
      return error_text(ErrorCode::layout, [&] { layer->forward({a, b, c}, frame); });
    };
    EXPECT_EQ(
        text(part, part_t, scalar(rank.context, 210)),
        name +
            ": count is a plain tensor; where y are (3, 2, 7, 5) as [dp: Shard(0), y: Shard(2)] it must be "
            "stated as the number of all ranks: global_count(compute, y), or scalar(mesh, n)");
    EXPECT_EQ(text(part, distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape())), count),
              name + ": target is Replicate on y=3; expected Shard(2) (as y)");
    EXPECT_EQ(
        text(as_layout(y, make_layout(mesh, {{"dp", Partial{}}}, y.shape())), part_t, count),
        name +
            ": y is Partial(sum) on dp=2; a loss needs values, not contributions to them: a boundary must "
            "reduce it first");
  });
}

TEST_P(ElementLosses, RefuseWhatDoesNotFit) {
  test::Bench bench;
  const auto layer = make(GetParam());
  const std::string name = GetParam() == Kind::mse ? "mean squared error" : "binary cross entropy";
  const Tensor y = random_tensor(bench.context, {2, 3}, "y"), t = targets(bench.context, {2, 3}),
               six = scalar(bench.context, 6);
  const auto text = [&](const Tensors& x, const Tensors& dy = {}) {
    Frame frame(bench.compute);
    return error_text(ErrorCode::bad_argument, [&] {
      layer->forward(x, frame);
      layer->backward(dy, frame);
    });
  };
  EXPECT_EQ(text({y, t}), "\"\": got 2 inputs (y, target, count); expected 3");
  EXPECT_EQ(text({Tensor::zeros(bench.context, {2, 3}, DType::bf16), t, six}),
            name + ": y is bf16; expected f32");
  EXPECT_EQ(text({y, six, six}), name + ": target is i64; expected f32");
  EXPECT_EQ(text({y, t.reshape({6}), six}), name + ": target is (6); expected (2, 3), as y");
  EXPECT_EQ(text({y, t, t}), name + ": count is f32; expected i64");
  EXPECT_EQ(text({y, t, test::tokens_of(bench.context, {2}, {6, 6})}),
            name + ": count has 2 elements; expected 1");
  EXPECT_EQ(text({y, t, scalar(bench.context, 0)}),
            name + ": count is 0; expected the number of elements of all ranks, more than 0");
  EXPECT_EQ(text({y, t, six}, {y}), name + ": d(loss) is f32; expected f64");
  if (GetParam() == Kind::bce) {
    t.f32()[4] = 1.5f;
    EXPECT_EQ(text({y, t, six}), name + ": element 4 has target 1.5; expected 0 to 1");
  }
}

INSTANTIATE_TEST_SUITE_P(Both, ElementLosses, ::testing::Values(Kind::mse, Kind::bce),
                         [](const auto& of) { return of.param == Kind::mse ? "Mse" : "Bce"; });

}  // namespace
}  // namespace weft::element_loss_test
