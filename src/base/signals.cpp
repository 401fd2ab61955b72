#include "base/signals.hpp"

#include <pthread.h>

#include <ctime>

namespace weft {
namespace {

sigset_t only(int signal) noexcept {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, signal);
  return set;
}

sigset_t all_signals() noexcept {
  sigset_t set;
  ::sigfillset(&set);
  return set;
}

}  // namespace

BlockedSignals::BlockedSignals(const sigset_t& blocked, int swallowed) noexcept : swallowed_(swallowed) {
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  if (::sigismember(&before_, swallowed) != 1) return;  // signals that are not blocked are not pending
  sigset_t pending;
  ::sigpending(&pending);
  was_pending_ = ::sigismember(&pending, swallowed) == 1;
}

BlockedSignals::~BlockedSignals() {
  const sigset_t set = only(swallowed_);
  const timespec now{};
  if (!was_pending_)
    while (::sigtimedwait(&set, nullptr, &now) == swallowed_) {}
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

NoSignals::NoSignals() noexcept : BlockedSignals(all_signals(), SIGPIPE) {}
WithoutSizeSignal::WithoutSizeSignal() noexcept : BlockedSignals(only(SIGXFSZ), SIGXFSZ) {}

}  // namespace weft
