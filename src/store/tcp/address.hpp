// Internet addresses of the TCP store: IPv4, IPv6 and names, and texts of them for users.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

/// An IPv4 or IPv6 address with its port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  int family() const noexcept { return storage.ss_family; }
  sockaddr* data() noexcept { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* data() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
  std::uint16_t port() const noexcept;
  void set_port(std::uint16_t port) noexcept;
  bool is_loopback() const noexcept;
  /// "127.0.0.1:4711" or "[::1]:4711".
  std::string text() const;
  friend bool operator==(const SocketAddress& a, const SocketAddress& b) noexcept;
};

struct HostPort {
  std::string host;  ///< without brackets
  std::uint16_t port = 0;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};
/// Parses `host:port`, with an IPv6 address in brackets. Returns nothing for any other text. Port 0 is
/// accepted.
std::optional<HostPort> parse_host_port(std::string_view text);
/// The inverse of parse_host_port: uses brackets if the host contains a colon.
std::string shown_host_port(std::string_view host, std::uint16_t port);

/// All addresses of `host`, in the order in which they should be tried. "localhost" is loopback, whatever the
/// resolver says. Returns an empty list if the resolver cannot answer now. `why` then has its text, and the
/// caller may try again. Throws system if there is no such host.
std::vector<SocketAddress> resolve(std::string_view host, std::uint16_t port, std::string& why);
/// The addresses that the TCP store may use. With a secret: all addresses, those off loopback first (a name
/// may be on loopback on its own host, and off loopback for other hosts). Without a secret: only the
/// addresses on loopback. Throws bad_argument if no address is left.
std::vector<SocketAddress> resolve_for_store(std::string_view host, std::uint16_t port, bool has_secret,
                                             std::string& why);

/// The abstract Unix socket at which processes of this user find the store of a loopback address. Its name
/// contains the user's number and the address. Like loopback, the socket belongs only to this network
/// namespace.
SocketAddress local_socket_of(const SocketAddress& loopback);

/// "lo (127.0.0.1)": the interface that the routing table chooses for `to`, and this host's address on it.
/// "no route (…)" if there is none. It sends nothing.
std::string interface_to(const SocketAddress& to);

}  // namespace weft
