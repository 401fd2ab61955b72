// reduce_gradients() reduces complete gradients: the layout of a gradient decides its reduction on every axis
// of a mesh. Collective among the ranks of the axes.
#pragma once

#include <optional>
#include <span>

#include "weft/dp/gradient.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The action of reduce_gradients() if replicas differ by more than rounding.
enum class OnDrift : unsigned char { error, average };

struct ReduceOptions {
  /// The subset of the call's axes whose ranks saw different data. It is an error if a gradient is Replicate
  /// on one of these axes. A sub-mesh, mesh["dp"] or mesh[{"dp", "cp"}]. An empty mesh means none.
  DeviceMesh data_axes = {};
  OnDrift on_drift = OnDrift::error;
  /// The largest difference of a replica's gradient from the average, relative to its largest element. 0:
  /// replicas must be equal. Unset: 1024 units in the last place for f64 and f32, 4 units for bf16 and f16.
  /// If all ranks run the same kernel on the same bits, the difference is 0. With another number of threads a
  /// kernel sums in another order, which changes a sum of a million products by some hundred units in the
  /// last place. Gradients in bf16 or f16 are summed in f32 and then rounded once.
  std::optional<double> tolerance = std::nullopt;
  /// The Compute whose threads pack and unpack. Null: the calling thread packs and unpacks. The number of
  /// threads may differ between ranks. It does not change the results. If the Compute belongs to a device,
  /// all gradients must be on that device, with the values that the Compute's stream has written. Results are
  /// ordered on that stream, too. The host waits for collectives, and once for each flat buffer that is
  /// averaged. It compares copies of the replicas.
  Compute* compute = nullptr;
};

/// Reduces gradients in place. On each axis of `axes` (one or more axes of the gradients' root, or the root
/// itself), the placement of a gradient decides how it is reduced. The gradient's name does not matter:
///
///   Shard         left alone: each rank has the whole gradient of its own part
///   Partial(sum)  summed: each rank used the weight for its own data, or for its own part of the work
///   Partial(avg)  averaged: each rank has the mean over its own data
///   Replicate     every rank computed the same: left alone if all replicas have the same bits, else
///                 averaged. If a replica is further from the average than `tolerance`, or not finite where
///                 another's is, something else than rounding is at work: mismatch on all ranks of `axes`,
///                 naming the gradient and the ranks as `axes` numbers them, before any gradient changes.
///                 On options.data_axes: layout, on all ranks, before any gradient changes; its average would be itself, and
///                 its sum wrong
///
/// One pass reduces over all axes. A small all-gather compares the lists, the options and the replicas. If
/// some differ, a second all-gather finds out which, and a third agrees on the result. Then there is one
/// all-reduce for each reduction, dtype and set of axes that occur, through flat buffers in shared memory.
/// All of them run concurrently. A gradient that is Partial(sum) on dp and tp is summed over both at once. If
/// a gradient is summed on one axis and averaged on another, or its replicas differ as well, its reductions
/// follow one another: first replicas, then sums, then averages.
///
/// All ranks must give the same gradients in the same order, and the same options. Otherwise all ranks throw
/// mismatch before any gradient changes. The text names the first gradient that differs in name, dtype or
/// layout. Stages of a pipeline have different gradients. So leave the axis of the stages out of `axes`.
/// Throws layout for Partial(min) and Partial(max), for a gradient without a layout on axes of several ranks,
/// and for a gradient with a layout over another mesh. Throws bad_argument if options.data_axes has an axis
/// that `axes` does not have, or if `axes` has more than 63 axes; also the errors of check_gradients(). A
/// mistake on one rank alone is an error of the same code on all ranks:
/// `reduce_gradients: dp rank 1 failed: …`. Afterwards all gradients that are not sharded on the axes are
/// Replicate on these axes, and their `layout` says so.
///
///   reduce_gradients(gradients, mesh, {.data_axes = mesh["dp"]});
void reduce_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                      const ReduceOptions& options = {});

}  // namespace weft
