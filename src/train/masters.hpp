// Conditions on parameters before a model is divided over data-parallel ranks. Private to train.
#pragma once

#include <span>
#include <vector>

#include "weft/mesh/mesh.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Throws mismatch, on all ranks of each of `axes` (an empty one is skipped), if the values of a parameter
/// differ between ranks; the text names the first such parameter. A plain parameter counts as replicated.
/// Collective if any parameter has values.
void expect_same_masters(const std::vector<Parameter*>& parameters, std::span<const DeviceMesh> axes);

}  // namespace weft
