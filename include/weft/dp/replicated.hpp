// reduce_gradients() under the names that other libraries use. Errors name the function that was called.
#pragma once

#include <optional>
#include <span>

#include "weft/dp/reduce_gradients.hpp"

namespace weft {

/// As in ReduceOptions.
struct SyncOptions {
  OnDrift on_drift = OnDrift::error;
  std::optional<double> tolerance = std::nullopt;
  Compute* compute = nullptr;
};

/// reduce_gradients() without data axes, for gradients of weights that every rank of `axes` holds.
/// Collective.
void sync_replicated_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                               const SyncOptions& options = {});

/// reduce_gradients() whose data axes are all of `axes`, for gradients of ranks that saw different data.
/// Throws layout if a gradient is Replicate on one of the axes. Collective. `compute`: as in ReduceOptions.
void average_gradients(std::span<Gradient> gradients, const DeviceMesh& axes, Compute* compute = nullptr);

}  // namespace weft
