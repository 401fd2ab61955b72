// Gradients of weights that every rank of some axes holds: brought to one value, and watched for replicas
// that drift. Collective among the ranks of the axes.
#pragma once

#include <optional>
#include <span>

#include "weft/dp/gradient.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// What sync_replicated_gradients() does where replicas differ by more than rounding.
enum class OnDrift : unsigned char { error, average };

struct SyncOptions {
  OnDrift on_drift = OnDrift::error;
  /// How far a replica's gradient may be from the average, relative to the largest element of it; 0: not at
  /// all. Unset: 1024 units in the last place for f64 and f32, 4 for bf16 and f16. The same kernel on the same bits
  /// gives 0; another number of threads sums in another order, which moves a sum of a million products by some
  /// hundred units in the last place. What is bf16 or f16 was summed in f32 and then rounded once.
  std::optional<double> tolerance = std::nullopt;
  /// Packs and unpacks with its threads; null: with this one. Their number changes no bit, and may differ between ranks.
  /// Where it is of a device, all gradients are there and are what its stream has written, and so are the results. The
  /// host waits for collectives, and once for each flat buffer that is averaged; replicas are compared on the host, in
  /// copies of them.
  Compute* compute = nullptr;
};

/// Decided by the placement of each gradient on each axis of `axes` (a sub-mesh of one or more axes of the
/// gradients' root), never by its name:
///
///   Shard         left alone: each rank has the whole gradient of its own part
///   Partial(sum)  summed: each rank used the weight for its own part of the work
///   Partial(avg)  averaged
///   Replicate     every rank computed the same: left alone where all replicas have the same bits, else
///                 averaged. Where a replica is further from the average than `tolerance`, or not finite where
///                 another's is, something else than rounding is at work: mismatch on all ranks of `axes`,
///                 naming the gradient and the ranks as `axes` numbers them, before any gradient changes
///
/// One collective for each reduction, dtype and set of axes that occur, through flat buffers in shared
/// memory, a small all-gather that compares the lists, another of a hash of each replica, and a third for the
/// verdict where some differ. The same gradients in the same order, and the same options, on all ranks: else
/// mismatch on all of them, naming the first gradient that differs in name, dtype or layout, before any
/// changes. Throws layout for Partial(min) and Partial(max), for a gradient without a layout on axes of several
/// ranks, and for one with a layout over another mesh; see check_gradients(). What is wrong on one rank alone is an error
/// of the same code on all: `sync_replicated_gradients: dp rank 1 failed: …`. Afterwards all but the sharded
/// are Replicate on the axes; `layout` says so.
void sync_replicated_gradients(std::span<Gradient> gradients, const DeviceMesh& axes,
                               const SyncOptions& options = {});

/// The same for gradients that must all be Partial(sum), Partial(avg) or Shard on the axes: the gradients of
/// ranks that saw different data. Throws layout for one that is Replicate there: its average would be itself,
/// and its sum wrong. Compares the lists of all ranks likewise. `compute`: as in SyncOptions.
void average_gradients(std::span<Gradient> gradients, const DeviceMesh& axes, Compute* compute = nullptr);

}  // namespace weft
