// Blocks signals in weft's threads. Signals are for the program's own threads.
#pragma once

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "weft/base/error.hpp"

namespace weft {

/// While this object exists, some signals are blocked in its thread, and in threads that this thread makes.
/// At its end the object discards one signal that weft's own system calls may have raised meanwhile, unless
/// this signal was already pending at the beginning.
class BlockedSignals {
 public:
  BlockedSignals(const sigset_t& blocked, int swallowed) noexcept;
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  const int swallowed_;
  sigset_t before_;
  bool was_pending_ = false;
};

/// Blocks all signals. Discards SIGPIPE, because gloo writes to sockets whose peer may be gone.
class NoSignals : BlockedSignals {
 public:
  NoSignals() noexcept;
};

/// Blocks SIGXFSZ, so that a write beyond the process's file size limit (RLIMIT_FSIZE) is an error, and does
/// not end the process.
class WithoutSizeSignal : BlockedSignals {
 public:
  WithoutSizeSignal() noexcept;
};

/// Makes a thread that runs `body` and receives no signals. Throws system, with `what` and the limit that was
/// reached, if the system refuses the thread.
template <class F>
std::thread start_thread(const char* what, F&& body) {
  const NoSignals inherited;
  try {
    return std::thread(std::forward<F>(body));
  } catch (const std::system_error& e) {
    throw_errno(std::string(what) + ": no thread", e.code().value());
  }
}

}  // namespace weft
