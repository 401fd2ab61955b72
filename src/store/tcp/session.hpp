// The protocol state of one connection of the TCP store's server, without its socket. Its inputs are received
// bytes. Its outputs are requests and bytes to send. The server's thread owns it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "store/tcp/seal.hpp"
#include "store/tcp/wire.hpp"

namespace weft {

/// A connection begins unauthenticated. If the server needs a secret, the client must prove that it knows the
/// secret. Without a secret the client is a process of this user (the server has closed all other connections
/// before), and counts as authenticated when its first request is complete. If a client without proof
/// requests kHelloKey, the session answers, once, that a secret is needed. An unauthenticated client may have
/// as many unread bytes as a handshake (if there is a secret) or one frame (if there is none).
class StoreSession {
 public:
  /// `secret`: null if the server requires none. The caller must keep the key alive as long as the session.
  /// `seed`: for tests.
  explicit StoreSession(const KeyBytes* secret, std::optional<KeyBytes> seed = std::nullopt)
      : secret_(secret), seed_(seed) {}

  struct Result {
    enum class State : std::uint8_t {
      more,     ///< nothing is complete yet
      reply,    ///< the caller must send `out`
      request,  ///< the caller must answer `frame`, which points into the session until answered()
      bad,      ///< the caller must send `out`, and then close the connection with the warning `why`
    };
    State state = State::more;
    StoreFrame frame{};
    std::string out{};
    std::string why{};
  };
  Result take(std::string_view bytes);
  /// The caller must call it when it is done with a request: frees the request's memory.
  void answered() noexcept { std::string().swap(current_); }
  /// Returns a reply in the form in which it is sent.
  std::string wire(std::string frame);

  bool is_unauthenticated() const noexcept { return unauthenticated_; }
  /// Returns whether the client was notified that a secret is needed, and has not proven that it knows the
  /// secret.
  bool was_told_of_secret() const noexcept { return told_of_secret_ && unauthenticated_; }
  std::size_t unread() const noexcept { return in_.size(); }

 private:
  Result handshake(const Parsed& parsed);

  const KeyBytes* secret_;
  std::optional<KeyBytes> seed_;
  std::optional<Handshake> handshake_;  // exists during the handshake
  std::optional<SealedPair> sealed_;
  std::string in_;       // received bytes that are not complete yet
  std::string current_;  // the frame that was returned last
  bool unauthenticated_ = true;
  bool told_of_secret_ = false;
};

}  // namespace weft
