// Signals that a thread of weft does not take. They are for the program's own threads.
#pragma once

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "weft/base/error.hpp"

namespace weft {

/// While it lives, this thread takes none of some signals; threads that it makes inherit that. One signal
/// that weft's own system calls may raise meanwhile is swallowed at the end, unless it was pending before.
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

/// No signals at all. Swallows SIGPIPE: gloo writes to sockets whose peer may be gone.
class NoSignals : BlockedSignals {
 public:
  NoSignals() noexcept;
};

/// A write beyond the process's file size limit (RLIMIT_FSIZE) is an error here, and not the end of the
/// process.
class WithoutSizeSignal : BlockedSignals {
 public:
  WithoutSizeSignal() noexcept;
};

/// A thread that runs `body` and takes no signals. Throws system, with `what` and the limit that was met,
/// where the system gives no thread.
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
