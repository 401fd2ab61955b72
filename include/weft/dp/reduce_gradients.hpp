// The one verb for gradients that are complete: the layout of each decides its reduction on every axis of a
// mesh. Collective among the ranks of the axes.
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
  /// The axes, among those given, whose ranks saw different data: a gradient that is Replicate there is an
  /// error. A sub-mesh, mesh["dp"] or mesh[{"dp", "cp"}]; an empty one: none.
  DeviceMesh data_axes = {};
  OnDrift on_drift = OnDrift::error;
  /// How far a replica's gradient may be from the average, relative to the largest element of it; 0: not at
  /// all. Unset: 1024 units in the last place for f64 and f32, 4 for bf16 and f16. The same kernel on the
  /// same bits gives 0; another number of threads sums in another order, which moves a sum of a million
  /// products by some hundred units in the last place. Gradients in bf16 or f16 are summed in f32 and then
  /// rounded once.
  std::optional<double> tolerance = std::nullopt;
  /// Packs and unpacks with its threads; null: with this one. Their number changes no bit, and may differ
  /// between ranks. If it is of a device, all gradients are there and are what its stream has written, and
  /// so are the results. The host waits for collectives, and once for each flat buffer that is averaged;
  /// replicas are compared on the host, in copies of them.
  Compute* compute = nullptr;
};

/// In place. Decided by the placement of each gradient on each axis of `axes` (one or more axes of the
/// gradients' root, or the root itself), never by its name:
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
/// All axes in one pass: a small all-gather compares the lists, the options and the replicas; where some
/// differ, another one finds out which, and a third is for the verdict. Then one all-reduce for each
/// reduction, dtype and set of axes that occur, through flat buffers in shared memory, all of them
/// concurrently: a gradient that is Partial(sum) on dp and tp is summed over both at once. A gradient that is
/// summed on one axis and averaged on another one, or whose replicas differ, too, makes them wait for each
/// other: replicas first, then sums, then averages.
///
/// The same gradients in the same order, and the same options, on all ranks: else mismatch on all of them,
/// naming the first gradient that differs in name, dtype or layout, before any changes. Stages of a pipeline
/// have other gradients: leave their axis out of `axes`. Throws layout for Partial(min) and Partial(max), for
/// a gradient without a layout on axes of several ranks, and for one with a layout over another mesh;
/// bad_argument if options.data_axes has an axis that `axes` does not, or `axes` has more than 63; see
/// check_gradients(). A mistake on one rank alone is an error of the same code on all ranks:
/// `reduce_gradients: dp rank 1 failed: …`. Afterwards all except the sharded ones are Replicate on the
/// axes; `layout` says so.
///
///   reduce_gradients(gradients, mesh, {.data_axes = mesh["dp"]});
void reduce_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                      const ReduceOptions& options = {});

}  // namespace weft
