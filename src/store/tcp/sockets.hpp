// Sockets of the TCP store: how a server listens, what is set on a connection, and how error texts name the
// process at its other end. Callable from any thread.
#pragma once

#include <string>

#include "base/memfd.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "store/tcp/address.hpp"
#include "weft/store/tcp.hpp"

namespace weft {

/// A TCP connection sends small frames at once. Both sides notice within half a minute that the other's host
/// has vanished, also while they wait in a get.
void set_tcp_options(int fd);

/// The process at the other end of a connected Unix socket: "process 4711 of user 1000".
std::string shown(const Credentials& c);

struct Listening {
  Descriptor socket;
  SocketAddress address;  // of TCP, also where the socket is a Unix socket
};

/// Listens on the first address of options.host that this machine has: on TCP if there is a secret, else
/// on the Unix socket of that address. `elsewhere`: an address that is not this machine's, or a port that is
/// taken, gives an empty socket rather than an Error.
Listening listen_on(const TcpStoreOptions& options, bool elsewhere);

}  // namespace weft
