// LayerNorm, GELU, ReLU and the layers on maps (batch, channels, height, width) against the plain-loop
// kernels, and their gradients against finite differences.
#include "nn/kernels/reference_maps.hpp"
#include "nn/support.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::map_layers_test {
namespace {

namespace reference = kernels::reference;
using test::doubles;
using test::error_text;
using test::random_tensor;

using Doubles = std::vector<double>;
Doubles zeros(std::int64_t n) { return Doubles(static_cast<std::size_t>(n)); }

// Random values of order one in every parameter, so that each of them matters.
void fill(Module& module, Compute& compute) {
  materialise(module, compute);
  for (Parameter* p : module.parameters()) {
    const Shape& shape = p->global_shape();
    const float scale = shape.rank() > 1 && shape[0] > 1
                            ? 1.0f / std::sqrt(static_cast<float>(shape.count() / shape[0]))
                            : 1.0f;
    RandomStream(5, p->path()).normal(0, p->master().count(), p->write_master().f32().data());
    for (float& f : p->master().f32()) f *= scale;
  }
}

// Also with bf16 weights, and with a map that is unfolded in several blocks.
TEST(Conv2dLayer, BitsDoNotDependOnTheNumberOfThreads) {
  Context context;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::vector<float> one;
    for (const int threads : {1, 8}) {
      Compute compute(context, threads);
      Conv2d layer(Conv2dConfig{.in = 64, .out = 256, .kernel = 3, .padding = 1});
      layer.weight->set_dtype(dtype);
      fill(layer, compute);
      Frame frame = Frame::inference(compute);
      const Tensor y = layer.forward(random_tensor(context, {1, 64, 64, 64}, "x"), frame)[0];
      const std::vector<float> bits(y.f32().begin(), y.f32().end());
      if (threads == 1) one = bits;
      EXPECT_TRUE(bits == one) << name(dtype) << " on " << threads << " threads";
    }
  }
}

TEST(LayerNorm, NormalisesTheLastDimension) {
  test::Bench bench;
  LayerNorm layer(6, 1e-3);
  fill(layer, bench.compute);
  EXPECT_EQ(layer.parameter("bias")->global_shape(), Shape({6}));
  const Tensor x = random_tensor(bench.context, {3, 2, 6}, "x");
  Frame frame = Frame::inference(bench.compute);
  Doubles y = zeros(36), mean = zeros(6), inv = zeros(6);
  reference::layer_norm_forward(doubles(x).data(), doubles(layer.weight->master()).data(),
                                doubles(layer.bias->master()).data(), y.data(), mean.data(), inv.data(), 6, 6,
                                1e-3);
  test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y");
  test::expect_gradients_match_differences(layer, x, bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor(bench.context, {2, 5}), frame);
                       }),
            "\"\": x is (2, 5); expected a last dimension of 6 (the weight's)");
}

TEST(LayerNorm, LeavesOutTheGradientOfWhatIsFrozen) {
  test::Bench bench;
  LayerNorm layer(4);
  fill(layer, bench.compute);
  layer.bias->set_trainable(false);
  Frame frame(bench.compute);
  const Tensor x = random_tensor(bench.context, {3, 4}, "x");
  layer.backward(layer.forward(x, frame), frame);
  EXPECT_TRUE(layer.weight->has_gradient());
  EXPECT_FALSE(layer.bias->has_gradient());
}

TEST(ChannelNorm, NormalisesEachPixelOverItsChannels) {
  test::Bench bench;
  ChannelNorm layer(5, 1e-3);
  fill(layer, bench.compute);
  EXPECT_EQ(layer.parameter("g")->global_shape(), Shape({1, 5, 1, 1}));
  EXPECT_FALSE(layer.g->decays());
  const Tensor x = random_tensor(bench.context, {2, 5, 3, 2}, "x");
  Frame frame = Frame::inference(bench.compute);
  Doubles y = zeros(60), mean = zeros(12), inv = zeros(12);
  reference::channel_norm_forward(doubles(x).data(), doubles(layer.g->master()).data(),
                                  doubles(layer.b->master()).data(), y.data(), mean.data(), inv.data(),
                                  {2, 5, 6}, 1e-3);
  test::expect_near(layer.forward(x, frame)[0], y, 1e-5, "y");
  test::expect_gradients_match_differences(layer, x, bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor(bench.context, {2, 4, 3, 2}), frame);
                       }),
            "\"\": x is (2, 4, 3, 2); expected (batch, 5, …)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { layer.forward(Tensor(bench.context, {5}), frame); }),
            "\"\": x is (5); expected (batch, 5, …)");
}

TEST(Gelu, HasBothForms) {
  test::Bench bench;
  const Tensor x = random_tensor(bench.context, {2, 3, 4}, "x");
  for (const GELU::Form form : {GELU::Form::erf, GELU::Form::tanh}) {
    GELU layer(form);
    Frame frame = Frame::inference(bench.compute);
    Doubles y = zeros(24);
    reference::gelu_forward(doubles(x).data(), y.data(), 24, form);
    test::expect_near(layer.forward(x, frame)[0], y, 1e-6, "y");
    test::expect_gradients_match_differences(layer, x, bench.compute);
  }
}

TEST(Relu, KeepsWhatIsPositive) {
  test::Bench bench;
  ReLU layer;
  Frame frame(bench.compute);
  const Tensor x = test::tensor_of(bench.context, {4}, {-1, 0, 2, -3});
  EXPECT_THAT(test::floats(layer.forward(x, frame)[0]), ::testing::ElementsAre(0, 0, 2, 0));
  EXPECT_THAT(test::floats(layer.backward(test::tensor_of(bench.context, {4}, {5, 6, 7, 8}), frame)[0]),
              ::testing::ElementsAre(0, 0, 7, 0));
}

// y of the layer, by loops over every output pixel.
Doubles convolved(const Conv2d& layer, const Tensor& x, std::int64_t out_height, std::int64_t out_width) {
  const Conv2dConfig& c = layer.config();
  const std::int64_t batch = x.size(0), height = x.size(2), width = x.size(3), of_group = c.in / c.groups;
  const Doubles in = doubles(x), w = doubles(layer.weight->master());
  Doubles y;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t o = 0; o < c.out; ++o)
      for (std::int64_t r = 0; r < out_height; ++r)
        for (std::int64_t s = 0; s < out_width; ++s) {
          double sum =
              layer.bias ? static_cast<double>(layer.bias->master().f32()[static_cast<std::size_t>(o)]) : 0.0;
          for (std::int64_t i = 0; i < of_group; ++i)
            for (std::int64_t j = 0; j < c.kernel.height; ++j)
              for (std::int64_t k = 0; k < c.kernel.width; ++k) {
                const std::int64_t row = reference::padded_pixel(
                    r * c.stride.height + j * c.dilation.height - c.padding.height, height, c.padding_mode);
                const std::int64_t column = reference::padded_pixel(
                    s * c.stride.width + k * c.dilation.width - c.padding.width, width, c.padding_mode);
                if (row < 0 || column < 0) continue;
                const std::int64_t channel = o / (c.out / c.groups) * of_group + i;
                sum += in[static_cast<std::size_t>(((b * c.in + channel) * height + row) * width + column)] *
                       w[static_cast<std::size_t>(
                           ((o * of_group + i) * c.kernel.height + j) * c.kernel.width + k)];
              }
          y.push_back(sum);
        }
  return y;
}

TEST(Conv2d, EqualsLoopsOverEveryPixel) {
  test::Bench bench;
  struct {
    Conv2dConfig config;
    Shape x, y;
  } const cases[] = {
      {{.in = 5, .out = 3}, {2, 5, 3, 4}, {2, 3, 3, 4}},
      {{.in = 5, .out = 3, .bias = false}, {1, 5, 1, 1}, {1, 3, 1, 1}},
      {{.in = 4, .out = 6, .kernel = 3, .padding = 1}, {2, 4, 4, 5}, {2, 6, 4, 5}},
      {{.in = 4,
        .out = 6,
        .kernel = 3,
        .padding = 1,
        .groups = 2,
        .padding_mode = kernels::Padding::circular},
       {2, 4, 4, 5},
       {2, 6, 4, 5}},
      {{.in = 3,
        .out = 3,
        .kernel = {3, 2},
        .stride = {2, 1},
        .padding = {0, 1},
        .dilation = {1, 2},
        .groups = 3,
        .padding_mode = kernels::Padding::reflect},
       {1, 3, 6, 4},
       {1, 3, 2, 4}},
      {{.in = 2, .out = 4, .kernel = 5, .padding = 2, .padding_mode = kernels::Padding::replicate},
       {1, 2, 4, 3},
       {1, 4, 4, 3}},
      {{.in = 4, .out = 2, .stride = 2, .padding = 1, .groups = 2}, {2, 4, 3, 3}, {2, 2, 3, 3}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(to_string(c.x));
    Conv2d layer(c.config);
    fill(layer, bench.compute);
    const Tensor x = random_tensor(bench.context, c.x, "x");
    Frame frame = Frame::inference(bench.compute);
    const Tensor y = layer.forward(x, frame)[0];
    ASSERT_EQ(y.shape(), c.y);
    test::expect_near(y, convolved(layer, x, c.y[2], c.y[3]), 1e-5, "y");
    test::expect_gradients_match_differences(layer, x, bench.compute);
  }
}

// Both compute sums of the same products. The library may add them in another order.
TEST(Conv2d, Of1x1IsALinearOverTheChannels) {
  test::Bench bench;
  constexpr std::int64_t in = 64, out = 96, pixels = 6 * 8;
  Conv2d conv({.in = in, .out = out});
  Linear linear(in, out, true);
  fill(conv, bench.compute);
  materialise(linear, bench.compute);
  linear.weight->set_master(conv.weight->master().reshape({out, in}));
  linear.bias->set_master(conv.bias->master().clone(bench.context));
  const Tensor x = random_tensor(bench.context, {2, in, 6, 8}, "x"),
               dy = random_tensor(bench.context, {2, out, 6, 8}, "dy");
  const auto pixels_first = [&](const Tensor& maps) {
    const std::int64_t channels = maps.size(1);
    Tensor t(bench.context, {2, pixels, channels});
    reference::permute(maps.f32().data(), t.f32().data(), {{2, channels, pixels}, {0, 2, 1}});
    return t;
  };
  // At most 7e-7 of the largest value.
  const auto expect_equal = [](const Tensor& got, const Tensor& want, const char* what) {
    double largest = 0, worst = 0;
    for (std::size_t i = 0; i < want.f32().size(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(want.f32()[i])));
      worst =
          std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(want.f32()[i])));
    }
    EXPECT_LE(worst, 7e-7 * largest) << what;
  };
  Frame frame(bench.compute), of_linear(bench.compute);
  expect_equal(pixels_first(conv.forward(x, frame)[0]), linear.forward(pixels_first(x), of_linear)[0], "y");
  const Tensor through_linear = linear.backward(pixels_first(dy), of_linear)[0];
  expect_equal(pixels_first(conv.backward(dy, frame)[0]), through_linear, "dx");
  expect_equal(conv.weight->gradient(), linear.weight->gradient(), "dw");
  expect_equal(conv.bias->gradient(), linear.bias->gradient(), "db");
}

TEST(Conv2d, TakesEmptyAndRefusesWhatDoesNotFit) {
  test::Bench bench;
  for (const std::int64_t kernel : {1, 3}) {
    Conv2d layer({.in = 4, .out = 2, .kernel = kernel, .padding = kernel / 2});
    fill(layer, bench.compute);
    Frame frame(bench.compute);
    EXPECT_EQ(layer.forward(Tensor(bench.context, {0, 4, 3, 3}), frame)[0].shape(), Shape({0, 2, 3, 3}));
    EXPECT_EQ(layer.backward(Tensor(bench.context, {0, 2, 3, 3}), frame)[0].shape(), Shape({0, 4, 3, 3}));
    EXPECT_THAT(layer.weight->gradient().f32(), ::testing::Each(0.0f));
    EXPECT_EQ(error_text(ErrorCode::bad_argument,
                         [&] {
                           layer.forward(Tensor(bench.context, {2, 4, 3}), frame);
                         }),
              "\"\": x is (2, 4, 3); expected (batch, 4, height, width)");
    EXPECT_EQ(error_text(ErrorCode::bad_argument,
                         [&] {
                           layer.forward(Tensor(bench.context, {2, 5, 3, 3}), frame);
                         }),
              "\"\": x is (2, 5, 3, 3); expected 4 channels (of weight (2, 4, " + std::to_string(kernel) +
                  ", " + std::to_string(kernel) + "))");
  }
  const auto refused = [](const Conv2dConfig& c) {
    return error_text(ErrorCode::bad_argument, [&] { Conv2d{c}; });
  };
  EXPECT_EQ(refused({.in = 0, .out = 2}), "conv2d: in is 0; expected at least 1");
  EXPECT_EQ(refused({.in = 2, .out = 2, .kernel = {3, 0}}), "conv2d: kernel is 3x0; expected at least 1");
  EXPECT_EQ(refused({.in = 2, .out = 2, .padding = -1}), "conv2d: padding is -1; expected at least 0");
  EXPECT_EQ(refused({.in = 6, .out = 4, .groups = 3}), "conv2d: out 4 does not divide into groups 3");
  Frame frame(bench.compute);
  const auto small = [&](const Conv2dConfig& c) {
    Conv2d layer(c);
    fill(layer, bench.compute);
    return error_text(ErrorCode::bad_argument, [&] {
      layer.forward(Tensor::zeros(bench.context, {1, 1, 4, 2}), frame);
    });
  };
  EXPECT_EQ(small({.in = 1, .out = 1, .kernel = 3}),
            "\"\": x has width 2; expected at least 3, for kernel 3, dilation 1 and padding 0");
  EXPECT_EQ(small({.in = 1, .out = 1, .kernel = 5, .padding = 2, .padding_mode = kernels::Padding::reflect}),
            "\"\": x has width 2; reflect padding of 2 needs more");
}

TEST(Conv2d, SaysByNameWhatIsNotSplit) {
  const auto refused = [](const Conv2dConfig& c) { return Conv2d(c).shard_rule(Split::column).refused; };
  const std::string rest =
      ", and only a 1x1 convolution of stride 1, without padding, of dilation 1, in one group, with padding "
      "mode zeros, is "
      "split over channels";
  EXPECT_EQ(refused({.in = 4, .out = 4}), "");
  EXPECT_EQ(refused({.in = 4, .out = 4, .kernel = {3, 1}}), "has kernel 3x1" + rest);
  EXPECT_EQ(refused({.in = 4, .out = 4, .stride = 2}), "has stride 2" + rest);
  EXPECT_EQ(refused({.in = 4, .out = 4, .padding = {0, 1}}), "has padding 0x1" + rest);
  EXPECT_EQ(refused({.in = 4, .out = 4, .dilation = 2}), "has dilation 2" + rest);
  EXPECT_EQ(refused({.in = 4, .out = 4, .groups = 2}), "has groups 2" + rest);
  EXPECT_EQ(refused({.in = 4, .out = 4, .padding_mode = kernels::Padding::circular}),
            "has padding mode circular" + rest);
}

TEST(WindowAttention, GradientsMatchDifferences) {
  test::Bench bench;
  for (const Windows windows : {Windows::neighbours, Windows::strided}) {
    WindowAttention layer({.dim = 8, .heads = 2, .head_dim = 3, .window = 2, .windows = windows});
    fill(layer, bench.compute);
    const Tensor x = random_tensor(bench.context, {2, 8, 4, 6}, "x");
    // A bias of all scores changes no softmax: the gradient of dpb.layers.9.bias is 0.
    test::expect_gradients_match_differences(layer, x, bench.compute, 5e-3, 1e-3);
  }
}

TEST(WindowAttention, SeesItsWindowAlone) {
  test::Bench bench;
  for (const Windows windows : {Windows::neighbours, Windows::strided}) {
    WindowAttention layer({.dim = 4, .heads = 1, .head_dim = 4, .window = 2, .windows = windows});
    fill(layer, bench.compute);
    const Tensor x = random_tensor(bench.context, {1, 4, 4, 4}, "x");
    Frame frame = Frame::inference(bench.compute);
    const Tensor y = layer.forward(x, frame)[0];
    const Tensor changed = x.clone(bench.context);
    for (std::size_t c = 0; c < 4; ++c)
      changed.f32()[c * 16 + 5] += static_cast<float>(c);  // the pixel (1, 1)
    const Tensor y2 = layer.forward(changed, frame)[0];
    for (std::size_t p = 0; p < 16; ++p) {
      const std::size_t row = p / 4, column = p % 4;
      const bool seen =
          windows == Windows::neighbours ? row < 2 && column < 2 : row % 2 == 1 && column % 2 == 1;
      EXPECT_EQ(y.f32()[p] != y2.f32()[p], seen) << row << ", " << column;
    }
  }
}

TEST(WindowAttention, RefusesWhatDoesNotFit) {
  test::Bench bench;
  const auto refused = [](const WindowAttentionConfig& c) {
    return error_text(ErrorCode::bad_argument, [&] { WindowAttention{c}; });
  };
  EXPECT_EQ(refused({.dim = 8, .heads = 0, .head_dim = 4, .window = 2}),
            "window attention: heads is 0; expected at least 1");
  EXPECT_EQ(refused({.dim = 3, .heads = 1, .head_dim = 4, .window = 2}),
            "position bias: dim is 3; expected at least 4, since it has dim / 4 features");
  WindowAttention layer({.dim = 4, .heads = 1, .head_dim = 4, .window = 2});
  fill(layer, bench.compute);
  Frame frame(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor::zeros(bench.context, {1, 4, 4, 3}), frame);
                       }),
            "\"\": x is (1, 4, 4, 3); expected height and width in whole windows of 2x2");
  layer.forward(Tensor::zeros(bench.context, {1, 4, 4, 4}), frame);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.backward(Tensor::zeros(bench.context, {1, 4, 3, 4}), frame);
                       }),
            "\"\": dy is (1, 4, 3, 4); expected (batch, 4, height, width) in whole windows of 2x2");
}

TEST(ChannelFeedForward, GradientsMatchDifferencesAndShapesAreChecked) {
  test::Bench bench;
  ChannelFeedForward layer(6, 10);
  fill(layer, bench.compute);
  const Tensor x = random_tensor(bench.context, {2, 6, 2, 3}, "x");
  test::expect_gradients_match_differences(layer, x, bench.compute, 5e-3);
  Frame frame(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor::zeros(bench.context, {2, 5, 2, 3}), frame);
                       }),
            "\"layers\": x is (2, 5, 2, 3); expected (batch, 6, height, width)");
}

}  // namespace
}  // namespace weft::map_layers_test
