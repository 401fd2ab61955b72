// One connection of a client to the server of the TCP store. It connects, checks whether a weft store listens
// there, and exchanges requests for replies. Only one thread at a time uses it. After a failure it is
// discarded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/memfd.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "store/tcp/address.hpp"
#include "store/tcp/seal.hpp"
#include "store/tcp/wire.hpp"
#include "weft/base/clock.hpp"

namespace weft {

struct StoreReply {
  FrameKind kind = FrameKind::found;
  std::int64_t number = 0;
  std::string value;
};

class StoreConnection {
 public:
  enum class Outcome : std::uint8_t {
    ok,
    closed,           // error() gives the reason; is_full(): the server has no more descriptors
    silent,           // no answer in time
    foreign,          // the listening program is not a weft store
    secret_demanded,  // the server demands a secret
    wrong_secret,     // the server has another secret, or none
  };

  /// Connects; returns false if that failed, and error() gives the reason.
  bool open(const SocketAddress& to, Deadline give_up);

  /// The server's process, if the connection is over a Unix socket.
  const Credentials& server() const { return server_; }
  bool is_own_users() const;

  /// Checks whether a weft store listens there: with a secret by the handshake, otherwise by a request whose
  /// answer has no effect. After that the server treats this connection as that of a rank.
  Outcome greet(const KeyBytes* secret, Deadline give_up);

  Outcome exchange(FrameKind kind, std::string_view key, std::string_view value, std::string_view extra,
                   std::int64_t number, Deadline give_up, StoreReply& reply);

  const std::string& error() const { return error_; }
  bool is_full() const { return full_; }

 private:
  Outcome introduce(const KeyBytes* secret, Deadline give_up);
  bool check_full(const StoreReply& reply);
  bool open_local(const SocketAddress& to, Deadline give_up);
  Outcome send(std::string_view bytes, Deadline give_up);
  Outcome receive(Deadline give_up, StoreReply& reply);
  bool ready(short events, Deadline give_up);
  bool failed(int error_number);

  Descriptor fd_;
  Credentials server_;
  std::string error_;
  bool greets_ = false, full_ = false;
  std::optional<SealedPair> sealed_;
};

}  // namespace weft
