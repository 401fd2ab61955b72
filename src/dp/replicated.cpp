#include "weft/dp/replicated.hpp"

#include "dp/reduce_as.hpp"

namespace weft {

void sync_replicated_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                               const SyncOptions& options) {
  dp::reduce_as("sync_replicated_gradients", gradients, axes,
                {.on_drift = options.on_drift, .tolerance = options.tolerance, .compute = options.compute});
}

void average_gradients(std::span<Gradient> gradients, const DeviceMesh& axes, Compute* compute) {
  dp::reduce_as("average_gradients", gradients, axes, {.data_axes = axes, .compute = compute});
}

}  // namespace weft
