#include "host/peers/process_state.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string_view>

#include "base/memfd.hpp"

namespace weft {

ProcessState process_state(pid_t process, const char* proc) noexcept {
  char path[256], text[4096];
  if (std::snprintf(path, sizeof path, "%s/%d/status", proc, static_cast<int>(process)) >=
      static_cast<int>(sizeof path))
    return {};
  const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file) return {};
  ssize_t bytes = 0;
  do {
    bytes = ::read(file.get(), text, sizeof text);
  } while (bytes < 0 && errno == EINTR);
  if (bytes <= 0) return {};
  const std::string_view status(text, static_cast<std::size_t>(bytes));
  // Returns the value of a line "name:<tab>value".
  const auto first_of = [&](std::string_view name) {
    const std::size_t at = status.find(name);
    return at == std::string_view::npos || at + name.size() >= status.size() ? '\0'
                                                                             : status[at + name.size()];
  };
  const char state = first_of("\nState:\t");
  return {.stopped = state == 'T' || state == 't', .dumping = first_of("\nCoreDumping:\t") == '1'};
}

bool has_ended(pid_t process) noexcept {
  const Descriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  if (!pidfd) return errno == ESRCH;
  pollfd end{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  while (::poll(&end, 1, 0) < 0 && errno == EINTR) {}
  return end.revents != 0 || process_state(process).dumping;
}

}  // namespace weft
