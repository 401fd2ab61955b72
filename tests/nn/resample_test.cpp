// Layers that pad, pool, resize and enlarge maps: against plain loops over the definition, and gradients
// against differences.
#include "weft/nn/maps/resample.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "nn/support.hpp"
#include "weft/nn/maps/conv_transpose.hpp"

namespace weft::test::resample_test {
namespace {

using kernels::Padding;

// y[b, c, r, s] by a function of the map's pixels.
using Pixel = std::function<double(std::int64_t row, std::int64_t column)>;
void expect_map_of(const Tensor& y, const Tensor& x,
                   const std::function<double(const Pixel&, std::int64_t r, std::int64_t s)>& expected) {
  for (std::int64_t map = 0; map < x.size(0) * x.size(1); ++map) {
    const Pixel pixel = [&](std::int64_t i, std::int64_t j) {
      return static_cast<double>(x.f32()[static_cast<std::size_t>((map * x.size(2) + i) * x.size(3) + j)]);
    };
    for (std::int64_t r = 0; r < y.size(2); ++r)
      for (std::int64_t s = 0; s < y.size(3); ++s)
        ASSERT_NEAR(y.f32()[static_cast<std::size_t>((map * y.size(2) + r) * y.size(3) + s)],
                    expected(pixel, r, s), 2e-6)
            << map << " " << r << " " << s;
  }
}

template <class Layer>
Tensor run(Bench& bench, Layer& layer, const Tensor& x) {
  materialise(layer, bench.compute);
  Frame frame = Frame::inference(bench.compute);
  const Tensor y = layer.forward(x, frame)[0];
  expect_gradients_match_differences(layer, x, bench.compute, 4e-3, 1e-4);
  return y;
}

TEST(Pad2d, EveryRule) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {2, 3, 4, 5}, "x");
  const auto beyond = [](std::int64_t i, std::int64_t n, Padding p) -> std::int64_t {
    if (i >= 0 && i < n) return i;
    if (p == Padding::zeros) return -1;
    if (p == Padding::replicate) return i < 0 ? 0 : n - 1;
    if (p == Padding::circular) return (i + n) % n;
    return i < 0 ? -i : 2 * n - 2 - i;
  };
  for (const Padding rows : {Padding::zeros, Padding::reflect, Padding::replicate, Padding::circular})
    for (const Padding columns : {Padding::zeros, Padding::circular}) {
      Pad2d pad({.top = 3, .bottom = 1, .left = 0, .right = 2, .rows = rows, .columns = columns});
      const Tensor y = run(bench, pad, x);
      ASSERT_EQ(y.shape(), (Shape{2, 3, 8, 7}));
      expect_map_of(y, x, [&](const Pixel& pixel, std::int64_t r, std::int64_t s) {
        const std::int64_t i = beyond(r - 3, 4, rows), j = beyond(s, 5, columns);
        return i < 0 || j < 0 ? 0 : pixel(i, j);
      });
    }
  EXPECT_EQ(error_text([] { Pad2d({.left = -1}); }), "bad_argument: pad2d: left is -1; expected at least 0");
  Frame frame = Frame::inference(bench.compute);
  EXPECT_EQ(error_text([&] { Pad2d({.top = 4, .rows = Padding::reflect}).forward(x, frame); }),
            "bad_argument: \"\": x has height 4; reflect padding of 4 needs more");
}

TEST(AvgPool2d, MeansOfKernels) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {1, 2, 7, 6}, "x");
  for (const bool count : {true, false})
    for (const auto& [k, s, p] : {std::tuple{2, 2, 0}, {3, 1, 1}, {3, 2, 1}, {5, 4, 2}, {1, 3, 0}}) {
      AvgPool2d pool({.kernel = k, .stride = s, .padding = p, .count_padding = count});
      const Tensor y = run(bench, pool, x);
      ASSERT_EQ(y.size(2), (7 + 2 * p - k) / s + 1);
      expect_map_of(y, x, [&](const Pixel& pixel, std::int64_t r, std::int64_t t) {
        double sum = 0, n = 0;
        for (std::int64_t i = r * s - p; i < r * s - p + k; ++i)
          for (std::int64_t j = t * s - p; j < t * s - p + k; ++j)
            if (i >= 0 && i < 7 && j >= 0 && j < 6) sum += pixel(i, j), ++n;
        return sum / (count ? static_cast<double>(k * k) : n);
      });
    }
  EXPECT_EQ(error_text([] { AvgPool2d({.kernel = 2, .padding = 2}); }),
            "bad_argument: avg pool: padding is 2; expected 0 to half of kernel 2");
  EXPECT_EQ(error_text([] { AvgPool2d({.dilation = 2}); }),
            "bad_argument: avg pool: dilation is 2; expected 1");
}

TEST(AdaptiveAvgPool2d, MeansOfParts) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {1, 2, 7, 6}, "x");
  AdaptiveAvgPool2d one(1), parts({3, 4});
  const Tensor mean = run(bench, one, x);
  expect_map_of(mean, x, [](const Pixel& pixel, std::int64_t, std::int64_t) {
    double sum = 0;
    for (int i = 0; i < 42; ++i) sum += pixel(i / 6, i % 6);
    return sum / 42;
  });
  const Tensor y = run(bench, parts, x);
  expect_map_of(y, x, [](const Pixel& pixel, std::int64_t r, std::int64_t s) {
    const std::int64_t top[] = {0, 2, 4}, bottom[] = {3, 5, 7}, left[] = {0, 1, 3, 4}, right[] = {2, 3, 5, 6};
    double sum = 0, n = 0;
    for (std::int64_t i = top[r]; i < bottom[r]; ++i)
      for (std::int64_t j = left[s]; j < right[s]; ++j) sum += pixel(i, j), ++n;
    return sum / n;
  });
  EXPECT_EQ(error_text([] { AdaptiveAvgPool2d{0}; }),
            "bad_argument: adaptive avg pool: out is 0; expected at least 1");
  constexpr std::int64_t kLarge = std::int64_t{1} << 40;
  const std::string most = " is 1099511627776; expected at most 16777216";
  EXPECT_EQ(error_text([&] { AdaptiveAvgPool2d{Extent2d(kLarge)}; }),
            "bad_argument: adaptive avg pool: out" + most);
  EXPECT_EQ(error_text([&] { Resize2d({.scale = Extent2d(kLarge)}); }),
            "bad_argument: resize2d: scale" + most);
  EXPECT_EQ(error_text([&] { Resize2d({.out = Extent2d(kLarge)}); }), "bad_argument: resize2d: out" + most);
  EXPECT_EQ(error_text([&] { AvgPool2d({.kernel = Extent2d(kLarge)}); }),
            "bad_argument: avg pool: kernel" + most);
  EXPECT_EQ(error_text([&] { Pad2d({.top = kLarge}); }), "bad_argument: pad2d: top" + most);
  EXPECT_EQ(error_text([&] { PixelShuffle{kLarge}; }), "bad_argument: pixel shuffle: factor" + most);
  EXPECT_EQ(error_text([&] { Conv2d({.in = 1, .out = 1, .kernel = 3, .dilation = Extent2d(kLarge)}); }),
            "bad_argument: conv2d: dilation" + most);
}

TEST(MaxPool2d, LargestOfKernels) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {2, 2, 8, 7}, "x");
  for (const auto& [k, s, p, d] : {std::tuple{2, 2, 0, 1}, {3, 1, 1, 1}, {3, 2, 1, 2}, {2, 3, 1, 3}}) {
    MaxPool2d pool({.kernel = k, .stride = s, .padding = p, .dilation = d});
    Frame frame = Frame::inference(bench.compute);
    const Tensor y = pool.forward(x, frame)[0];
    expect_map_of(y, x, [&](const Pixel& pixel, std::int64_t r, std::int64_t t) {
      double largest = -std::numeric_limits<double>::infinity();
      for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t j = 0; j < k; ++j) {
          const std::int64_t row = r * s - p + i * d, column = t * s - p + j * d;
          if (row >= 0 && row < 8 && column >= 0 && column < 7)
            largest = std::max(largest, pixel(row, column));
        }
      return largest;
    });
  }
  // Equal pixels: the first has the gradient.
  MaxPool2d pool({.kernel = 2, .stride = 1});
  Frame frame(bench.compute);
  pool.forward(tensor_of(bench.context, {1, 1, 2, 3}, {1, 5, 5, 0, 5, 2}), frame);
  EXPECT_EQ(floats(pool.backward(tensor_of(bench.context, {1, 1, 1, 2}, {3, 4}), frame)[0]),
            (std::vector<float>{0, 7, 0, 0, 0, 0}));
  EXPECT_EQ(error_text([] { MaxPool2d({.kernel = 0}); }),
            "bad_argument: max pool: kernel is 0; expected at least 1");
}

// The row that integer arithmetic gives; torch's product with a rounded scale is less than 2, as the header
// explains.
TEST(Resize2d, NearestIsExact) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {1, 1, 4, 1}, "x");
  Resize2d nearest({.out = {82, 1}});
  Frame frame = Frame::inference(bench.compute);
  const std::vector<float> y = floats(nearest.forward({x}, frame)[0]);
  for (std::size_t r = 0; r < 82; ++r) EXPECT_EQ(y[r], x.f32()[r * 4 / 82]) << r;
  EXPECT_EQ(y[41], x.f32()[2]);
  const volatile float scale = 4.0f / 82.0f, row = 41.0f * scale;
  EXPECT_EQ(static_cast<int>(row), 1) << "torch's row";
}

TEST(Resize2d, NearestAndBilinear) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {1, 2, 5, 4}, "x");
  for (const Extent2d& out : {Extent2d(10, 8), Extent2d(3, 7), Extent2d(5, 4), Extent2d(1, 1)}) {
    Resize2d nearest({.out = out});
    expect_map_of(run(bench, nearest, x), x, [&](const Pixel& pixel, std::int64_t r, std::int64_t s) {
      return pixel(r * 5 / out.height, s * 4 / out.width);
    });
    for (const bool corners : {false, true}) {
      Resize2d bilinear({.mode = Resizing::bilinear, .out = out, .align_corners = corners});
      const auto place = [&](std::int64_t r, double n, double m) {
        if (corners) return m > 1 ? static_cast<double>(r) * (n - 1) / (m - 1) : 0.0;
        return std::clamp((static_cast<double>(r) + 0.5) * n / m - 0.5, 0.0, n - 1);
      };
      expect_map_of(run(bench, bilinear, x), x, [&](const Pixel& pixel, std::int64_t r, std::int64_t s) {
        const double i = place(r, 5, static_cast<double>(out.height)),
                     j = place(s, 4, static_cast<double>(out.width));
        const auto top = static_cast<std::int64_t>(i), left = static_cast<std::int64_t>(j);
        const std::int64_t below = std::min<std::int64_t>(top + 1, 4),
                           right = std::min<std::int64_t>(left + 1, 3);
        const double u = i - static_cast<double>(top), v = j - static_cast<double>(left);
        return (1 - u) * ((1 - v) * pixel(top, left) + v * pixel(top, right)) +
               u * ((1 - v) * pixel(below, left) + v * pixel(below, right));
      });
    }
  }
  Resize2d twice({.scale = {2, 3}});
  Frame frame = Frame::inference(bench.compute);
  EXPECT_EQ(twice.forward(x, frame)[0].shape(), (Shape{1, 2, 10, 12}));
  EXPECT_EQ(error_text([] {
              Resize2d({.out = {3, 0}});
            }),
            "bad_argument: resize2d: out is 3x0, scale is 1; expected an out of at least 1, or out 0 and a "
            "scale of at least 1");
  EXPECT_EQ(error_text([&] {
              twice.forward(Tensor(bench.context, {1, 2, 0, 3}), frame);
            }),
            "bad_argument: \"\": x has height 0; expected at least 1");
  EXPECT_EQ(error_text([&] {
              twice.forward(Tensor(bench.context, {2, 0, 3}), frame);
            }),
            "bad_argument: \"\": x is (2, 0, 3); expected (batch, channels, height, width)");
}

TEST(ConvTranspose2d, IsTheAdjointOfAConvolution) {
  Bench bench;
  for (const auto& [k, s, p, more, d, groups] : {std::tuple{2, 2, 0, 0, 1, 1},
                                                 {3, 1, 1, 0, 1, 1},
                                                 {4, 2, 1, 0, 1, 2},
                                                 {3, 2, 1, 1, 1, 1},
                                                 {3, 3, 0, 2, 2, 2}}) {
    ConvTranspose2d layer({.in = 4,
                           .out = 6,
                           .kernel = k,
                           .stride = s,
                           .padding = p,
                           .output_padding = more,
                           .dilation = d,
                           .groups = groups});
    const Tensor x = random_tensor(bench.context, {2, 4, 4, 3}, "x");
    materialise(layer, bench.compute);
    const Tensor w = random_tensor(bench.context, layer.weight->global_shape(), "w"),
                 b = random_tensor(bench.context, {6}, "b");
    layer.weight->set_master(w);
    layer.bias->set_master(b);
    Frame frame = Frame::inference(bench.compute);
    const Tensor y = layer.forward(x, frame)[0];
    const std::int64_t height = 3 * s - 2 * p + d * (k - 1) + more + 1,
                       width = 2 * s - 2 * p + d * (k - 1) + more + 1;
    ASSERT_EQ(y.shape(), (Shape{2, 6, height, width}));
    std::vector<double> want(static_cast<std::size_t>(y.count()));
    const auto at = [](const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t r, std::int64_t c) {
      return static_cast<std::size_t>(((i * t.size(1) + j) * t.size(2) + r) * t.size(3) + c);
    };
    for (std::size_t i = 0; i < want.size(); ++i)
      want[i] = static_cast<double>(b.f32()[i / static_cast<std::size_t>(height * width) % 6]);
    const std::int64_t in = 4 / groups, out = 6 / groups;
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t i = 0; i < 4; ++i)
        for (std::int64_t o = 0; o < out; ++o)
          for (std::int64_t r = 0; r < 4; ++r)
            for (std::int64_t c = 0; c < 3; ++c)
              for (std::int64_t u = 0; u < k; ++u)
                for (std::int64_t v = 0; v < k; ++v) {
                  const std::int64_t row = r * s - p + u * d, column = c * s - p + v * d;
                  if (row < 0 || row >= height || column < 0 || column >= width) continue;
                  want[at(y, n, i / in * out + o, row, column)] +=
                      static_cast<double>(x.f32()[at(x, n, i, r, c)]) *
                      static_cast<double>(w.f32()[at(w, i, o, u, v)]);
                }
    expect_near(y, want, 2e-5, "y");
    expect_gradients_match_differences(layer, x, bench.compute);
  }
  EXPECT_EQ(
      error_text([] { ConvTranspose2d({.in = 2, .out = 2, .kernel = 2, .stride = 2, .output_padding = 2}); }),
      "bad_argument: conv transpose2d: output_padding is 2; expected less than stride 2 or dilation 1");
  EXPECT_EQ(error_text([] { ConvTranspose2d({.in = 2, .out = 3, .groups = 2}); }),
            "bad_argument: conv transpose2d: out 3 does not divide into groups 2");
}

TEST(PixelShuffle, ChannelsBecomePixels) {
  Bench bench;
  PixelShuffle shuffle(2);
  const Tensor x = random_tensor(bench.context, {2, 8, 2, 3}, "x");
  const Tensor y = run(bench, shuffle, x);
  ASSERT_EQ(y.shape(), (Shape{2, 2, 4, 6}));
  for (std::int64_t i = 0; i < y.count(); ++i) {
    const std::int64_t s = i % 6, r = i / 6 % 4, c = i / 24 % 2, b = i / 48;
    ASSERT_EQ(
        y.f32()[static_cast<std::size_t>(i)],
        x.f32()[static_cast<std::size_t>(((b * 8 + c * 4 + r % 2 * 2 + s % 2) * 2 + r / 2) * 3 + s / 2)]);
  }
  Frame frame = Frame::inference(bench.compute);
  EXPECT_EQ(error_text([&] {
              shuffle.forward(Tensor(bench.context, {1, 6, 2, 2}), frame);
            }),
            "bad_argument: \"\": x is (1, 6, 2, 2); expected channels in groups of 4 = factor 2 squared");
  EXPECT_EQ(error_text([] { PixelShuffle(0); }),
            "bad_argument: pixel shuffle: factor is 0; expected at least 1");
}

}  // namespace
}  // namespace weft::test::resample_test
