#include "store/tcp/sockets.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <utility>
#include <vector>

#include "weft/base/error.hpp"

namespace weft {

void set_tcp_options(int fd) {
  const int on = 1, idle = 10, between = 5, count = 4, unacknowledged = 30'000;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged, sizeof unacknowledged);
}

std::string shown(const Credentials& c) { return fmt::format("process {} of user {}", c.process, c.user); }

namespace {

/// Returns the end of an error text, which names the process that listens on a Unix socket. "" if the process
/// is not known.
std::string holder_of(const SocketAddress& local) {
  const Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), local.data(), local.length) != 0) return {};
  return fmt::format(" ({} serves there; this is process {})", shown(credentials(fd.get())), ::getpid());
}

/// Listens on the Unix socket of an address on loopback, or on a free socket if the port is 0. `elsewhere`:
/// as in listen_on().
Listening listen_locally(SocketAddress address, bool elsewhere) {
  const bool any = address.port() == 0;
  std::random_device random;
  for (int attempt = 0;; ++attempt) {
    if (any) address.set_port(std::uniform_int_distribution<std::uint16_t>(1024)(random));
    const SocketAddress at = local_socket_of(address);
    Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd && ::bind(fd.get(), at.data(), at.length) == 0 && ::listen(fd.get(), SOMAXCONN) == 0)
      return {std::move(fd), address};
    const int error_number = errno;
    if (error_number == EADDRINUSE && any && attempt < 1000) continue;
    if (error_number == EADDRINUSE && elsewhere) return {};
    throw Error(ErrorCode::system, fmt::format("store server: cannot listen on {}: {}{}", address.text(),
                                               system_words(error_number),
                                               error_number == EADDRINUSE ? holder_of(at) : std::string()));
  }
}

}  // namespace

Listening listen_on(const TcpStoreOptions& options, bool elsewhere) {
  std::string why;
  const std::vector<SocketAddress> all =
      resolve_for_store(options.host, options.port, !options.secret.empty(), why);
  if (all.empty()) throw Error(ErrorCode::system, fmt::format("store server: {}", why));
  if (options.secret.empty()) return listen_locally(all.front(), elsewhere);
  for (std::size_t i = 0; i < all.size(); ++i) {
    Listening l{Descriptor(::socket(all[i].family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), all[i]};
    const int on = 1;
    if (l.socket) ::setsockopt(l.socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (l.socket && l.address.family() == AF_INET6)
      ::setsockopt(l.socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (l.socket && ::bind(l.socket.get(), l.address.data(), l.address.length) == 0 &&
        ::listen(l.socket.get(), SOMAXCONN) == 0 &&
        ::getsockname(l.socket.get(), l.address.data(), &l.address.length) == 0)
      return l;
    const bool not_here = errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT;
    if (not_here && i + 1 < all.size()) continue;  // the host has no IPv4, or no IPv6
    if (elsewhere && (not_here || errno == EADDRINUSE)) break;
    throw_errno(fmt::format("store server: cannot listen on {}", all[i].text()), errno);
  }
  return {};
}

}  // namespace weft
