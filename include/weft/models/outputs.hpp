// The outputs of a model for a batch: predictions. Used by the rank (thread) that owns the model.
#pragma once

#include <optional>

#include "weft/models/trainer.hpp"

namespace weft {

/// The outputs of the model for this rank's rows of a batch, whose targets are not read: plain tensors, whole
/// over the tensor axis and the domain axes, with the first dimension divided over the data axes. Forward
/// passes keep nothing and draw no random numbers. Collective over the axes whose ranks have equal rows, with
/// a small all-reduce for each first. Throws bad_argument on all ranks of these axes, before any pass, if one
/// of them has a batch that does not fit, or if their inputs differ; and for a pipeline. `fault`: another
/// error that the caller has found on this rank; this rank throws it, and the other ranks are notified.
Tensors compute_outputs(ParallelModel& model, Compute& compute, const Batch& batch,
                        const std::optional<Error>& fault = std::nullopt);

}  // namespace weft
