#include "store/tcp/address.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "base/memfd.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

const sockaddr_in& v4(const SocketAddress& a) { return reinterpret_cast<const sockaddr_in&>(a.storage); }
const sockaddr_in6& v6(const SocketAddress& a) { return reinterpret_cast<const sockaddr_in6&>(a.storage); }

std::string host_text(const SocketAddress& a) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (a.family() == AF_INET6) {
    ::inet_ntop(AF_INET6, &v6(a).sin6_addr, text, sizeof text);
  } else {
    ::inet_ntop(AF_INET, &v4(a).sin_addr, text, sizeof text);
  }
  return text;
}

bool same_host(const SocketAddress& a, const SocketAddress& b) noexcept {
  if (a.family() != b.family()) return false;
  if (a.family() == AF_INET6) return IN6_ARE_ADDR_EQUAL(&v6(a).sin6_addr, &v6(b).sin6_addr);
  return v4(a).sin_addr.s_addr == v4(b).sin_addr.s_addr;
}

// An abstract name begins with a zero byte, and its length is part of the address. It is no file, and
// disappears with its socket.
SocketAddress abstract_address(std::string_view name) {
  SocketAddress a;
  auto& at = reinterpret_cast<sockaddr_un&>(a.storage);
  at.sun_family = AF_UNIX;
  const std::size_t n = std::min(name.size(), sizeof at.sun_path - 1);
  std::memcpy(at.sun_path + 1, name.data(), n);
  a.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return a;
}

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
};

}  // namespace

std::uint16_t SocketAddress::port() const noexcept {
  return ntohs(family() == AF_INET6 ? v6(*this).sin6_port : v4(*this).sin_port);
}

void SocketAddress::set_port(std::uint16_t port) noexcept {
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

bool SocketAddress::is_loopback() const noexcept {
  if (family() == AF_INET) return (ntohl(v4(*this).sin_addr.s_addr) >> 24) == 127;
  const in6_addr& a = v6(*this).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&a) || (IN6_IS_ADDR_V4MAPPED(&a) && a.s6_addr[12] == 127);
}

std::string SocketAddress::text() const { return shown_host_port(host_text(*this), port()); }

bool operator==(const SocketAddress& a, const SocketAddress& b) noexcept {
  return same_host(a, b) && a.port() == b.port();
}

std::optional<HostPort> parse_host_port(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    if (host.find_first_of("[]/") != std::string_view::npos) return std::nullopt;
  } else if (host.find_first_of(":[]/") != std::string_view::npos) {
    return std::nullopt;
  }
  HostPort result{.host = std::string(host)};
  const char* const end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data() + colon + 1, end, result.port);
  if (failed != std::errc{} || stop != end || host.empty()) return std::nullopt;
  return result;
}

std::string shown_host_port(std::string_view host, std::uint16_t port) {
  return host.find(':') == std::string_view::npos ? fmt::format("{}:{}", host, port)
                                                  : fmt::format("[{}]:{}", host, port);
}

std::vector<SocketAddress> resolve(std::string_view host, std::uint16_t port, std::string& why) {
  std::vector<SocketAddress> all;
  const auto ask = [&](const std::string& name) {
    addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    wanted.ai_flags = AI_NUMERICSERV;
    AddressList list;
    const int failed = ::getaddrinfo(name.c_str(), std::to_string(port).c_str(), &wanted, &list.first);
    if (failed == EAI_AGAIN) {
      why = fmt::format("the address of {} cannot be found: {}", host, ::gai_strerror(failed));
      return;
    }
    if (failed != 0)
      throw Error(ErrorCode::system, fmt::format("store: the address of {} cannot be found: {}", host,
                                                 failed == EAI_SYSTEM ? std::generic_category().message(errno)
                                                                      : std::string(::gai_strerror(failed))));
    for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
      if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
      SocketAddress address;
      std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
      address.length = a->ai_addrlen;
      all.push_back(address);
    }
  };
  if (host == "localhost") {
    ask("127.0.0.1");
    ask("::1");
  } else {
    ask(std::string(host));
  }
  return all;
}

std::vector<SocketAddress> resolve_for_store(std::string_view host, std::uint16_t port, bool has_secret,
                                             std::string& why) {
  std::vector<SocketAddress> all = resolve(host, port, why);
  if (has_secret) {
    std::stable_partition(all.begin(), all.end(), [](const SocketAddress& a) { return !a.is_loopback(); });
    return all;
  }
  const bool none = all.empty();
  std::erase_if(all, [](const SocketAddress& a) { return !a.is_loopback(); });
  if (all.empty() && !none)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("store: {} is not on loopback, and there is no secret; expected one that all ranks "
                    "have, in a file of mode 0600 (WEFT_STORE_SECRET_FILE) or in WEFT_STORE_SECRET",
                    shown_host_port(host, port)));
  return all;
}

SocketAddress local_socket_of(const SocketAddress& loopback) {
  return abstract_address(fmt::format("weft-store-{}-{}", ::geteuid(), loopback.text()));
}

std::string interface_to(const SocketAddress& to) {
  const auto no_route = [] { return fmt::format("no route ({})", std::generic_category().message(errno)); };
  // Connecting a datagram socket sends nothing. It only reads the routing table.
  const Descriptor fd(::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  SocketAddress own;
  if (!fd || ::connect(fd.get(), to.data(), to.length) != 0 ||
      ::getsockname(fd.get(), own.data(), &own.length) != 0)
    return no_route();
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return no_route();
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(first, ::freeifaddrs);
  std::string loopback;
  for (const ifaddrs* i = list.get(); i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != own.family()) continue;
    SocketAddress here;
    std::memcpy(&here.storage, i->ifa_addr,
                own.family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    if (same_host(here, own)) return fmt::format("{} ({})", i->ifa_name, host_text(own));
    if (here.is_loopback()) loopback = i->ifa_name;
  }
  // All addresses of 127.0.0.0/8 belong to the loopback interface, although it lists only 127.0.0.1.
  return fmt::format("{} ({})", own.is_loopback() && !loopback.empty() ? loopback : "?", host_text(own));
}

}  // namespace weft
