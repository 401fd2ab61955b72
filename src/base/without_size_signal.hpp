// What a limit of the size of files does.
#pragma once

#include <signal.h>
#include <time.h>

namespace weft {

/// A write beyond the process's file size limit (RLIMIT_FSIZE) is an error here, not the end of the process:
/// the signal that comes with it is held back and taken.
class WithoutSizeSignal {
 public:
  WithoutSizeSignal() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGXFSZ);
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  ~WithoutSizeSignal() {
    const timespec at_once{};
    if (!was_pending_) ::sigtimedwait(&set_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSizeSignal(const WithoutSizeSignal&) = delete;
  WithoutSizeSignal& operator=(const WithoutSizeSignal&) = delete;

 private:
  sigset_t set_{}, before_{};
  bool was_pending_ = false;
};

}  // namespace weft
