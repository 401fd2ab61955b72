// MPI as this process has it: initialised by the program or by us, once; whom it lets call; what became of
// groups that ended. One source for Open MPI and MPICH; each plug-in has its own.
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

/// Runs f in a thread of its own until the deadline; past it the thread is left behind, with what it holds.
/// False: that happened. For those MPI functions that block and cannot be called off.
bool run_until(Deadline deadline, std::function<void()> f);

/// The MPI this file was compiled for, "Open MPI" or "MPICH", and the plug-in's name.
extern const char* const kLibrary;
extern const char* const kBackend;
extern const char* const kBuiltFor;  ///< "Open MPI 4.1.4"

/// Why this MPI cannot be used in this process; empty: it can. Initialises nothing.
std::string obstacle();

/// Throws `system` (or `peer_lost`, where MPI says that a process has failed) with MPI's own words.
void must(int code, const char* function);

MPI_Datatype bytes_type(DType t) noexcept;  ///< of the same size: moves it
MPI_Datatype value_type(DType t) noexcept;  ///< what MPI reduces it as

/// One per process, for ever: MPI cannot be initialised twice. Thread-safe.
///
/// MPI_THREAD_MULTIPLE is asked for. Where the program has initialised MPI with less, every MPI call of ours
/// holds one lock (SERIALIZED), or only the thread that initialised MPI may call (FUNNELED, SINGLE): calls
/// from other threads are refused.
///
/// An MPI of our own is finalised when the process exits with status 0 and no group has failed. Otherwise it
/// is not, which makes mpirun end the other ranks.
class Process {
 public:
  /// Initialises MPI or joins it. Throws unsupported where obstacle() says so or MPI was finalised already;
  /// timeout where MPI_Init_thread, which may wait for every process of the job, does not end by the
  /// deadline.
  static Process& join(Logger& log, Deadline deadline);
  /// By the program or by us.
  static bool initialised() noexcept;

  int world_rank() const noexcept { return world_rank_; }
  int world_size() const noexcept { return world_size_; }
  bool multiple() const noexcept { return threads_ == MPI_THREAD_MULTIPLE; }
  /// Empty, or why this thread may not call MPI.
  std::string refuses_thread() const;
  /// Held around MPI calls; with MPI_THREAD_MULTIPLE it holds nothing.
  std::unique_lock<std::mutex> lock();
  /// MPI's operation. Floats' min and max are ours: MPI's leave NaN and signed zeros open.
  MPI_Op op(ReduceOp::Kind kind, DType dtype) const noexcept;

  /// False: MPI was finalised, so nothing of it may be called.
  static bool alive() noexcept;
  /// A failed group was leaked: MPI_Finalize would wait for requests that never end.
  void poison() noexcept;
  /// A group ended here; its peers may still write to it. It is freed once all of them have left. Under
  /// lock().
  void defer_free(std::unique_ptr<ControlChannel> channel);
  /// Frees what can be freed. Under lock().
  void reap() noexcept;
  /// Of a group that has failed: what MPI has not taken of `channel`, which is leaked, goes out in a thread
  /// of its own, for some minutes. Peers that come late hear of the failure, whatever the program does
  /// meanwhile. Only where MPI is ours and serves several threads; elsewhere it goes out while the program
  /// calls MPI.
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
  std::mutex calls_;  // not MULTIPLE: around every MPI call
  std::mutex mutex_;
  bool poisoned_ = false;
  std::atomic<bool> ending_{false};  // exit() has begun
  bool delivering_ = false;          // there is a thread that runs deliver_undelivered()
  std::vector<Undelivered> undelivered_;
  std::vector<std::unique_ptr<ControlChannel>> deferred_;
};

}  // namespace weft::mpi
