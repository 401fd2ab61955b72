// A model of which every data-parallel rank has a whole copy. Used by the one rank (thread) that owns the
// model; collective over the axes where the model has values already.
#pragma once

#include <memory>

#include "weft/nn/module.hpp"
#include "weft/train/gradient_reducer.hpp"

namespace weft {

/// The counterpart of fully_shard(): every parameter and buffer of `root` that has no layout is the same on
/// all ranks, and a GradientReducer over `axes` listens to those that are trained. After parallelize();
/// before or after materialise(). If parameters have values already, they are compared: mismatch on all
/// ranks that names the first that differs, as check_replicas() does. Throws bad_argument if a parameter
/// belongs to another reducer or to a sharded model.
std::unique_ptr<GradientReducer> apply_ddp(Module& root, const DeviceMesh& axes,
                                           const GradientReducerOptions& options = {});

}  // namespace weft
