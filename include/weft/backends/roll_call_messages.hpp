// A roll-call by control messages, for transports whose ranks share no memory: a ping carries a number; the
// pong carries the same number and the ranks that its sender waits for. See hold_up.hpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "weft/backends/hold_up.hpp"
#include "weft/base/clock.hpp"

namespace weft {

/// The state of one rank's roll-call: the transport sends the messages. Not thread-safe; no function waits.
class RollCallMessages {
 public:
  RollCallMessages(int self, int size) : self_(self), peers_(static_cast<std::size_t>(size)) {}
  /// The number for a ping to every other rank, for a call that is due; 0: they were asked a moment ago.
  std::uint32_t begin(Op op, std::uint64_t call) {
    const auto now = Clock::now();
    if (!times_.due(op, call, now)) return 0;
    times_.begin(op, call, now);
    return ++number_;
  }
  /// What a pong carries beside its number: the ranks that the answering rank waits for.
  static std::vector<std::byte> encode(std::span<const int> awaited, int size) {
    std::vector<std::byte> bits(static_cast<std::size_t>(size + 7) / 8);
    for (const int r : awaited)
      if (r >= 0 && r < size) bits[static_cast<std::size_t>(r) / 8] |= std::byte{1} << (r % 8);
    return bits;
  }
  /// A pong of rank r has come.
  void answered(int r, std::uint32_t number, std::span<const std::byte> awaits) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    peer.answered = number;
    peer.awaits.assign(awaits.begin(), awaits.end());
  }
  /// Whether further answers would change nothing, or will not come any more.
  bool settled(std::span<const int> awaited) {
    const auto now = Clock::now();
    if (times_.patient(now) && !found(awaited).settled) return false;
    times_.end(now);
    return true;
  }
  /// Which ranks hold up a call that waits for `awaited`; none where nobody was asked.
  HoldUp found(std::span<const int> awaited) const {
    if (!times_.counts(Clock::now())) return {};
    return who_holds_up(
        self_, static_cast<int>(peers_.size()), awaited,
        [&](int r) {
          return peers_[static_cast<std::size_t>(r)].answered == number_ ? Answer::yes : Answer::no;
        },
        [&](int r, int q) {
          const std::vector<std::byte>& bits = peers_[static_cast<std::size_t>(r)].awaits;
          const std::size_t at = static_cast<std::size_t>(q) / 8;
          return at < bits.size() && (bits[at] >> (q % 8) & std::byte{1}) != std::byte{};
        });
  }

 private:
  struct Peer {
    std::uint32_t answered = 0;
    std::vector<std::byte> awaits;
  };

  const int self_;
  std::vector<Peer> peers_;
  std::uint32_t number_ = 0;
  RollCallTimes times_;
};

}  // namespace weft
