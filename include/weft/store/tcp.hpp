// The store of ranks that are processes: one of them (or the launcher) serves, and all are clients. It uses
// TCP and a secret; on loopback without a secret, a Unix socket for processes of one user.
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
  /// A name or an address, IPv4 or IPv6. Off loopback, 0.0.0.0 and :: included, a secret is demanded.
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  ///< 0: any that is free
  /// The secret that clients must know, 16 bytes to 4 KiB; never sent. Empty: no TCP port is opened. Then
  /// processes of this user on this host join at an abstract Unix socket, whose name follows from host and
  /// port. The kernel identifies their users, and other users' processes are refused.
  std::string secret = {};
  /// The value that clients find under kServedByKey from the beginning; "" once the server is ending. Empty:
  /// the key is not set.
  std::string served_by = {};
  std::size_t max_clients = 4096;  ///< connections at once; further ones are closed, with a warning
  /// Unauthenticated connections among them: those that have not shown yet, by the secret or a request, that
  /// they belong here. If there are more, the oldest of them is closed, so that they never take the place of
  /// ranks.
  std::size_t max_unauthenticated = 512;
  Duration join_limit = std::chrono::seconds(10);       ///< how long they may take to show it
  std::size_t max_keys = std::size_t{1} << 20;          ///< in the table; a further one is refused
  std::size_t max_bytes = std::size_t{256} << 20;       ///< of keys and values in the table
  std::size_t max_unanswered = std::size_t{256} << 20;  ///< bytes of requests and replies in progress
  Duration linger = std::chrono::seconds(2);  ///< how long the destructor waits for clients to leave
};

/// The secret of this process's job: the contents of WEFT_STORE_SECRET_FILE (without line feeds at its end),
/// or WEFT_STORE_SECRET. Empty if neither is set. Throws bad_argument if both are set, if the file may be
/// read or written by others or is another user's, or if the secret is shorter than 16 bytes; system if the
/// file cannot be read. docs/rendezvous.md says what it protects against.
std::string store_secret_from_env();

/// Serves one table of keys from its own thread, which takes no signals. A connection is closed with a
/// warning if it sends bytes that are not a frame of weft's, or a frame beyond the limits (keys 1 KiB,
/// values 1 MiB), or fails to authenticate; the other connections do not notice. In ten seconds only the
/// first twenty such warnings are written, the others counted. If the process has no more descriptors,
/// clients get an error with the limit.
class TcpStoreServer {
 public:
  /// Listens when this returns. `log` must outlive the server. Throws bad_argument off loopback if there
  /// is no secret, unsupported if there is one but no libsodium, system where the port cannot be had or
  /// there is no thread.
  explicit TcpStoreServer(Logger& log, TcpStoreOptions options = {});
  /// Logs to the Context's log. If the Context is destroyed before its server, it says so and ends the
  /// process.
  explicit TcpStoreServer(Context& context, TcpStoreOptions options = {});
  /// The same, but null if the port is taken or the address is not this host's: another process serves.
  static std::unique_ptr<TcpStoreServer> try_serve(Logger& log, TcpStoreOptions options);
  static std::unique_ptr<TcpStoreServer> try_serve(Context& context, TcpStoreOptions options);
  /// Waits up to `linger` for the clients to leave, then cuts them off. In a forked child: nothing, the
  /// server is its parent's.
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

/// A client of the server at host:port. Tries all addresses of the host, again and again, until the server is
/// there. On loopback the Unix socket of this user is tried first. Off loopback, and if the server needs it,
/// server and client prove to each other that they know `secret`, and everything after that is sealed with
/// keys of that connection.
///
/// Throws timeout, with the address, if the deadline passes first; system if there is no such host, if the
/// server has had no descriptor for two seconds, or if a process of another user serves on the Unix socket;
/// bad_argument if a secret is needed and empty; mismatch if the other side has another secret; unsupported
/// if libsodium is missing. When the server has gone, every function throws peer_lost with the key.
std::shared_ptr<Store> make_tcp_store(std::string_view host, std::uint16_t port, Deadline deadline,
                                      std::string_view secret = {});

}  // namespace weft
