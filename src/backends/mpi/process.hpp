// The MPI library of this process. It records whether the program or weft has initialised MPI, which threads
// may call it, and the groups that have ended but are not freed. Open MPI and MPICH share this source. Each
// plug-in compiles it for its library.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "weft/base/clock.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/log.hpp"
#include "weft/base/op.hpp"

namespace weft::mpi {

class ControlChannel;

/// Runs f in a separate thread, for MPI functions that block and cannot be cancelled. Returns false if f has
/// not ended by the deadline: the thread then continues, and keeps everything that it holds.
bool run_until(Deadline deadline, std::function<void()> f);

/// The MPI for which this file was compiled ("Open MPI" or "MPICH"), and the name of the plug-in.
extern const char* const kLibrary;
extern const char* const kBackend;
extern const char* const kBuiltFor;  ///< "Open MPI 4.1.4"

/// Returns why this MPI cannot be used in this process. Empty: it can be used. Initialises nothing.
std::string obstacle();

/// Throws `system` (or `peer_lost`, if MPI reports that a process has failed) with MPI's own words.
void must(int code, const char* function);

MPI_Datatype bytes_type(DType t) noexcept;  ///< a type of the same size, for moving elements
MPI_Datatype value_type(DType t) noexcept;  ///< the type as which MPI reduces it

/// There is one Process object per process, which is never destroyed, because MPI cannot be initialised
/// twice. Thread-safe.
///
/// weft requests MPI_THREAD_MULTIPLE. If the program has initialised MPI with a lower level, weft makes every
/// MPI call under one lock (SERIALIZED), or refuses calls from threads other than the one that has
/// initialised MPI (FUNNELED, SINGLE).
///
/// If weft initialised MPI, it finalises MPI when the process exits with status 0 and no group has failed.
/// Otherwise weft does not finalise MPI, which makes mpirun end the other ranks.
class Process {
 public:
  /// Initialises MPI, unless it is initialised already. Throws unsupported if there is an obstacle(), or if
  /// MPI was already finalised. Throws timeout if MPI_Init_thread, which may wait for every process of the
  /// job, does not end by the deadline.
  static Process& join(Logger& log, Deadline deadline);
  /// Returns whether the program or weft has initialised MPI.
  static bool initialised() noexcept;

  int world_rank() const noexcept { return world_rank_; }
  int world_size() const noexcept { return world_size_; }
  bool multiple() const noexcept { return threads_ == MPI_THREAD_MULTIPLE; }
  /// Returns why this thread may not call MPI. Empty: it may.
  std::string refuses_thread() const;
  /// The caller must hold the returned lock around MPI calls; with MPI_THREAD_MULTIPLE it is empty.
  std::unique_lock<std::mutex> lock();
  /// Returns the MPI operation for a reduction. Min and max of floats use weft's own functions, because MPI
  /// does not define them for NaN and signed zeros.
  MPI_Op op(ReduceOp::Kind kind, DType dtype) const noexcept;

  /// Returns whether MPI may still be called, because it was not finalised yet.
  static bool alive() noexcept;
  /// Call it when a failed group is leaked. weft then does not call MPI_Finalize, because it would wait for
  /// requests that never end.
  void poison() noexcept;
  /// Keeps a group that has ended on this rank until all peers have left, because peers may still write to
  /// it. Then it frees the group. Call it under lock().
  void defer_free(std::unique_ptr<ControlChannel> channel);
  /// Frees the groups that can be freed. Call it under lock().
  void reap() noexcept;
  /// After a failure: starts a thread that sends, for some minutes, the messages of `channel` that MPI has
  /// not accepted yet. `channel` is never freed. So late peers are notified of the failure, whatever the
  /// program does meanwhile. This works only if weft has initialised MPI with MPI_THREAD_MULTIPLE. Otherwise
  /// the messages are sent only while the program calls MPI.
  void deliver(ControlChannel& channel);

 private:
  Process(Logger& log, Deadline deadline);
  void finalise(int status) noexcept;
  void deliver_undelivered() noexcept;
  struct Undelivered {
    ControlChannel* channel;
    Deadline limit;
  };
  int threads_ = MPI_THREAD_SINGLE;
  int world_rank_ = 0, world_size_ = 1;
  bool ours_ = false;
  MPI_Op min_ = MPI_OP_NULL, max_ = MPI_OP_NULL, sum_ = MPI_OP_NULL, prod_ = MPI_OP_NULL;  // see combine()
  std::mutex calls_;  // held around every MPI call unless the level is MULTIPLE
  std::mutex mutex_;
  bool poisoned_ = false;
  std::atomic<bool> ending_{false};  // exit() has begun
  bool delivering_ = false;          // a thread runs deliver_undelivered()
  std::vector<Undelivered> undelivered_;
  std::vector<std::unique_ptr<ControlChannel>> deferred_;
};

}  // namespace weft::mpi
