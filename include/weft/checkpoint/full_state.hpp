// Gathers global tensors from their parts over a mesh, one after the other, to one rank or to all ranks. Also
// distributes global tensors into parts. All ranks of the mesh call these functions, each from one thread.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "weft/mesh/mesh.hpp"
#include "weft/mesh/named_view.hpp"

namespace weft {

/// The value of `root` that means every rank.
inline constexpr int kEveryRank = -1;

/// A function of the program that reads a global tensor, row-major, on the host. The view is valid until the
/// function returns.
using FullStateVisitor = std::function<void(std::string_view name, const ConstTensorView& whole)>;
/// A function of the program that writes a global tensor into memory of the library.
using FullStateSource = std::function<void(std::string_view name, const TensorView& whole)>;

/// Passes each global tensor to `see` on rank `root` of the mesh (kEveryRank: on all ranks), in the order of
/// the list. Collective over `mesh` (a root mesh; empty: one rank). Every rank must give the same tensors in
/// the same order. A rank that calls `see` allocates at most one global tensor and one part of it, in memory
/// of the mesh's Context. Other ranks allocate at most one part, and nothing if the part is contiguous. If a
/// rank already holds the global tensor, the tensor is not copied.
///
/// Throws the errors of save_checkpoint() about its tensors, and bad_argument if `root` is no rank. If `see`
/// throws, this rank throws that exception. The other ranks throw an Error with the same code (`system` if
/// the exception is no Error) and text, which names the rank. No further tensors are passed to `see`. The
/// other ranks wait for `see`. Each single wait lasts at most the deadline of the mesh's group.
void gather_full_state(const DeviceMesh& mesh, std::span<const NamedView> tensors, int root,
                       const FullStateVisitor& see);

/// The reverse of gather_full_state(). `give` provides each tensor on rank `root`, which sends every rank its
/// part. With kEveryRank each rank calls its own `give`, and nothing is sent. All must give the same values.
/// Memory, order and errors are as in gather_full_state(). It also throws the error of save_checkpoint() for
/// tensors that overlap. For tied tensors it calls `give` under each name, and `give` must provide the same
/// values each time. After an Error the values are undefined.
///
/// const CheckpointReader reader = CheckpointReader::open("run");      // where rank 0 alone sees the disk
///     set_full_state(mesh, tensors, 0, [&](auto name, auto whole) { reader.read_into(name, whole); });
void set_full_state(const DeviceMesh& mesh, std::span<const MutableNamedView> tensors, int root,
                    const FullStateSource& give);

}  // namespace weft
