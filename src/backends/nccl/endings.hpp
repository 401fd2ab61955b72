// The end of communicators, orderly or by an abort, on a thread of its own if it takes long.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "backends/nccl/channel.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/base/clock.hpp"

namespace weft::nccl {

inline constexpr Duration kLookAtStore = std::chrono::milliseconds(50);  ///< how often a rank that waits does
inline constexpr auto kNap = std::chrono::microseconds(200);

/// Prepares a thread that lives for a few calls of one device: sets the device, and the relaxed capture
/// mode.
void begin_thread(const Driver& driver) noexcept;

/// The end of communicators in peace. NCCL has "finalized" one when the kernels of all its ranks are done
/// with the buffers of all others: a peer's kernel, queued on a stream that is late, may read what this rank
/// has sent out of this rank's buffers, however long ago the send was done here.
struct Parting {
  Driver driver;
  FirstCause first_cause;
  std::vector<Comm*> comms;  // finalized

  /// True: all are ended. Those that fail, or whose group has failed, are aborted. Stops at the limit.
  bool until(Deadline limit) noexcept;
};

/// The end of communicators that have failed, on a thread of its own. Touches nothing of the backend's, so
/// that the backend may go while a stuck device keeps it.
struct Abortion {
  Driver driver;
  std::vector<Comm*> comms;
  std::vector<CudaStream> streams;
  std::atomic<bool> over{false};

  explicit Abortion(const Driver& d) : driver(d) {}
  static void run(const std::shared_ptr<Abortion>& a) noexcept;
};

}  // namespace weft::nccl
