// Saving while the program goes on: the tensors are copied, and a thread of its own writes the copy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "weft/checkpoint/checkpoint.hpp"

namespace weft {

/// Writes checkpoints in the background. save() returns when this rank's part is copied: tensors may be
/// changed at once. A thread writes the copy, syncs and renames it as save_checkpoint() does, so that a kill
/// at any moment leaves a whole checkpoint. One save is written at a time. The copies' memory, as much as
/// this rank's file has bytes, is kept for the next save.
///
/// The ranks communicate through a group of its own while they write: collectives of the program may run
/// meanwhile. It waits as long as SaveOptions::deadline says, and after a failed save the next one makes it
/// again: a time-out ends one save and not those after it. Other saves of this process to the same directory,
/// also by save_checkpoint(), wait for those that were begun before them. Used by one thread of each rank,
/// which calls save() as it calls collectives.
///
///     AsyncCheckpoint saves(mesh);
///     for (…) {
///       train();
///       if (step % 100 == 0) saves.save("run", step, tensors);
///     }
///     saves.wait();
class AsyncCheckpoint {
 public:
  /// The action of save() if any rank is still writing the save before it.
  enum class Busy : unsigned char {
    wait,    ///< it waits for the end of that
    refuse,  ///< it returns false, on all ranks, and saves nothing
  };

  /// Collective over `mesh` (a root, which outlives this; empty: one rank). Throws bad_argument for a part of
  /// a mesh, and as ProcessGroup::duplicate().
  explicit AsyncCheckpoint(const DeviceMesh& mesh, Busy busy = Busy::wait);
  /// Waits for a save that is being written. An error that no call has thrown goes to the log.
  ~AsyncCheckpoint();
  AsyncCheckpoint(const AsyncCheckpoint&) = delete;
  AsyncCheckpoint& operator=(const AsyncCheckpoint&) = delete;

  /// save_checkpoint() of these arguments; collective over the mesh. Returns true when the copy is made and
  /// its writing has begun; false if it was refused (Busy::refuse). Throws as save_checkpoint() does of
  /// its arguments. If the save before this one failed, throws that error, and saves nothing: its text
  /// begins with `the save of step 200 in the background:`. A rank whose wait() has thrown it already throws
  /// again, with another rank's text. Also throws as ProcessGroup::duplicate() after such a failure.
  /// `options.on_stage` is called by the thread that writes.
  bool save(const std::filesystem::path& directory, std::int64_t step, std::span<const NamedView> tensors,
            const CheckpointExtra& extra = {}, const SaveOptions& options = {});

  /// Waits for the end of the save that is being written, if any, and throws its error, unless save() has
  /// done so. Not collective, but one rank alone cannot finish: it waits for the others' parts.
  void wait();
  /// Whether a save is being written by this rank. From any thread.
  bool running() const noexcept;

  const DeviceMesh& mesh() const noexcept;

 private:
  friend bool save_listed(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                          const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                          const SaveOptions& options);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
