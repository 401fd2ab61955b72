#include "notices.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>

#include "base/parse_number.hpp"
#include "store/launcher_notice.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr std::size_t kMost = 256;

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
    if (!text.starts_with(job) || !text.ends_with(kOthersFailed) ||
        text.size() < job.size() + kOthersFailed.size() + 3)
      continue;  // anybody of this host may send here; only the job's ranks know its token
    text.remove_prefix(job.size() + 1);
    text.remove_suffix(kOthersFailed.size() + 1);
    if (const auto rank = parse_integer<int>(text); rank && *rank >= 0) return *rank;
  }
}

}  // namespace weft::tools
