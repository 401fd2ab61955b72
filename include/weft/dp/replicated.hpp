// Gradients of parameters that every rank of an axis holds: brought to one value, and watched for replicas
// that drift. Collective among the ranks of the axis.
#pragma once

#include <span>

#include "weft/mesh/mesh.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

enum class OnDrift : unsigned char { error, average };

struct SyncOptions {
  OnDrift on_drift = OnDrift::error;
  /// How far a replica's gradient may be from the average, relative to the largest element of it. The
  /// same kernel on the same bits gives 0; another number of threads sums in another order, which moves a sum
  /// of a million products by some hundred units in the last place.
  double tolerance = 1024 * 0x1p-23;
};

/// Decided by the placement of each gradient on `axis` (a sub-mesh of one axis), never by its name:
///
///   Shard         left alone: each rank has the whole gradient of its own part
///   Partial(sum)  summed: each rank used the parameter for its own part of the work
///   Partial(avg)  averaged
///   Replicate     averaged: every rank computed the same. Where a replica is further from the average than
///                 `tolerance`, or not finite though another's is, something else than rounding is at work:
///                 mismatch on all ranks, naming the parameter and the ranks, before any gradient changes
///
/// One collective for all sums and one for all averages, through flat buffers in shared memory, and one small
/// all-gather for the verdict. Same parameters in the same order on all ranks. Throws bad_argument naming a
/// parameter without gradient; layout for Partial(min) and Partial(max), and for a plain gradient on an axis
/// of several ranks. Afterwards all but the sharded are Replicate on the axis.
void sync_replicated_gradients(std::span<Parameter* const> parameters, const DeviceMesh& axis,
                               const SyncOptions& options = {});

}  // namespace weft
