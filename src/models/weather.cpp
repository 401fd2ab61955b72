#include "weft/models/weather.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "weft/base/error.hpp"

namespace weft {

void WeatherStageConfig::check() const {
  for (const auto& [name, size] : {std::pair{"dim", dim},
                                   {"depth", depth},
                                   {"head_dim", head_dim},
                                   {"local_window", local_window},
                                   {"global_window", global_window},
                                   {"mult", mult}})
    if (size < 1)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("weather stage: {} is {}; expected at least 1", name, size));
  if (heads() < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("weather stage: head_dim is {}; expected at most dim {}", head_dim, dim));
}

namespace {

const WeatherStageConfig& checked(const WeatherStageConfig& config) {
  config.check();
  return config;
}

// Branches that end in a residual sum start smaller, so that the sum's variance does not grow with depth.
Init branch_end(const WeatherStageConfig& c) {
  return Normal{c.init_std / std::sqrt(4.0 * static_cast<double>(c.depth))};
}

WindowAttentionConfig attention(const WeatherStageConfig& c, Windows windows) {
  WindowAttentionConfig a;
  a.dim = c.dim, a.heads = c.heads(), a.head_dim = c.head_dim;
  a.window = windows == Windows::neighbours ? c.local_window : c.global_window;
  a.windows = windows;
  a.dropout = c.attention_dropout;
  a.init = Normal{c.init_std}, a.out_init = branch_end(c);
  return a;
}

}  // namespace

WeatherStage::Block::Block(const WeatherStageConfig& c)
    : near(attention(c, Windows::neighbours)),
      near_feed_forward(c.dim, c.mult * c.dim, c.dropout, Normal{c.init_std}, branch_end(c)),
      far(attention(c, Windows::strided)),
      far_feed_forward(c.dim, c.mult * c.dim, c.dropout, Normal{c.init_std}, branch_end(c)) {
  add("0", near);
  add("1", near_feed_forward);
  add("2", far);
  add("3", far_feed_forward);
}

Tensors WeatherStage::Block::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  Tensor x = inputs[0];
  for (const auto& [name, branch] : children())
    x = add_tensors(x, branch->forward(x, frame)[0], frame.compute(),
                    TensorName(branch->path(), "the residual sum"));
  return {x};
}

Tensors WeatherStage::Block::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  Tensor dx = gradients[0];
  for (auto child = children().rbegin(); child != children().rend(); ++child)
    dx = add_tensors(dx, child->second->backward(dx, frame)[0], frame.compute(),
                     TensorName(child->second->path(), "the gradient of the residual sum"));
  return {dx};
}

WeatherStage::WeatherStage(const WeatherStageConfig& config) : config_(checked(config)) {
  for (std::int64_t i = 0; i < config.depth; ++i) layers.append(std::make_unique<Block>(config));
  add("layers", layers);
}

}  // namespace weft
