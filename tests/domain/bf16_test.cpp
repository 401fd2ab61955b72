// Maps in bf16 that are cut in space: the bits of one rank, as in f32, and windows of half the bytes.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::domain_bf16_test {
namespace {

using kernels::Padding;
using test::Bounds;

template <class Layer, class... Arguments>
test::MakeModule of(const Arguments&... arguments) {
  return [=] { return std::make_unique<Layer>(arguments...); };
}
void expect_same(const char* name, const test::MakeModule& make, const Shape& x, const Bounds& bounds = {}) {
  SCOPED_TRACE(name);
  test::expect_as_serial(make, x, bounds, DType::bf16);
}

TEST(DomainBf16, ConvolutionsHaveTheBitsOfOneRank) {
  for (const Padding mode : {Padding::zeros, Padding::reflect, Padding::replicate, Padding::circular})
    expect_same("3x3",
                of<Conv2d>(Conv2dConfig{
                    .in = 3, .out = 4, .kernel = 3, .stride = 2, .padding = 1, .padding_mode = mode}),
                {2, 3, 13, 11});
  expect_same("1x1", of<Conv2d>(Conv2dConfig{.in = 3, .out = 4}), {2, 3, 13, 11});
  expect_same("transposed",
              of<ConvTranspose2d>(ConvTranspose2dConfig{.in = 3, .out = 2, .kernel = 3, .stride = 2}),
              {2, 3, 7, 6});
}

TEST(DomainBf16, PoolingAndResizingHaveTheBitsOfOneRank) {
  const Shape x{2, 4, 12, 10};
  expect_same("maximum", of<MaxPool2d>(Pool2dConfig{.kernel = 3, .stride = 2, .padding = 1}), x);
  expect_same("mean", of<AvgPool2d>(Pool2dConfig{.kernel = 3, .stride = 2, .padding = 1}), x);
  expect_same("padding", of<Pad2d>(Pad2dConfig{1, 2, 2, 1, Padding::reflect, Padding::circular}), x);
  expect_same("resizing", of<Resize2d>(Resize2dConfig{.scale = 2}), x);
  expect_same("shuffle", of<PixelShuffle>(2), x);
}

// Norms over space may differ in the last bit of f32, which may change a rounding to bf16.
TEST(DomainBf16, NormsAndAttention) {
  const Shape x{2, 4, 12, 8};
  const Bounds near{.maps = 0x1p-8, .weights = 1e-4};
  expect_same("channel norm", of<ChannelNorm>(4), x);
  expect_same("group norm", of<GroupNorm>(2, 4), x, near);
  expect_same("batch norm", of<BatchNorm>(4), x, near);
  expect_same("layer norm", of<LayerNorm>(Shape{4, 12, 8}), x, near);
  for (const Windows windows : {Windows::neighbours, Windows::strided}) {
    WindowAttentionConfig c;
    c.dim = 4, c.heads = 2, c.head_dim = 2, c.window = 2, c.windows = windows;
    // Each rank rounds its part of the gradient of the position bias to bf16.
    expect_same("windows", of<WindowAttention>(c), x, {.maps = 0, .weights = 1e-6, .position_bias = 0x1p-8});
  }
  expect_same("feed forward", of<ChannelFeedForward>(std::int64_t{4}, std::int64_t{8}), x);
}

// A convolution keeps its window for backward, in the dtype in which it came.
TEST(DomainBf16, WindowsAreBf16) {
  test::on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    Conv2d conv(Conv2dConfig{.in = 3, .out = 4, .kernel = 3, .padding = 1});
    const DomainManager manager = apply_domain_parallel(conv, axes);
    replicate(conv, mesh);
    test::set_up(conv, compute, DType::bf16);
    const Tensor x = test::rounded(compute.context(),
                                   test::random_map(compute.context(), {1, 3, 12, 10}, "x"), DType::bf16);
    Frame frame(compute);
    const Tensor part = shard_spatial(x, manager), y = conv.forward(part, frame)[0];
    EXPECT_EQ(y.dtype(), DType::bf16);
    int windows = 0;
    frame.visit_kept([&](const Module&, const Tensors& kept) {
      for (const Tensor& t : kept)
        if (t.shape().rank() == 4) {
          EXPECT_EQ(t.dtype(), DType::bf16);
          EXPECT_GT(t.count(), part.count());
          ++windows;
        }
    });
    EXPECT_EQ(windows, 1);
  });
}

}  // namespace
}  // namespace weft::domain_bf16_test
