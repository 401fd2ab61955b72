#include "stop_request.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>

#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr Duration kSameRequest = std::chrono::milliseconds(500);

}  // namespace

StopRequest::StopRequest() {
  sigemptyset(&signals_);
  for (const int number : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN)
      sigaddset(&signals_, number);
  }
  descriptor_ = Descriptor(::signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!descriptor_) throw_errno("train: signalfd", errno);
  over_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
  if (!over_) throw_errno("train: eventfd", errno);
  sigset_t all;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  thread_ = std::thread([this] { wait_for_signals(); });  // which takes no signal itself
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  ::pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
}

StopRequest::~StopRequest() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(over_.get(), &one, sizeof one);
  thread_.join();
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopRequest::wait_for_signals() {
  Clock::time_point first_at{};
  for (;;) {
    pollfd polled[2] = {{descriptor_.get(), POLLIN, 0}, {over_.get(), POLLIN, 0}};
    if (::poll(polled, 2, -1) < 0 && errno != EINTR) return;
    if (polled[1].revents != 0) return;
    signalfd_siginfo info{};
    while (::read(descriptor_.get(), &info, sizeof info) == sizeof info) {
      const int number = static_cast<int>(info.ssi_signo);
      if (first_.load() == 0) {
        first_at = Clock::now();
        first_.store(number);
      } else if (Clock::now() - first_at >= kSameRequest) {
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, number);
        ::signal(number, SIG_DFL);
        ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
        ::raise(number);
      }
    }
  }
}

}  // namespace weft::tools
