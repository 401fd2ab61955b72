// A save in two halves: the plan, on which all ranks agree, and the writing, which another thread may do
// later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/index/index.hpp"
#include "checkpoint/save/replace_folder.hpp"
#include "checkpoint/save/save_turn.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft {

/// The part of a checkpoint that one rank writes.
struct SavePlan {
  std::filesystem::path directory;
  int rank = 0;
  CheckpointIndex index;                  ///< without the hashes of the files, which are not written yet
  std::vector<SafetensorsEntry> entries;  ///< of this rank's file
  std::deque<std::vector<std::byte>>
      copies;  ///< memory of the entries that are no contiguous part of a tensor
  SaveOptions options;
  Warn warn;
  SaveTurn turn{};  ///< rank 0's, which makes the folder and writes `latest`
};

/// Called on each rank when its entries are known; may copy the entries elsewhere. An exception of this
/// function is an error on all ranks.
using KeepEntries = std::function<void(std::vector<SafetensorsEntry>&)>;

/// The first half of a save. Collective over `mesh`. Throws the errors that save_checkpoint() documents for
/// its arguments, equally on all ranks.
SavePlan plan_save(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                   const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                   const SaveOptions& options, const KeepEntries& keep = {});

/// Returns the exception of `action` with a text that mentions save_checkpoint(). Null if there is none.
std::exception_ptr error_of_save(const std::function<void()>& action);
/// The second half of a save. It waits for the plan's turn. Collective over `group`, which has the ranks of
/// that mesh (null: one rank).
void write_save(SavePlan& plan, ProcessGroup* group);

}  // namespace weft
