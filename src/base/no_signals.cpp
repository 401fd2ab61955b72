#include "base/no_signals.hpp"

#include <pthread.h>

#include <ctime>

namespace weft {

NoSignals::NoSignals() noexcept {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before_);
}

NoSignals::~NoSignals() {
  if (::sigismember(&before_, SIGPIPE) == 0) {
    sigset_t pipe;
    ::sigemptyset(&pipe);
    ::sigaddset(&pipe, SIGPIPE);
    const timespec now{};
    while (::sigtimedwait(&pipe, nullptr, &now) == SIGPIPE) {}
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace weft
