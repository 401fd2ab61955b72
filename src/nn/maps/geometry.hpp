// Sizes of maps, and their checks, which layers on maps share. Included only inside nn, tp and domain.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "nn/operands.hpp"
#include "weft/nn/conv.hpp"

namespace weft::maps {

inline std::string shown(const Extent2d& e) {
  return e.height == e.width ? std::to_string(e.height) : fmt::format("{}x{}", e.height, e.width);
}

/// The most pixels of an extent, a padding or a factor: above any map, and low enough that no product of two
/// such numbers overflows.
inline constexpr std::int64_t kMostPixels = std::int64_t{1} << 24;

/// Throws bad_argument unless both numbers are `least` to kMostPixels. `layer`: its name, as in "avg pool".
inline void expect_extent(const char* layer, const char* what, const Extent2d& e, std::int64_t least) {
  if (std::min(e.height, e.width) < least)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {}; expected at least {}", layer, what, shown(e), least));
  if (std::max(e.height, e.width) > kMostPixels)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {}; expected at most {}", layer, what, shown(e), kMostPixels));
}

/// Throws unless x is f32 or bf16 (batch, channels, height, width) and holds whole values.
inline void expect_map(const Module& module, const Tensor& x) {
  const TensorName what = layouts::named(module, "x");
  expect_activation(what, x);
  if (x.shape().rank() != 4)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, channels, height, width)",
                                                     what.text(), to_string(x.shape())));
}

/// Throws bad_argument if a map without rows is resampled.
inline void expect_some(const Module& module, const char* what, std::int64_t size) {
  if (size < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} has {} 0; expected at least 1", layouts::named(module, "x").text(), what));
}

/// Throws bad_argument if a padding needs more pixels than there are.
inline void expect_padding(const Module& module, const char* what, std::int64_t size, std::int64_t padding,
                           kernels::Padding mode) {
  std::int64_t most = padding;
  const char* name = "zeros";
  switch (mode) {
    case kernels::Padding::zeros: break;
    case kernels::Padding::reflect: most = size - 1, name = "reflect"; break;
    case kernels::Padding::circular: most = size, name = "circular"; break;
    case kernels::Padding::replicate: most = size == 0 ? 0 : padding, name = "replicate"; break;
  }
  if (padding > most)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} has {} {}; {} padding of {} needs more", layouts::named(module, "x").text(),
                            what, size, name, padding));
}

/// How many outputs a kernel has along a dimension. Throws bad_argument if there is none.
inline std::int64_t outputs_of(const Module& module, const char* what, std::int64_t size, std::int64_t kernel,
                               std::int64_t stride, std::int64_t padding, std::int64_t dilation) {
  const std::int64_t left = size + 2 * padding - dilation * (kernel - 1) - 1;
  if (left < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} has {} {}; expected at least {}, for kernel {}, dilation {} and padding {}",
                            layouts::named(module, "x").text(), what, size,
                            dilation * (kernel - 1) + 1 - 2 * padding, kernel, dilation, padding));
  return left / stride + 1;
}

/// The geometry of the kernel of a convolution or a pooling on `channels` maps; `c` has the sizes.
template <class Config>
kernels::UnfoldShape unfold_shape(const Config& c, std::int64_t channels, const Extent2d& in,
                                  const Extent2d& out, kernels::Padding padding) {
  return {channels,         in.height,      in.width,         c.kernel.height, c.kernel.width,
          c.stride.height,  c.stride.width, c.padding.height, c.padding.width, c.dilation.height,
          c.dilation.width, out.height,     out.width,        padding};
}

/// How many outputs a transposed kernel has along a dimension. Throws bad_argument if there is none.
inline std::int64_t transposed_outputs_of(const Module& module, const char* what, std::int64_t size,
                                          std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                                          std::int64_t dilation, std::int64_t output_padding) {
  expect_some(module, what, size);
  const std::int64_t all = (size - 1) * stride + dilation * (kernel - 1) + output_padding + 1;
  if (all <= 2 * padding)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} has {} {}; nothing is left of its {} outputs after padding {}",
                            layouts::named(module, "x").text(), what, size, all, padding));
  return all - 2 * padding;
}

/// The layout of maps with other channels, height and width, sharded like those of `x`. Null stays null.
inline LayoutRef map_layout(const LayoutRef& x, std::int64_t channels, std::int64_t height,
                            std::int64_t width) {
  if (x == nullptr) return x;
  return x->with_global({x->global[0], channels, height, width});
}

/// Makes a map whose height and width no axis shards. Its batch is sharded like x's and, if the number of
/// channels is equal, its channels, too.
inline Tensor make_map(Frame& frame, const Tensor& x, std::int64_t channels, std::int64_t height,
                       std::int64_t width, Memory memory) {
  const std::int64_t global = x.layout() && channels == x.size(1) ? x.layout()->global[1] : channels;
  return frame.compute()
      .make({x.size(0), channels, height, width}, DType::f32, memory)
      .with_layout(map_layout(x.layout(), global, height, width));
}

/// A small tensor on the host that a Frame keeps to remember the shape and layout of x, but not its elements.
inline Tensor shape_alone(Frame& frame, const Tensor& x) {
  const Tensor extents(frame.compute().context(), {x.shape().rank()}, DType::i64);
  std::copy(x.shape().begin(), x.shape().end(), extents.as<std::int64_t>().begin());
  return extents.with_layout(x.layout());
}
inline Shape shape_kept(const Tensor& kept) {
  const std::span<const std::int64_t> extents = kept.as<std::int64_t>();
  return Shape(extents);
}

/// Throws unless dy has the shape of y and, if x is sharded, the layout of a map of that size that is sharded
/// like x.
inline void expect_gradient_of(const Module& module, const Tensor& dy, const Shape& y, const LayoutRef& x) {
  LayoutRef layout = x;
  if (x) layout = map_layout(x, x->global[1], y[2], y[3]);
  expect_gradient(module, dy, y, layout, as_activation(dy));
}

}  // namespace weft::maps
