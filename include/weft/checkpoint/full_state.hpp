// The whole of tensors that are divided over a mesh, one after the other: at one rank or at all, and back.
// Called by every rank of the mesh, each from one thread.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "weft/mesh/mesh.hpp"
#include "weft/mesh/named_view.hpp"

namespace weft {

/// In place of a root: every rank.
inline constexpr int kEveryRank = -1;

/// Sees a tensor whole, row-major, on the host; the view is good for the call.
using FullStateVisitor = std::function<void(std::string_view name, const ConstTensorView& whole)>;
/// Writes the whole of a tensor into memory of the library's.
using FullStateSource = std::function<void(std::string_view name, const TensorView& whole)>;

/// Shows each tensor, whole, to `see` on rank `root` of the mesh (kEveryRank: on all), in the order of the
/// list. Collective over `mesh` (a root; empty: one rank), where every rank gives the same tensors in the
/// same order. A rank where `see` is called holds at most one whole tensor and one part of it, in memory of
/// the mesh's Context; other ranks hold at most a part, and none if the part lies in one piece. A tensor that
/// a rank holds as a whole already is not copied.
///
/// Throws the errors of save_checkpoint() about its tensors, bad_argument for a root that is no rank; and
/// the exception of `see`, on the others an error of its code (`system` where it is no Error) that names the
/// rank and has its words; nothing is shown after it. The others wait for `see`, each time at most the
/// deadline of the mesh's group.
void gather_full_state(const DeviceMesh& mesh, std::span<const NamedView> tensors, int root,
                       const FullStateVisitor& see);

/// The reverse: `give` provides each tensor on rank `root`, which sends every rank its part. With kEveryRank
/// each rank asks its own `give`, and nothing is sent: all must give the same. Memory, order and errors as in
/// gather_full_state(), and of save_checkpoint() for two that overlap (tied tensors are asked for under each
/// name, and must be given the same); after an Error the values are undefined.
///
/// const CheckpointReader reader = CheckpointReader::open("run");      // where rank 0 alone sees the disk
///     set_full_state(mesh, tensors, 0, [&](auto name, auto whole) { reader.read_into(name, whole); });
void set_full_state(const DeviceMesh& mesh, std::span<const MutableNamedView> tensors, int root,
                    const FullStateSource& give);

}  // namespace weft
