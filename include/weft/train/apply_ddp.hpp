// A model of which every data-parallel rank has a complete copy. Used by the rank (thread) that owns the
// model; collective over the axes if the model already has values.
#pragma once

#include <memory>

#include "weft/nn/module.hpp"
#include "weft/train/gradient_reducer.hpp"

namespace weft {

/// The counterpart of fully_shard(): gives every parameter and buffer of `root` without a layout a replicated
/// layout, and makes a GradientReducer over `axes` for the trained parameters. Call it after parallelize(),
/// and before or after materialise(). If parameters already have values, it compares them like
/// check_replicas(): if they differ, all ranks throw mismatch that names the first different parameter.
/// Throws bad_argument if a parameter belongs to another reducer or to a sharded model.
std::unique_ptr<GradientReducer> apply_ddp(Module& root, const DeviceMesh& axes,
                                           const GradientReducerOptions& options = {});

}  // namespace weft
