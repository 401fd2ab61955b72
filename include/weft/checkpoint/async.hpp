// Saving in the background. An AsyncCheckpoint copies the tensors, and its own thread writes the copy while
// the program continues.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "weft/checkpoint/checkpoint.hpp"

namespace weft {

/// Writes checkpoints in the background. save() returns when this rank's part is copied, and the program may
/// then change the tensors. A thread writes the copy, syncs and renames it like save_checkpoint(). So a
/// complete checkpoint exists even if the process is killed at any moment. The thread writes one save at a
/// time. The memory of the copy, as large as this rank's file, is kept for the next save.
///
/// While the ranks write, they communicate through a separate group. So collectives of the program may run
/// meanwhile. This group waits at most SaveOptions::deadline. After a failed save the next save makes a new
/// group. So a time-out ends only one save. Other saves of this process to the same directory, including
/// those by save_checkpoint(), wait for all saves that were begun before them. One thread of each rank may
/// use an AsyncCheckpoint. All ranks must call save() in the same order.
///
///     AsyncCheckpoint saves(mesh);
///     for (…) {
///       train();
///       if (step % 100 == 0) saves.save("run", step, tensors);
///     }
///     saves.wait();
class AsyncCheckpoint {
 public:
  /// The action of save() if any rank is still writing the previous save.
  enum class Busy : unsigned char {
    wait,    ///< the new save waits for the end of that save
    refuse,  ///< save() returns false on all ranks, and saves nothing
  };

  /// Collective over `mesh`, a root mesh that must exist longer than this object. An empty mesh means one
  /// rank. Throws bad_argument if `mesh` is not a root, and the errors of ProcessGroup::duplicate().
  explicit AsyncCheckpoint(const DeviceMesh& mesh, Busy busy = Busy::wait);
  /// Waits for a save that is being written. If no call has thrown that save's error, writes the error to the
  /// log.
  ~AsyncCheckpoint();
  AsyncCheckpoint(const AsyncCheckpoint&) = delete;
  AsyncCheckpoint& operator=(const AsyncCheckpoint&) = delete;

  /// Begins save_checkpoint() with these arguments. Collective over the mesh. Returns true when the copy is
  /// made and its writing has begun. Returns false if the save was refused (Busy::refuse). Throws the errors
  /// of save_checkpoint() about its arguments. If the previous save failed, throws that error, and saves
  /// nothing. The text of that error begins with `the save of step 200 in the background:`. If wait() has
  /// already thrown the error on a rank, save() throws again on that rank, with another rank's text. After a
  /// failed save, save() also throws the errors of ProcessGroup::duplicate(). The writing thread calls
  /// `options.on_stage`.
  bool save(const std::filesystem::path& directory, std::int64_t step, std::span<const NamedView> tensors,
            const CheckpointExtra& extra = {}, const SaveOptions& options = {});

  /// Waits for the end of the save that is being written, if any, and throws its error, unless save() has
  /// thrown it. Not collective, but a save can only end when all ranks have written their parts.
  void wait();
  /// Whether this rank is writing a save. Any thread may call it.
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
