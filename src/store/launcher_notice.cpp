#include "store/launcher_notice.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/parse_number.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kWords = "others failed";  // "<job> <rank> others failed"
constexpr std::size_t kMost = 256;

/// An abstract name: no file, and gone with the socket.
socklen_t abstract_address(std::string_view name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

LauncherNotices::LauncherNotices() : fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (fd_ < 0) throw_errno("weft run: a socket for the ranks' notices", errno);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t size = sizeof address.sun_family;  // this short: the kernel chooses a name
  if (::bind(fd_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      (size = sizeof address, ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) != 0)) {
    const int error = errno;
    ::close(fd_);
    throw_errno("weft run: a name for the ranks' notices", error);
  }
  name_.assign(address.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
}

LauncherNotices::~LauncherNotices() { ::close(fd_); }

int LauncherNotices::next(std::string_view job) {
  for (;;) {
    std::array<char, kMost> buffer;
    const ssize_t got = ::recv(fd_, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    std::string_view text(buffer.data(), static_cast<std::size_t>(got));
    if (!text.starts_with(job) || !text.ends_with(kWords) || text.size() < job.size() + kWords.size() + 3)
      continue;  // anybody of this host may send here; only the job's ranks know its token
    text.remove_prefix(job.size() + 1);
    text.remove_suffix(kWords.size() + 1);
    if (const auto rank = parse_integer<int>(text); rank && *rank >= 0) return *rank;
  }
}

void tell_launcher_that_others_failed() noexcept {
  try {
    const auto name = env::get("WEFT_LAUNCHER");
    const auto job = env::get("WEFT_JOB");
    const auto rank = env::get("WEFT_RANK");
    sockaddr_un address;
    if (!name || !job || !rank || name->size() >= sizeof address.sun_path) return;
    const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    const timeval limit{.tv_sec = 0, .tv_usec = 100'000};  // few datagrams wait at a socket
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    const std::string text = fmt::format("{} {} {}", *job, *rank, kWords);
    const socklen_t size = abstract_address(*name, address);
    [[maybe_unused]] const auto sent = ::sendto(fd, text.data(), text.size(), MSG_NOSIGNAL,
                                                reinterpret_cast<const sockaddr*>(&address), size);
    ::close(fd);
  } catch (...) {  // out of memory: the launcher judges without
  }
}

}  // namespace weft
