// Sockets of the TCP store: how a server listens, which options a connection has, and how error texts name
// the process at its other end. Callable from any thread.
#pragma once

#include <string>

#include "base/memfd.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "store/tcp/address.hpp"
#include "weft/store/tcp.hpp"

namespace weft {

/// A TCP connection sends small frames at once. Both ends notice within half a minute that the other's host
/// has vanished, even while they wait in a get.
void set_tcp_options(int fd);

/// The process at the other end of a connected Unix socket: "process 4711 of user 1000".
std::string shown(const Credentials& c);

struct Listening {
  Descriptor socket;
  SocketAddress address;  // the TCP address, even if the socket is a Unix socket
};

/// Listens on the first address of options.host that this machine has: on TCP if there is a secret, otherwise
/// on the Unix socket of that address. `elsewhere`: if an address is not this machine's, or a port is taken,
/// it returns an empty socket instead of throwing an Error.
Listening listen_on(const TcpStoreOptions& options, bool elsewhere);

}  // namespace weft
