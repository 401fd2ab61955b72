// The norm of all gradients, over any mixture of layouts, and clipping by it. Collective among all ranks of
// the gradients' meshes.
#pragma once

#include <span>

#include "weft/base/exact.hpp"
#include "weft/base/tensor.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/host/compute.hpp"

namespace weft {

/// The action of clip_grad_norm() if the norm is not finite.
enum class NonFinite : unsigned char {
  error,  ///< throws on every rank of the mesh
  /// does not change the gradients on any rank and returns the norm; the caller must skip its step
  skip,
};

/// Returns (Σ |g|^p)^(1/p) over every element of every gradient. Each element counts once: a shard on its
/// rank, a replica on the rank whose coordinates on the replicating axes are 0. p >= 1, or infinity for the
/// largest magnitude. Empty shards contribute nothing. Sums are made in f64 and combined in rank order. So
/// the result has the same bits on every rank of the mesh. The result is NaN if any element on any rank is
/// NaN. Otherwise it is infinity if any element is infinite.
///
/// Costs one small all-gather per root mesh of more than one rank. All ranks of a root mesh must give the
/// same gradients in the same order, and the same p. Otherwise all of them throw mismatch that names the
/// first gradient which differs in name, dtype or layout, or the different arguments. (If a rank gives no
/// gradient of a mesh, the other ranks get a timeout that names it.) Gradients without a layout count on this
/// rank alone. So with them the norm differs between ranks.
///
/// Throws layout, naming gradient and axis, if a gradient is still Partial. Throws bad_argument for p < 1,
/// and the errors of check_gradients().
///
/// A mistake on one rank alone is an error of the same code on all ranks: `grad_norm: dp rank 1 failed: …`.
///
/// `compute`: the Compute whose threads read the gradients. Null: the calling thread reads them. The result
/// has the same bits with any number of threads. If the Compute belongs to a device, all gradients must be on
/// that device, with the values that the Compute's stream has written. The device's GradientKernels
/// (weft/dp/kernels.hpp) do the work. The host waits once, for the sums. It does not wait for the scaling by
/// clip_grad_norm().
///
/// `exact`: sums squares without rounding, so that the norm has the same bits however the gradients are cut
/// and shared (docs/exact.md). Then p must be 2, and the gradients f32 on the host. If any element is not
/// finite, the norm is NaN.
double grad_norm(std::span<const Gradient> gradients, double p = 2, Compute* compute = nullptr,
                 Exact exact = Exact::no);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns the norm before the scaling. Throws
/// the errors of grad_norm(), and bad_argument if max_norm is <= 0 or NaN. Ranks compare max_norm, non_finite
/// and exact like p. If these differ, no gradient is scaled. With NonFinite::error a norm that is not finite
/// throws bad_argument on every rank. The text names the ranks, and this rank's gradients that are not
/// finite. Error::ranks() are those ranks, in the numbering of the group of which the meshes were made.
/// Error::ranks() is empty if the ranks belong to several groups, which the text names. If only gradients
/// without a layout are not finite, only their rank throws, and Error::ranks() is also empty.
///
/// f32 gradients are scaled in f64 and rounded once. So they are within 4 units in the last place of
/// PyTorch's results. f64 gradients agree to the last digits of f64. If max_norm is infinite, it only
/// computes the norm.
double clip_grad_norm(std::span<const Gradient> gradients, double max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error, Compute* compute = nullptr,
                      Exact exact = Exact::no);
/// Like the function above, with a computed limit: a tensor of one element, f64, f32, bf16 or f16. It is on
/// the host, or on a device, for whose stream the host waits. Also throws bad_argument for any other tensor.
double clip_grad_norm(std::span<const Gradient> gradients, const Tensor& max_norm, double p = 2,
                      NonFinite non_finite = NonFinite::error, Compute* compute = nullptr,
                      Exact exact = Exact::no);

}  // namespace weft
