// The store over TCP, for ranks that are processes: one of them (or the launcher) serves, all are clients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "weft/backends/store.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/log.hpp"

namespace weft {

struct TcpStoreOptions {
  std::string host = "127.0.0.1";  ///< a name or an address, IPv4 or IPv6; off loopback: `unsupported`
  std::uint16_t port = 0;          ///< 0: any that is free
  std::size_t max_clients = 4096;  ///< connections at once; further ones are closed, with a warning
  Duration linger = std::chrono::seconds(2);  ///< how long the destructor waits for clients to leave
};

/// Serves one table of keys from a thread of its own. A connection that sends what is not a frame of ours, or
/// a frame beyond the limits (keys 1 KiB, values 1 MiB), is closed with one warning; the others do not
/// notice.
class TcpStoreServer {
 public:
  /// Listens when this returns. `log` must outlive the server. Throws unsupported off loopback, system where
  /// the port cannot be had.
  explicit TcpStoreServer(Logger& log, TcpStoreOptions options = {});
  /// The same, but null where the port is taken or the address is not this host's: somebody else serves.
  static std::unique_ptr<TcpStoreServer> try_serve(Logger& log, TcpStoreOptions options);
  /// Waits up to `linger` for the clients to leave, then cuts them off.
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

/// A client of the server at host:port. Tries all addresses of the host, again and again until the server is
/// there; throws timeout naming the address when the deadline passes first, unsupported where none of them is
/// on loopback, system where there is no such host. When the server goes, every function
/// throws peer_lost naming the key.
std::shared_ptr<Store> make_tcp_store(std::string_view host, std::uint16_t port, Deadline deadline);

}  // namespace weft
