// The parts of a Links: control messages, and the state of one peer. Only the source files of Links include
// this header.
#pragma once

#include <chrono>

#include "backends/gloo/links.hpp"

namespace weft::gloo_backend {

// weft's own slots, separate from the slots of Gloo's collectives, whose first byte is 1 to 8.
inline constexpr std::uint64_t kControlMessages = 0x40ull << 56;
inline constexpr std::uint64_t kData = 0x41ull << 56;  // plus the message's number
// Gloo has no other way to wait without a limit. The group watches the deadlines.
inline constexpr auto kForever = std::chrono::hours(24 * 30);

struct Links::ControlMessage {
  enum class Kind : std::uint32_t {
    message,       // the payload follows
    offer,         // offers a large message, which waits in slot kData + number
    taken,         // the large message has arrived
    announce,      // announces a collective
    acknowledged,  // sent only for its field `acknowledged`
    leave,         // this rank leaves the group
    // the answer to `leave`: everything before `leave` was read; the answering rank may still send its own
    // `leave`
    farewell,
    ping,  // a running rank answers with `pong`
    pong,  // payload: the ranks for which the sender waits
  };
  Kind kind = Kind::acknowledged;
  std::int32_t tag = 0;
  DType dtype = DType::u8;
  std::int64_t count = 0;
  std::uint64_t number = 0;
  // The number of control messages of the receiver that the sender has read: their memory may be freed.
  std::uint64_t acknowledged = 0;
  Announcement announcement{};
};

struct Links::Peer {
  struct Sent {
    std::vector<std::byte> bytes;
    UnboundBuffer buffer;
  };
  struct Offered {
    UnboundBuffer buffer;
    OpState* send = nullptr;
  };
  int rank = 0;
  std::thread thread;

  std::mutex writing;  // keeps control messages in order
  std::deque<Sent> sent;
  std::uint64_t first_sent = 0;  // the number of sent.front()
  std::atomic<std::uint64_t> read{0}, acknowledged{0};
  std::uint64_t acknowledgement_sent = 0;

  std::array<std::byte, sizeof(ControlMessage) + kEagerBytes> incoming{};
  UnboundBuffer in;

  // Under Links::mutex_:
  std::deque<std::pair<OpState*, std::uint64_t>> to_fetch;  // messages that the peer's thread must fetch
  std::map<std::uint64_t, Offered> offers;
  std::uint64_t next_offer = 0;
  bool leaves = false;    // the peer has sent `leave`
  bool released = false;  // the peer has answered this rank's `leave`
  bool gone = false;      // the peer's thread has ended
  bool awake = false;     // the peer's thread checks to_fetch before it waits again
};

}  // namespace weft::gloo_backend
