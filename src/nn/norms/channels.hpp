// Maps (batch, channels, …) in the form that norms of channels use. Included only inside nn.
#pragma once

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft::norms {

/// x: (batch, channels, …)
inline kernels::MapShape map_shape(const Tensor& x) {
  const std::int64_t batch = x.size(0), channels = x.size(1);
  return {batch, channels, batch * channels == 0 ? 0 : x.count() / (batch * channels)};
}

inline void expect_channels(const TensorName& what, const Tensor& x, std::int64_t channels) {
  if (x.shape().rank() < 2 || x.size(1) != channels)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, …)", what.text(),
                                                     to_string(x.shape()), channels));
}

/// Throws layout unless the channels of x are sharded like the gain.
inline void expect_channels_as(const TensorName& what, const Tensor& x, const Parameter& gain) {
  const LayoutRef &of_x = x.layout(), &of_gain = gain.weight().layout();
  if (of_x == nullptr || of_gain == nullptr) return;
  for (std::size_t axis = 0; axis < of_x->placements.size(); ++axis)
    if (of_x->mesh_shape().size(static_cast<int>(axis)) > 1 &&
        is_shard(of_x->placements[axis], 1) != is_shard(of_gain->placements[axis], 0))
      throw Error(ErrorCode::layout, fmt::format("{} is {} on {}; expected channels cut as the weight is",
                                                 what.text(), to_string(of_x->placements[axis]),
                                                 layouts::axis_name(*of_x, static_cast<int>(axis))));
}

/// A norm whose channels may be sharded, gain and bias with them.
inline ShardRule by_channels(const Module& module, Split split, const Parameter& weight,
                             const Parameter& bias) {
  ShardRule rule;
  if (split == Split::row) return module.Module::shard_rule(split);
  rule.features = 1;
  rule.parameters = {{const_cast<Parameter*>(&weight), Shard{0}}, {const_cast<Parameter*>(&bias), Shard{0}}};
  rule.whole_units = {{"channels", weight.global_shape()[0]}};
  return rule;
}

}  // namespace weft::norms
