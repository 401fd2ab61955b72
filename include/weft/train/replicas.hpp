// Checks that replicas of a model's parameters are equal. Used by the one thread that owns the model.
#pragma once

#include <span>

#include "weft/mesh/replicas.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Throws mismatch on all ranks of `axes` if a parameter is Replicate on them but its master differs between
/// ranks: `check_replicas: "layers.0.norm.weight" is Replicate on dp=2, but …`. See weft/mesh/replicas.hpp.
/// `compute`: the Compute whose threads do the work, on its device; null: the Compute of the first parameter.
void check_replicas(std::span<Parameter* const> parameters, const DeviceMesh& axes,
                    Compute* compute = nullptr);

}  // namespace weft
