// The norm of all gradients, over any mixture of layouts, and clipping by it. Collective among the ranks that
// share the parameters.
#pragma once

#include <span>

#include "weft/nn/parameter.hpp"

namespace weft {

enum class NonFinite : unsigned char {
  error,  ///< throws on every rank: the norm is the same everywhere
  skip,   ///< leaves the gradients as they are and returns the norm: the caller skips its step
};

/// (Σ |g|^p)^(1/p) over every element of every gradient, each counted once: a shard counts on its rank, a
/// replica on one. p >= 1, or infinity for the largest magnitude. Empty shards count as nothing. Sums in f64.
/// One small all-gather per distinct set of axes that shard something, in the order they first appear; the
/// same parameters in the same order on all ranks. NaN or infinity where any element is.
///
/// Throws layout naming parameter and axis where a gradient is still Partial; bad_argument for p < 1, or
/// naming a parameter without gradient.
double grad_norm(std::span<Parameter* const> parameters, double p = 2);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns the norm before. Throws as grad_norm,
/// bad_argument for max_norm <= 0 or NaN, and, where asked to, for a norm that is not finite: bad_argument
/// that names the parameters which are not finite on this rank.
double clip_grad_norm(std::span<Parameter* const> parameters, double max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error);

}  // namespace weft
