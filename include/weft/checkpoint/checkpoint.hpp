// Saving and loading tensors on any mesh: a folder of safetensors files with an index. Called by every rank
// of a mesh, each from one thread. weft/train/checkpoint.hpp saves modules and optimizers in this way.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/clock.hpp"
#include "weft/checkpoint/remap.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/mesh/named_view.hpp"

namespace weft {

/// Strings of the caller that are saved with a checkpoint: position of the sampler, configuration, best loss.
using CheckpointExtra = std::map<std::string, std::string>;

/// The description of a checkpoint.
struct CheckpointInfo {
  std::filesystem::path folder;
  std::int64_t step = 0;
  std::string mesh;  ///< the mesh it was written on, as to_string(MeshShape) gives it
  CheckpointExtra extra;
  /// Set by load_checkpoint(): tensors that were read under other names than the checkpoint has, as
  /// LoadOptions::remap says: `param.to_qkv.weight (24, 8, 1, 1) -> param.to_q.weight (8, 8), …`. Mostly
  /// empty.
  std::vector<std::string> remapped{};
};

struct SaveOptions {
  /// Called at each stage as it is reached, on the rank that reaches it: "folder" (made, empty), "data"
  /// (before each tensor's bytes), "file" (this rank's is whole), "index" (written), "exchanged" (with a
  /// checkpoint of the same step, which is removed next; where the file system cannot exchange folders
  /// "spared": the old one has another name, by which a load finds it), "renamed" (the folder has its name),
  /// "latest" (done), "old" (before the files of an older one are removed, for `keep`). For file, index and
  /// latest also at each step: "file written", "file synced", "file named" and so on. An exception of it
  /// fails the save.
  std::function<void(std::string_view stage)> on_stage{};
  /// How many checkpoints `directory` keeps, this one among them; the oldest steps go once `latest` names
  /// this one. 0: all. A checkpoint that cannot be removed stays, and a warning is logged. Steps after this
  /// one stay.
  int keep = 0;
  /// The longest wait, once tensors and arguments are agreed on, for a rank that is still writing its file;
  /// and that of rank 0 for an earlier save of this process to `directory`. More than 0. A group's own
  /// deadline is made for messages, and a disk may be slower. Then the save throws `timeout`; if the ranks
  /// waited for a file, the group in which they communicate has failed: the mesh's, unless the save is in the
  /// background. A rank that has died is noticed at once.
  Duration deadline = std::chrono::hours(1);
};

struct LoadOptions {
  /// Whether a tensor of the checkpoint that is not requested may be left there; empty: none may.
  std::function<bool(std::string_view name)> may_leave{};
  /// The names and shapes by which a tensor of the checkpoint is read if its own are not requested:
  /// remap_old_names, or a function of the program's. If none of the tensors that it gives is requested, the
  /// tensor stays as it is. Empty: none is read as another.
  Remap remap{};
};

/// Writes the folder `directory`/step-N of that step and then names it in `directory`/latest. Collective over
/// `mesh` (a root; empty: one rank), where every rank gives the same directory, step, tensors in the same
/// order, extra, and options except on_stage: tensors that differ in name, dtype or layout, and arguments
/// that differ, are mismatch. A relative directory is relative to the working directory at the moment of the
/// call. Each rank writes the parts that it holds and no rank below it does, so what is replicated is written
/// once; the folder holds
/// - rank-00000.safetensors and so on: tensors under their names, as each rank holds them
/// - index.json: for each tensor its dtype, global shape, layout, and which file holds what part of it
///
/// All is written under a temporary name, synced, and renamed, and `latest` last: killed at any moment, or
/// out of space, it leaves the previous checkpoint whole, and named by `latest`. A checkpoint of the same
/// step is replaced. Saves of one process to one directory, also those of an AsyncCheckpoint, are written one
/// after the other in the order of the calls: `latest` names the last one's step. Jobs, or meshes whose rank
/// 0 are other processes, need a directory each. Throws the same code on every rank, and the words of the
/// first rank that failed: `system` with the file and errno's words where one could not write. The text ends
/// with the state of the disk: nothing new, a checkpoint that `latest` does not name, or one that it names.
/// Throws layout for a tensor that has no layout on a mesh of several ranks, is Partial, or is laid out over
/// another mesh or with another shape than its layout's; bad_argument for two of one name, two that overlap
/// but are not the same memory as a whole (tied tensors, which are stored once), a negative `keep`, a
/// `deadline` that is not positive, and for a view that is not contiguous, has no memory or is not on the
/// host.
void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<const NamedView> tensors, const CheckpointExtra& extra = {},
                     const SaveOptions& options = {});

/// Reads the tensors from `directory`'s latest checkpoint, or from `directory` itself if that is a
/// checkpoint. Collective over `mesh`, which may be another than the one it was written on, as may be the
/// layouts: each rank reads the parts that overlap with its own. All ranks read the checkpoint that rank 0
/// finds; if a rank finds another one in its place, or none, that is `mismatch`. If a save removes it
/// meanwhile, ranks read the checkpoint that `latest` then names.
///
/// Throws bad_argument before anything changes, naming two tensors that `remap` gives one name; and naming
/// every tensor that is missing, that is there but not asked for, or that has another global shape or dtype;
/// and as save_checkpoint() does for the tensors given. Throws `corrupt` for a damaged or missing file, and
/// bad_argument for tied tensors of which the checkpoint has other values for each. If one rank fails, all
/// throw the code and words of the first one that did, which end with whether values have changed.
CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               std::span<const MutableNamedView> tensors, const LoadOptions& options = {});

/// The name in `directory`/latest, or nothing if there is no such file. Throws `corrupt` where it names no
/// checkpoint or is damaged.
std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& directory);

}  // namespace weft
