// Saving and loading tensors on any mesh. A checkpoint is a folder of safetensors files with an index. All
// ranks of a mesh call these functions, each from one thread. weft/train/checkpoint.hpp uses these functions
// to save modules and optimizers.
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
  std::string mesh;  ///< the mesh on which the checkpoint was written, as to_string(MeshShape) gives it
  CheckpointExtra extra;
  /// The tensors that load_checkpoint() has read under other names than those in the checkpoint (see
  /// LoadOptions::remap): `param.to_qkv.weight (24, 8, 1, 1) -> param.to_q.weight (8, 8), …`. Usually empty.
  std::vector<std::string> remapped{};
};

struct SaveOptions {
  /// weft calls it at each stage, on the rank that reaches the stage: "folder" (made, empty), "data" (before
  /// each tensor's bytes), "file" (this rank's file is complete), "index" (written), "exchanged" (the new
  /// folder has replaced a checkpoint of the same step, which is removed next; "spared" if the file system
  /// cannot exchange folders: the old folder has another name, under which a load finds it), "renamed" (the
  /// folder has its name), "latest" (done), "old" (before the files of an older checkpoint are removed, for
  /// `keep`). For file, index and latest there is also a stage for each step: "file written", "file synced",
  /// "file named" and so on. If the function throws, the save fails.
  std::function<void(std::string_view stage)> on_stage{};
  /// How many checkpoints stay in `directory`, including the new one. weft removes the oldest steps once
  /// `latest` names the new one. 0: all stay. If a checkpoint cannot be removed, it stays, and a warning is
  /// logged. Checkpoints of later steps stay.
  int keep = 0;
  /// The longest wait for a rank that is still writing its file, once all ranks have agreed on tensors and
  /// arguments. Also the longest wait of rank 0 for an earlier save of this process to `directory`. More than
  /// 0. (The deadline of a group is meant for messages; a disk may be slower.) After this time the save
  /// throws `timeout`. If the ranks waited for a file, the group in which they communicate fails, too: the
  /// mesh's group, or a separate group if the save is in the background. A rank that has died is noticed at
  /// once.
  Duration deadline = std::chrono::hours(1);
};

struct LoadOptions {
  /// Returns whether the load may ignore a tensor of the checkpoint that was not requested. Empty: the load
  /// may ignore no tensor.
  std::function<bool(std::string_view name)> may_leave{};
  /// Gives the names and shapes under which a tensor of the checkpoint is read if its own name is not
  /// requested: remap_old_names, or a function of the program. If none of the tensors that it gives is
  /// requested, the tensor keeps its name. Empty: all tensors keep their names.
  Remap remap{};
};

/// Writes the folder `directory`/step-N of that step and then names it in `directory`/latest. Collective over
/// `mesh` (a root mesh; empty: one rank). Every rank must give the same directory, step, extra, and options
/// except on_stage. It must give the same tensors in the same order. Throws mismatch if arguments differ, or
/// tensors differ in name, dtype or layout. A relative directory is relative to the working directory at the
/// moment of the call. If several ranks hold the same part, the lowest of them writes it. The folder holds
/// - rank-00000.safetensors and so on: tensors under their names, as each rank holds them
/// - index.json: for each tensor its dtype, global shape, layout, and which file holds what part of it
///
/// Each file is written under a temporary name, synced, and renamed. `latest` is written last. So if the
/// process is killed at any moment, or the disk is full, the previous checkpoint stays complete, and `latest`
/// names it. A checkpoint of the same step is replaced. Saves of one process to one directory, including
/// those of an AsyncCheckpoint, are written one after the other in the order of the calls. `latest` names the
/// step of the last save. Each job needs its own directory. Within a job, meshes whose ranks 0 are in
/// different processes need different directories, too. All ranks throw the same error, with the text of the
/// first rank that failed. Throws `system`, with the file and the system's error text, if a rank could not
/// write. The text ends with the state of the disk: nothing new, a checkpoint that `latest` does not name, or
/// a checkpoint that `latest` names. Throws layout if a tensor has no layout on a mesh of several ranks, is
/// Partial, has a layout over another mesh, or has another shape than its layout gives. Throws bad_argument
/// if two tensors have one name or overlap without having exactly the same memory (tied tensors have the same
/// memory and are stored once). Throws it if `keep` is negative or `deadline` is not positive, or if a view
/// is not contiguous, has no memory or is not on the host.
void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<const NamedView> tensors, const CheckpointExtra& extra = {},
                     const SaveOptions& options = {});

/// Reads the tensors from `directory`'s latest checkpoint, or from `directory` itself if that is a
/// checkpoint. Collective over `mesh`. The mesh and the layouts may differ from those of the save. Each rank
/// reads the stored parts that overlap with its own. All ranks read the checkpoint that rank 0 finds. The
/// load throws mismatch if a rank finds another checkpoint at this path, or none. If a save removes the
/// checkpoint meanwhile, the ranks read the checkpoint that `latest` then names.
///
/// Throws bad_argument before anything changes if `remap` gives two tensors one name, or if tensors are
/// missing, are in the checkpoint but not requested, or have another global shape or dtype. The text names
/// all of them. Throws the errors of save_checkpoint() about the given tensors. Throws `corrupt` if a file is
/// damaged or missing, and bad_argument if the checkpoint has different values for tied tensors. If one rank
/// fails, all ranks throw the code and text of the first rank that failed. The text says at its end whether
/// values have changed.
CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               std::span<const MutableNamedView> tensors, const LoadOptions& options = {});

/// The name in `directory`/latest, or nothing if there is no such file. Throws `corrupt` if the file names no
/// checkpoint or is damaged.
std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& directory);

}  // namespace weft
