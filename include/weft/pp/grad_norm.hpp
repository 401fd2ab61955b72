// The norm of the gradients of all stages of a pipeline. Each rank (thread) calls these functions for its own
// gradients.
#pragma once

#include <span>
#include <string>

#include "weft/dp/grad_norm.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The 2-norm of the gradients of all stages. Each rank gives the gradients of its own stages: f32, on the
/// host, reduced, with layouts over the root of `stages`, or without layouts if `stages` has all ranks.
/// `stages` is the axis of the pipeline: a tensor is on the ranks of one coordinate, and counts once.
///
/// Squares are summed without rounding, so the norm has the same bits for every number of stages and every
/// split of the tensors, and those of grad_norm() with Exact::yes. Collective over all ranks of the root, in
/// one small all-gather. Throws bad_argument on all ranks for arguments that one rank gave wrong (that rank
/// says why), and for gradients that are not finite if non_finite says so: the text and Error::ranks() name
/// the ranks. Throws mismatch if max_norm or non_finite differ between ranks.
///
/// `copies`: names of gradients of tied weights that another stage gives, too: they do not count here.
double pipeline_grad_norm(std::span<const Gradient> gradients, const DeviceMesh& stages,
                          std::span<const std::string> copies = {});

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as clip_grad_norm() does, and returns the norm
/// before the scaling. All stages are scaled by one factor, or none is.
double clip_pipeline_grad_norm(std::span<const Gradient> gradients, const DeviceMesh& stages, double max_norm,
                               NonFinite non_finite = NonFinite::error,
                               std::span<const std::string> copies = {});

}  // namespace weft
