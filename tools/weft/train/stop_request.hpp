// SIGINT and SIGTERM as a request that a loop polls.
#pragma once

#include <atomic>
#include <csignal>
#include <thread>

#include "base/memfd.hpp"

namespace weft::tools {

/// While this object exists, a first SIGINT or SIGTERM is noted and nothing else happens. A second signal, at
/// least half a second later (some launchers send theirs twice), ends the process as if this object did not
/// exist. A signal that the process ignores stays ignored. The main thread must make it before it makes
/// threads that take signals. A separate thread waits for the signals, so that no handler interrupts kernels.
class StopRequest {
 public:
  /// Throws system.
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// The first signal that arrived; 0: none did.
  int signal() const noexcept { return first_.load(); }

 private:
  void wait_for_signals();

  sigset_t signals_, before_;
  Descriptor descriptor_;  // reads them
  Descriptor over_;        // an eventfd
  std::atomic<int> first_{0};
  std::thread thread_;
};

}  // namespace weft::tools
