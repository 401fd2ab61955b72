// The norm of all gradients, over any mixture of layouts, and clipping by it. Collective among all ranks of
// the gradients' meshes.
#pragma once

#include <span>

#include "weft/base/tensor.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/host/compute.hpp"

namespace weft {

/// The action of clip_grad_norm() if the norm is not finite.
enum class NonFinite : unsigned char {
  error,  ///< throws on every rank of the mesh
  skip,   ///< leaves the gradients as they are on every rank and returns the norm: the caller skips its step
};

/// (Σ |g|^p)^(1/p) over every element of every gradient, each counted once: a shard on its rank, a replica on
/// the rank whose coordinates on the replicating axes are 0. p >= 1, or infinity for the largest magnitude.
/// Empty shards count as nothing. Sums in f64, combined in rank order: the same bits on every rank of the
/// mesh. NaN if any element on any rank is NaN, otherwise infinity if any is infinite.
///
/// One small all-gather per root mesh of more than one rank. The same gradients in the same order on all its
/// ranks, and the same p: else mismatch on all of them, naming the first gradient that differs in name, dtype
/// or layout, or what ranks gave. (A rank with no gradient of a mesh at all does not take part: the others
/// get a timeout that names it.) Gradients without a layout count on this rank alone, so the norm differs
/// between ranks.
///
/// Throws layout naming gradient and axis where one is still Partial; bad_argument for p < 1; see
/// check_gradients().
///
/// A mistake on one rank alone is an error of the same code on all ranks: `grad_norm: dp rank 1 failed: …`.
///
/// Reads with the threads of `compute` (null: with this one); their number changes no bit. If that is of a
/// device, all gradients are there and are what its stream has written; the host waits once, for the sums.
/// Its GradientKernels (weft/dp/kernels.hpp) do it, and so does the scaling below, for which nobody waits.
double grad_norm(std::span<const Gradient> gradients, double p = 2, Compute* compute = nullptr);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns the norm before. Throws as grad_norm,
/// and bad_argument for max_norm <= 0 or NaN; max_norm and non_finite are compared as p is, and no gradient
/// is scaled if they differ. With NonFinite::error a norm that is not finite throws bad_argument on every
/// rank: the text names the ranks, and this rank's gradients that are not finite. Error::ranks() are those
/// ranks as the group numbers them that the meshes were made of; empty if they are of several groups,
/// which the text names, and if only gradients without a layout are not finite: then it is thrown on their
/// rank alone.
///
/// f32 gradients are scaled in f64 and rounded once, so that they are within 4 units in the last place of
/// what PyTorch computes; f64 ones to f64's last digits. max_norm infinite: a norm without clipping.
double clip_grad_norm(std::span<const Gradient> gradients, double max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error, Compute* compute = nullptr);
/// The same with a limit that a program computed: a tensor of one element, f64, f32, bf16 or f16, on the host
/// or a device, whose stream is waited for. Throws bad_argument, too, for any other tensor.
double clip_grad_norm(std::span<const Gradient> gradients, const Tensor& max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error, Compute* compute = nullptr);

}  // namespace weft
