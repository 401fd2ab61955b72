#include "weft/nn/feed_forward.hpp"

#include <fmt/format.h>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

const Dims kPixelsFirst{0, 2, 3, 1}, kChannelsFirst{0, 3, 1, 2};

// (batch, channels, height, width) with the channels last
Shape channels_last(const Shape& maps) { return {maps[0], maps[2], maps[3], maps[1]}; }

LayoutRef last_layout(const Tensor& maps) {
  return maps.layout() ? maps.layout()->transposed(kPixelsFirst) : nullptr;
}
LayoutRef first_layout(const Tensor& pixels) {
  return pixels.layout() ? pixels.layout()->transposed(kChannelsFirst) : nullptr;
}

// Throws unless x is (batch, channels, height, width) with whole channels.
void expect_maps(const TensorName& what, const Tensor& x, std::int64_t channels) {
  expect_activation(what, x);
  if (x.shape().rank() != 4 || x.size(1) != channels)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, height, width)",
                                                     what.text(), to_string(x.shape()), channels));
  layouts::expect_whole_dim(what, x, "a network over channels", 1);
}

}  // namespace

ChannelFeedForward::Layers::Layers(std::int64_t dim, std::int64_t hidden, double dropout_p, Init init,
                                   Init down_init)
    : norm(dim), up(dim, hidden, true, init), dropout(dropout_p), down(hidden, dim, true, down_init) {
  add("0", norm);
  add("1", up);
  add("2", gelu);
  add("3", dropout);
  add("4", down);
}

Tensors ChannelFeedForward::Layers::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  expect_maps(layouts::named(*this, "x"), x, up.weight->global_shape()[1]);
  const Tensor normal = norm.forward(x, frame)[0];
  const Tensor pixels =
      permuted(frame, normal, x.shape(), kPixelsFirst, channels_last(x.shape()), last_layout(normal));
  const Tensors hidden = dropout.forward(gelu.forward(up.forward(pixels, frame), frame), frame);
  const Tensor y = down.forward(hidden, frame)[0];
  return {permuted(frame, y, y.shape(), kChannelsFirst, x.shape(), first_layout(y), out_memory())};
}

Tensors ChannelFeedForward::Layers::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  expect_maps(layouts::named(*this, "dy"), dy, up.weight->global_shape()[1]);
  const Tensor dpixels =
      permuted(frame, dy, dy.shape(), kPixelsFirst, channels_last(dy.shape()), last_layout(dy));
  const Tensors dhidden = dropout.backward(down.backward(dpixels, frame), frame);
  const Tensor dnormal = up.backward(gelu.backward(dhidden, frame), frame)[0];
  return norm.backward(
      permuted(frame, dnormal, dnormal.shape(), kChannelsFirst, dy.shape(), first_layout(dnormal)), frame);
}

ChannelFeedForward::ChannelFeedForward(std::int64_t dim, std::int64_t hidden, double dropout, Init init,
                                       Init down_init)
    : layers(dim, hidden, dropout, init, down_init) {
  add("layers", layers);
}

}  // namespace weft
