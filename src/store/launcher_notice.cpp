#include "store/launcher_notice.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>

#include "base/memfd.hpp"
#include "base/parse_number.hpp"
#include "weft/base/env.hpp"
#include "weft/store/elastic.hpp"

namespace weft {
namespace {

/// An abstract name: it is no file, and disappears with the socket.
socklen_t abstract_address(std::string_view name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

/// `flags`: MSG_DONTWAIT drops a notice for which there is no room.
void tell_launcher(std::string_view what, int flags = 0) noexcept {
  try {
    const auto name = env::get("WEFT_LAUNCHER");
    const auto job = env::get("WEFT_JOB");
    const auto rank = env::get("WEFT_RANK");
    sockaddr_un address;
    if (!name || !job || !rank || name->size() >= sizeof address.sun_path) return;
    const Descriptor fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd) return;
    // for a full socket, which holds only a few datagrams
    const timeval limit{.tv_sec = 0, .tv_usec = 100'000};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    const std::string text = fmt::format("{} {} {}", *job, *rank, what);
    const socklen_t size = abstract_address(*name, address);
    [[maybe_unused]] const auto sent = ::sendto(fd.get(), text.data(), text.size(), MSG_NOSIGNAL | flags,
                                                reinterpret_cast<const sockaddr*>(&address), size);
  } catch (...) {  // out of memory: the launcher decides without the notice
  }
}

}  // namespace

void tell_launcher_that_others_failed() noexcept { tell_launcher(kOthersFailed); }
void tell_launcher_that_results_are_in_doubt() noexcept { tell_launcher(kResultsInDoubt); }

std::optional<int> restart_count() {
  const auto set = env::get_int("WEFT_RESTART_COUNT", 0, std::numeric_limits<int>::max());
  return set ? std::optional<int>(static_cast<int>(*set)) : std::nullopt;
}

// A launcher that is stopped or busy does not delay a step: the next notice says more.
void report_step(std::int64_t steps) noexcept try {
  if (!env::get("WEFT_RESTART_COUNT")) return;
  std::array<char, 32> text{};
  kStep.copy(text.data(), kStep.size());
  char* const digits = text.data() + kStep.size();
  char* const end = std::to_chars(digits, text.data() + text.size(), steps).ptr;
  tell_launcher({text.data(), static_cast<std::size_t>(end - text.data())}, MSG_DONTWAIT);
} catch (...) {  // out of memory: the launcher decides without the notice
}

std::vector<EndedRank> decode_ended(std::string_view text) {
  std::vector<EndedRank> ranks;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::string_view number = line.substr(0, line.find(' '));
    line.remove_prefix(std::min(number.size() + 1, line.size()));
    if (const auto rank = parse_integer<int>(number); rank && *rank >= 0)
      ranks.push_back({*rank, std::string(line)});
  }
  return ranks;
}

}  // namespace weft
