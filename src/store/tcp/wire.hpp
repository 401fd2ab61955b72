// The wire format of the TCP store. This code uses no sockets and has no state, so that the parser can be
// tested and fuzzed with bytes alone.
//
// A frame is a FrameHeader (24 bytes, little-endian) and then key, value and extra, as long as the header
// says. A client sends one request and reads one reply before it sends the next request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "store/parse_state.hpp"
#include "store/table.hpp"
#include "weft/base/error.hpp"

namespace weft {

inline constexpr std::uint32_t kFrameMagic = 0x53544657;  // "WFTS"
inline constexpr std::uint8_t kFrameVersion = 1;

enum class FrameKind : std::uint8_t {
  // requests
  get = 1,  // number: nanoseconds to wait, kForever: no limit
  try_get,
  set,
  add,          // number: the delta
  compare_set,  // value: expected, extra: desired
  remove,
  join,   // value: the client's half of a handshake (seal.hpp)
  prove,  // value: the proof that the client knows the secret
  // replies
  found = 64,  // value, or for add: number
  absent,
  timed_out,
  refused,          // number: an ErrorCode, value: its text
  challenge,        // value: the server's half of the handshake
  welcome,          // value: the proof that the server knows the secret
  secret_demanded,  // the reply to a request of a client that has not joined
  wrong_proof,      // the client's proof is wrong: it has another secret
};

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint8_t version = kFrameVersion;
  FrameKind kind = FrameKind::found;
  std::uint16_t key_bytes = 0;
  std::uint32_t value_bytes = 0;
  std::uint32_t extra_bytes = 0;
  std::int64_t number = 0;
};
static_assert(sizeof(FrameHeader) == 24);

inline constexpr std::int64_t kForever = -1;
// longer waits count as this long
inline constexpr Duration kLongestStoreWait = std::chrono::hours(24 * 365);
inline constexpr std::string_view kHelloKey = "weft/hello";  // requested once per connection; never set
inline constexpr std::size_t kHandshakeBytes = 32;           // the size of every value in a handshake
inline constexpr std::size_t kMaxFrameBytes =
    sizeof(FrameHeader) + kMaxStoreKeyBytes + 2 * kMaxStoreValueBytes;

/// A frame that was read; it points into the bytes from which it was read.
struct StoreFrame {
  FrameKind kind = FrameKind::found;
  std::int64_t number = 0;
  std::string_view key, value, extra;
};

std::string make_frame(FrameKind kind, std::string_view key, std::string_view value,
                       std::string_view extra = {}, std::int64_t number = 0);
std::string make_refusal(ErrorCode code, std::string_view text);
/// A frame that was read. It points into the bytes from which it was read.
ErrorCode refusal_code(const StoreFrame& frame) noexcept;

struct Parsed {
  ParseState state = ParseState::more;
  StoreFrame frame{};  ///< if the state is `whole`
  /// bytes of the frame; if the state is `more`, the number that the header has announced so far
  std::size_t bytes = 0;
  std::string why{};  ///< if the state is `bad`: "it does not speak this protocol (it sent "GET / HT")"
};
/// Parses the frame at the front of `bytes`, and checks each field as soon as it is complete.
Parsed parse_request(std::string_view bytes);
Parsed parse_reply(std::string_view bytes);

}  // namespace weft
