// The protocol state of one connection of the TCP store's server, without its socket: received bytes go in,
// requests and bytes to send come out. The server's thread owns it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "store/tcp/seal.hpp"
#include "store/tcp/wire.hpp"

namespace weft {

/// A connection begins unauthenticated. If the server needs a secret, the client must prove that it knows it.
/// Without a secret the client is a process of this user (the server has closed all other connections
/// before), and counts as authenticated when its first request is complete. A client that requests kHelloKey
/// is answered, once, that a secret is needed. An unauthenticated client may have as many unread bytes as a
/// handshake (with a secret) or one frame (without).
class StoreSession {
 public:
  /// `secret`: null if none is demanded; the caller must keep it alive as long as the session. `seed`: for
  /// tests.
  explicit StoreSession(const KeyBytes* secret, std::optional<KeyBytes> seed = std::nullopt)
      : secret_(secret), seed_(seed) {}

  struct Result {
    enum class State : std::uint8_t {
      more,     ///< nothing is complete yet
      reply,    ///< `out` is to be sent
      request,  ///< `frame` is to be answered; points into the session until answered()
      bad,      ///< the connection is to be closed with the warning `why`, after `out` was sent
    };
    State state = State::more;
    StoreFrame frame{};
    std::string out{};
    std::string why{};
  };
  Result take(std::string_view bytes);
  /// To be called when the caller is done with the request that it got: frees the request's memory.
  void answered() noexcept { std::string().swap(current_); }
  /// A reply as it goes over the wire.
  std::string wire(std::string frame);

  bool is_unauthenticated() const noexcept { return unauthenticated_; }
  /// Returns whether the client asked, was notified that a secret is needed, and has not proven that it knows
  /// the secret.
  bool was_told_of_secret() const noexcept { return told_of_secret_ && unauthenticated_; }
  std::size_t unread() const noexcept { return in_.size(); }

 private:
  Result handshake(const Parsed& parsed);

  const KeyBytes* secret_;
  std::optional<KeyBytes> seed_;
  std::optional<Handshake> handshake_;  // while it is under way
  std::optional<SealedPair> sealed_;
  std::string in_;       // received, not yet complete
  std::string current_;  // the frame that was handed out
  bool unauthenticated_ = true;
  bool told_of_secret_ = false;
};

}  // namespace weft
