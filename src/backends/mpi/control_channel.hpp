// Control messages between the ranks of a group: the calls of each rank, point-to-point messages, failures,
// and the notice that a rank leaves.
//
// Everything except the data of a collective or of a large message is a control message. It is one MPI
// message with one tag, made of an envelope and a payload of at most kPayload bytes. MPI keeps the control
// messages of one sender in order. Their receives are always posted, so the next poll takes each control
// message. Control messages are sent from copies, which outlive the caller's memory.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/mpi/process.hpp"

namespace weft::mpi {

struct Envelope {
  enum Kind : std::uint8_t { call, message, failure, left, ping, pong };  // a ping is answered by a pong
  Kind kind = left;
  DType dtype = DType::u8;  ///< message
  bool eager = false;       ///< message: the payload has all elements
  std::int32_t tag = 0;
  std::uint32_t number = 0;   ///< message: the number among this pair's large messages
  std::uint32_t payload = 0;  ///< bytes
  std::int64_t count = 0;     ///< message: elements
};

/// Used by one thread at a time.
class ControlChannel {
 public:
  static constexpr std::size_t kPayload = 4096;
  /// the tag of control messages; data of large messages has tags from kTag + 1
  static constexpr int kTag = 0;
  /// numbers for large messages of a pair, which repeat; at most 64 are in flight
  static constexpr int kNumbers = 16384;

  /// Takes ownership of `comm`.
  ControlChannel(MPI_Comm comm, int rank, int size);
  /// Frees the communicator; allowed only when idle().
  ~ControlChannel();
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  MPI_Comm comm() const noexcept { return comm_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Sends an envelope. Returns its number among all envelopes that this rank sends on this channel: 1, 2,
  /// ...
  std::uint64_t send(int to, Envelope head, std::span<const std::byte> payload = {});
  void send_others(const Envelope& head, std::span<const std::byte> payload = {});
  /// The number of envelopes that MPI has not taken yet.
  std::size_t unsent() const noexcept { return sent_.size(); }
  /// Returns the ranks for which MPI has not yet taken one of the envelopes `first` to `last`. Only ranks
  /// count that have not left, and for which `asked(rank)` is true. A message that MPI has not taken is sent
  /// only while this process calls MPI.
  template <class Asked>
  std::vector<int> owed(std::uint64_t first, std::uint64_t last, const Asked& asked) const {
    std::vector<int> ranks;
    for (const Sent& s : sent_)
      if (s.number >= first && s.number <= last && !gone_[static_cast<std::size_t>(s.to)] && asked(s.to))
        ranks.push_back(s.to);
    return ranks;
  }
  /// Returns whether MPI has not yet taken this envelope for some rank.
  bool owes(std::uint64_t number) const {
    return !owed(number, number, [](int) { return true; }).empty();
  }

  /// Passes a bounded number of arrived control messages to take(from, envelope, payload). Returns whether
  /// there was any message.
  template <class Take>
  bool take(const Take& take) {
    reap();
    bool any = false;
    for (int i = 0; i < kAtOnce; ++i) {
      const std::byte* const bytes = next();
      if (bytes == nullptr) break;
      any = true;
      const Envelope head = head_;
      if (head.kind == Envelope::left) {
        ++left_;
        gone_[static_cast<std::size_t>(from_)] = true;
      }
      take(from_, head, std::span(bytes + sizeof(Envelope), head.payload));
      again();
    }
    return any;
  }
  /// Returns whether MPI still holds control messages for peers that have not left, and that may wait for
  /// them.
  bool owes() const noexcept {
    for (const Sent& s : sent_)
      if (!gone_[static_cast<std::size_t>(s.to)]) return true;
    return false;
  }
  /// Returns whether all peers have left and all control messages of this rank are sent, so that nothing will
  /// arrive any more.
  bool idle() noexcept;

 private:
  static constexpr int kAtOnce = 16, kPosted = 4;
  static constexpr std::size_t kBytes = sizeof(Envelope) + kPayload;
  struct Sent {
    MPI_Request request;
    std::unique_ptr<std::byte[]> bytes;
    int to;
    std::uint64_t number;
  };
  const std::byte* next();  // the envelope at the head of the posted receives, or null
  void again();             // posts the receive of this envelope again
  void reap();
  MPI_Comm comm_;
  int rank_, size_;
  std::unique_ptr<std::byte[]> buffers_;
  MPI_Request posted_[kPosted];
  int head_index_ = 0;
  int from_ = -1;
  Envelope head_{};
  int left_ = 0;
  std::uint64_t written_ = 0;
  std::vector<bool> gone_;  // the ranks that have left
  std::list<Sent> sent_;
};

}  // namespace weft::mpi
