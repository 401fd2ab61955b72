// What the TCP store's server knows of one connection, without the connection: bytes go in, requests and
// bytes come out. Owned by the server's thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "store/tcp/seal.hpp"
#include "store/tcp/wire.hpp"

namespace weft {

/// A connection begins as a stranger's. Where the server demands a secret it must prove that it knows it;
/// otherwise it is a process of this user's, the server has closed all others before they had a session, and
/// its first whole request tells that it is a client. Who asks (for kHelloKey) is told once that a secret is
/// demanded. What a stranger may have unread is as much as a handshake in the first case, one frame in the
/// second.
class StoreSession {
 public:
  /// `secret`: null where none is demanded; must outlive the session. `seed`: for tests.
  explicit StoreSession(const KeyBytes* secret, std::optional<KeyBytes> seed = std::nullopt)
      : secret_(secret), seed_(seed) {}

  struct Result {
    enum class State : std::uint8_t {
      more,     ///< nothing is whole yet
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
  /// The request that was handed out is not looked at any more: its memory is given back.
  void answered() noexcept { std::string().swap(current_); }
  /// A reply as it goes over the wire.
  std::string wire(std::string frame);

  bool is_unauthenticated() const noexcept { return unauthenticated_; }
  /// It asked, learned that a secret is demanded, and has not proven it.
  bool was_told_of_secret() const noexcept { return told_of_secret_ && unauthenticated_; }
  std::size_t unread() const noexcept { return in_.size(); }

 private:
  Result handshake(const Parsed& parsed);

  const KeyBytes* secret_;
  std::optional<KeyBytes> seed_;
  std::optional<Handshake> handshake_;  // while it is under way
  std::optional<SealedPair> sealed_;
  std::string in_;       // received, not yet whole
  std::string current_;  // the frame that was handed out
  bool unauthenticated_ = true;
  bool told_of_secret_ = false;
};

}  // namespace weft
