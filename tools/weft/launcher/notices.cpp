#include "notices.hpp"

#include <linux/filter.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "base/parse_number.hpp"
#include "store/launcher_notice.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr std::size_t kMost = 256;  // bytes of a notice
constexpr int kAtOnce = 64;         // notices of one look

// Without the filter, strangers' datagrams would fill the queue and leave no room for the ranks' notices. If
// the kernel refuses the filter, take() still reads no more than its bound.
void let_in_only(int fd, std::string_view token) {
  std::vector<sock_filter> program;
  const std::size_t words = token.size() / 4;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint32_t word = 0;  // as the kernel loads it: the first byte is the highest
    for (std::size_t k = 0; k < 4; ++k) word = word << 8 | static_cast<unsigned char>(token[4 * i + k]);
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(4 * i)));
    program.push_back(
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, word, 0, static_cast<std::uint8_t>(2 * (words - i) - 1)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, kMost));
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  ::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
}

}  // namespace

LauncherNotices::LauncherNotices(std::string job)
    : job_(std::move(job)), fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!fd_) throw_errno("weft run: a socket for the ranks' notices", errno);
  let_in_only(fd(), job_);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t size = sizeof address.sun_family;  // this short: the kernel chooses a name
  if (::bind(fd(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      (size = sizeof address, ::getsockname(fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0))
    throw_errno("weft run: a name for the ranks' notices", errno);
  name_.assign(address.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
}

/// "<job> <rank> <what>"; nothing for other text: only the job's ranks know its token.
std::optional<LauncherNotices::Notice> LauncherNotices::notice_of(std::string_view text) const {
  if (!text.starts_with(job_ + " ")) return std::nullopt;
  text.remove_prefix(job_.size() + 1);
  const std::size_t blank = text.find(' ');
  const auto rank = parse_integer<int>(text.substr(0, blank));
  if (blank == std::string_view::npos || !rank || *rank < 0) return std::nullopt;
  const std::string_view what = text.substr(blank + 1);
  if (what == kOthersFailed) return Notice{.rank = *rank, .kind = Notice::Kind::others_failed};
  if (what == kResultsInDoubt) return Notice{.rank = *rank, .kind = Notice::Kind::in_doubt};
  if (!what.starts_with(kStep)) return std::nullopt;
  const auto step = parse_integer<std::int64_t>(what.substr(kStep.size()));
  if (!step || *step < 0) return std::nullopt;
  return Notice{.rank = *rank, .kind = Notice::Kind::step, .step = *step};
}

LauncherNotices::Taken LauncherNotices::take() {
  Taken taken;
  for (int looks = 0; looks < kAtOnce; ++looks) {
    std::array<char, kMost> buffer;
    const ssize_t got = ::recv(fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return taken;
    if (const auto notice = notice_of({buffer.data(), static_cast<std::size_t>(got)}))
      taken.notices.push_back(*notice);
  }
  taken.more = true;
  return taken;
}

}  // namespace weft::tools
