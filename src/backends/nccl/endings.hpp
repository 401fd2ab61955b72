// Ends communicators, orderly or by an abort, on a separate thread if that takes long.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "backends/nccl/channel.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/base/clock.hpp"

namespace weft::nccl {

/// how often a waiting rank reads notices of the Store
inline constexpr Duration kLookAtStore = std::chrono::milliseconds(50);
inline constexpr auto kNap = std::chrono::microseconds(200);

/// Prepares a thread that makes a few calls for one device: sets its device and the relaxed capture mode.
void begin_thread(const Driver& driver) noexcept;

/// Ends communicators in order. NCCL reports a communicator as finalized when the kernels of all its ranks no
/// longer use any rank's buffers. A peer's kernel that is queued on a late stream may still read sent data
/// from this rank's buffers, however long ago the send was done here.
struct Parting {
  Driver driver;
  FirstCause first_cause;
  std::vector<Comm*> comms;  // finalized

  /// Returns true if all communicators have ended. Aborts communicators that fail, or whose group has failed.
  /// Stops at the limit.
  bool until(Deadline limit) noexcept;
};

/// Ends communicators that have failed, on a separate thread. Uses no member of the backend, so the backend
/// may be destroyed while a stuck device delays the abort.
struct Abortion {
  Driver driver;
  std::vector<Comm*> comms;
  std::vector<CudaStream> streams;
  std::atomic<bool> over{false};

  explicit Abortion(const Driver& d) : driver(d) {}
  static void run(const std::shared_ptr<Abortion>& a) noexcept;
};

}  // namespace weft::nccl
