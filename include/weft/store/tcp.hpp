// A store for ranks that are processes. One of them (or the launcher) is the server, and all are clients. It
// uses TCP and a secret. On loopback without a secret, it uses a Unix socket for processes of one user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "weft/base/clock.hpp"
#include "weft/base/log.hpp"
#include "weft/store/store.hpp"

namespace weft {

class Context;

inline constexpr std::string_view kServedByKey = "weft/served-by";

struct TcpStoreOptions {
  /// A name or an address, IPv4 or IPv6. Any address that is not loopback, including 0.0.0.0 and ::, requires
  /// a secret.
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  ///< 0: any free port
  /// The secret that clients must know, 16 bytes to 4 KiB. It is never sent. If it is empty, the server opens
  /// no TCP port. Processes of this user on this host connect to an abstract Unix socket, whose name follows
  /// from host and port. The kernel identifies their users, and the server refuses processes of other users.
  std::string secret = {};
  /// The value that clients find under kServedByKey from the beginning. The value becomes "" when the server
  /// is about to end. If it is empty, the key is not set.
  std::string served_by = {};
  std::size_t max_clients = 4096;  ///< connections at once; the server closes further ones, with a warning
  /// The limit of unauthenticated connections. These are connections that have not yet shown, by the secret
  /// or a request, that they belong to the job. If there are more, the server closes the oldest of them, so
  /// that they never take the place of ranks.
  std::size_t max_unauthenticated = 512;
  Duration join_limit = std::chrono::seconds(10);       ///< how long a connection may take to authenticate
  std::size_t max_keys = std::size_t{1} << 20;          ///< keys in the table; further ones are refused
  std::size_t max_bytes = std::size_t{256} << 20;       ///< bytes of keys and values in the table
  std::size_t max_unanswered = std::size_t{256} << 20;  ///< bytes of requests and replies in progress
  Duration linger = std::chrono::seconds(2);  ///< how long the destructor waits for clients to leave
};

/// The secret of this process's job: the contents of WEFT_STORE_SECRET_FILE (without line feeds at its end),
/// or WEFT_STORE_SECRET. Empty if neither is set. Throws bad_argument if both are set, if other users may
/// read or write the file or own it, or if the secret is shorter than 16 bytes. Throws system if the file
/// cannot be read. docs/rendezvous.md explains which attacks the secret prevents.
std::string store_secret_from_env();

/// Serves one table of keys from its own thread, which blocks all signals. The server closes a connection,
/// with a warning, if the client sends bytes that are not a frame of weft, or a frame beyond the limits (keys
/// 1 KiB, values 1 MiB), or fails to authenticate. This does not affect other connections. In ten seconds the
/// server writes at most twenty such warnings, and counts the others. If the process has no file descriptors
/// left, clients get an error that states the limit.
class TcpStoreServer {
 public:
  /// The server listens when the constructor returns. `log` must exist longer than the server. Throws
  /// bad_argument if the address is not loopback and there is no secret. Throws unsupported if there is a
  /// secret but no libsodium. Throws system if the port is not available or the thread cannot be created.
  explicit TcpStoreServer(Logger& log, TcpStoreOptions options = {});
  /// Like the constructor above, with the Context's log. If the Context is destroyed before its server, the
  /// Context reports this and ends the process.
  explicit TcpStoreServer(Context& context, TcpStoreOptions options = {});
  /// Makes a server. Returns null if the port is in use or the address is not one of this host: another
  /// process is then the server.
  static std::unique_ptr<TcpStoreServer> try_serve(Logger& log, TcpStoreOptions options);
  static std::unique_ptr<TcpStoreServer> try_serve(Context& context, TcpStoreOptions options);
  /// Waits up to `linger` for the clients to leave, and closes the connections of the other clients. In a
  /// forked child it does nothing, because the server belongs to the parent.
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  std::uint16_t port() const noexcept;
  /// "127.0.0.1:45123" or "[::1]:45123", as WEFT_STORE takes it.
  std::string address() const;

 private:
  struct Impl;
  explicit TcpStoreServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A client of the server at host:port. Tries all addresses of the host, again and again, until the server
/// answers. On loopback it first tries the Unix socket of this user. If the address is not loopback, or if
/// the server requires it, server and client prove to each other that they know `secret`, and encrypt
/// everything after that with keys of this connection.
///
/// Throws timeout, with the address, if the deadline passes first. Throws system if there is no such host, if
/// the server has had no descriptor for two seconds, or if a process of another user serves on the Unix
/// socket. Throws bad_argument if a secret is needed and empty, mismatch if the server has another secret,
/// and unsupported if libsodium is missing. When the server has ended, all functions throw peer_lost.
std::shared_ptr<Store> make_tcp_store(std::string_view host, std::uint16_t port, Deadline deadline,
                                      std::string_view secret = {});

}  // namespace weft
