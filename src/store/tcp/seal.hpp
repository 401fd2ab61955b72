// Authentication and encryption of the TCP store. It has the handshake by which client and server prove to
// each other that they know the secret, and the encrypted records that follow it. This code uses no sockets.
//
//   client -> server join C, a new X25519 public key server -> client challenge S, another new public key
//   client -> server prove MAC(k, "client") server -> client welcome MAC(k, "server")
//
// with k = BLAKE2b(key: BLAKE2b(label, secret), label, C, S, X25519 of the two). The secret itself is never
// sent. C and S are new for every connection, so an attacker cannot replay a recording. The two proofs and
// the keys of the two directions have different labels, so an attacker cannot reflect a message to its
// sender. The client proves first, so an attacker who only connects gets nothing with which to test guesses
// of the secret. An attacker who only listens gets nothing either, because k also depends on the
// Diffie-Hellman secret.
//
// After the handshake each frame is sent as one record. It is its length (4 bytes) and the frame, encrypted
// and authenticated (XChaCha20-Poly1305) with the key of the direction and the record's number as the nonce.
// A record that is changed, left out, repeated or moved to the other direction cannot be opened, and the
// connection ends.
//
// Each object belongs to one thread. The first object loads libsodium.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "store/tcp/wire.hpp"

namespace weft {

inline constexpr std::size_t kMinSecretBytes = 16;
inline constexpr std::size_t kMaxSecretBytes = 4096;
inline constexpr std::size_t kSealBytes = 16;  // how much longer the contents of a record are than its frame
inline constexpr std::size_t kMaxRecordBytes = sizeof(std::uint32_t) + kMaxFrameBytes + kSealBytes;

/// 32 bytes that the destructor wipes.
class KeyBytes {
 public:
  KeyBytes() = default;
  KeyBytes(const KeyBytes&) = default;
  KeyBytes& operator=(const KeyBytes&) = default;
  ~KeyBytes();
  unsigned char* data() noexcept { return bytes_.data(); }
  const unsigned char* data() const noexcept { return bytes_.data(); }
  static constexpr std::size_t size() { return 32; }

 private:
  std::array<unsigned char, 32> bytes_{};
};

/// The key that both sides derive from the secret. Throws unsupported if libsodium is not installed, and
/// bad_argument if the secret is too short or too long (no error text contains a part of it).
KeyBytes key_of_secret(std::string_view secret);

/// One direction of a connection. It seals frames, or opens records, in order.
class SealedStream {
 public:
  explicit SealedStream(const KeyBytes& key) : key_(key) {}
  /// Returns the record of a frame.
  std::string seal(std::string_view frame);
  struct Opened {
    ParseState state = ParseState::more;
    std::string frame;      ///< if the state is `whole`
    std::size_t bytes = 0;  ///< bytes of the record; 0 if its length is not there yet
  };
  /// Opens the record at the front of `bytes`. The state is `bad` if the length is beyond the limits, or if
  /// the record is not the next record of this stream.
  Opened open(std::string_view bytes);

 private:
  KeyBytes key_;
  std::uint64_t next_ = 0;
};

struct SealedPair {
  SealedStream to_server, to_client;
};

/// One side's keys of one handshake. `seed` fixes the values that are otherwise random, for tests.
class Handshake {
 public:
  using Value = std::array<char, kHandshakeBytes>;

  explicit Handshake(const KeyBytes& secret, std::optional<KeyBytes> seed = std::nullopt);
  /// The contents of `join`, or of `challenge`.
  std::string_view own_half() const noexcept { return {own_.data(), own_.size()}; }
  /// Processes the other side's half of the handshake. Returns false if no key can be made from it.
  bool meet(std::string_view other_half, bool is_client);
  /// The contents of `prove`, or of `welcome`.
  std::string proof(bool of_client) const;
  /// Returns whether `proof` is the right proof of the other side. Takes equal time for right and wrong
  /// proofs.
  bool holds(std::string_view proof, bool of_client) const;
  SealedPair streams() const;

 private:
  KeyBytes label(std::string_view text) const;

  KeyBytes secret_, own_secret_, shared_;
  Value own_{};
};

}  // namespace weft
