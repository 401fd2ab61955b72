// Threads that weft starts take no signals: those are for the program's own threads.
#pragma once

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "weft/base/error.hpp"

namespace weft {

/// Until it goes, this thread takes no signals; threads it makes inherit that. A SIGPIPE that was raised
/// meanwhile (gloo writes to sockets whose peer may be gone) is swallowed.
class NoSignals {
 public:
  NoSignals() noexcept;
  ~NoSignals();
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

/// A thread that runs `body` and takes no signals. Throws system, `what` and the limit that was met, where
/// the system gives no thread.
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
