// Facts about tokens that the parts of ep share: dropped choices, the axes that split samples. Included only
// inside ep.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "weft/host/compute.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/parameter.hpp"

namespace weft::ep {

/// The expert of a choice, which may have been dropped (~expert).
constexpr std::int32_t expert_of(std::int32_t choice) noexcept { return choice < 0 ? ~choice : choice; }

/// The axes of several ranks that split the first dimension, outermost first; empty: none.
DeviceMesh sample_axes(const LayoutRef& layout);

/// Throws layout if x is split in another dimension than the first: `"mlp.router": x is Shard(1) on tp=2;
/// expected Replicate or Shard(0): tokens are routed with their whole samples on one rank`.
void expect_samples_split(const TensorName& what, const LayoutRef& layout);

/// The layout of the gradient of a weight of experts. The weight is used on the tokens of all ranks along the
/// axes that split them, except where it is split itself: there each rank has the rows of all ranks for its
/// own experts. `tokens`: the layout of the tokens.
LayoutRef gradient_layout(const Parameter& p, const LayoutRef& tokens);

}  // namespace weft::ep
