// Sockets of the TCP store: how a server listens, the options of connections, and the names of peer processes
// in error texts. Any thread.
#pragma once

#include <string>

#include "base/memfd.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "store/tcp/address.hpp"
#include "weft/store/tcp.hpp"

namespace weft {

/// Sets options so that the TCP connection sends small frames at once, and each end notices within half a
/// minute that the other end's host has vanished, even during a get.
void set_tcp_options(int fd);

/// Returns the process at the other end of a connected Unix socket as text: "process 4711 of user 1000".
std::string shown(const Credentials& c);

struct Listening {
  Descriptor socket;
  SocketAddress address;  // the TCP address, even if the socket is a Unix socket
};

/// Listens on the first address of options.host that this machine has: on TCP if there is a secret, otherwise
/// on the Unix socket of that address. `elsewhere`: if the address does not belong to this machine, or the
/// port is in use, returns an empty socket instead of throwing an Error.
Listening listen_on(const TcpStoreOptions& options, bool elsewhere);

}  // namespace weft
