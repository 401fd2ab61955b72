// A roll-call by letters, for transports whose ranks share no memory: a ping with a number, a pong with the
// same and with whom its sender waits for. See hold_up.hpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backends/hold_up.hpp"
#include "weft/base/clock.hpp"

namespace weft {

/// What has been answered. Used by one thread at a time.
class RollLetters {
 public:
  RollLetters(int self, int size) : self_(self), peers_(static_cast<std::size_t>(size)) {}
  /// The number for a ping to every other rank; 0: they were asked a moment ago.
  std::uint32_t begin() {
    const auto now = Clock::now();
    // A rank that answered a warning may have called since: the deadline asks anew.
    if (asked() && now - settled_ < kFresh) return 0;
    began_ = now;
    settled_ = Clock::time_point::max();
    return ++number_;
  }
  /// What a pong carries.
  static std::vector<std::byte> encode(std::span<const int> awaited, int size) {
    std::vector<std::byte> bits(static_cast<std::size_t>(size + 7) / 8);
    for (const int r : awaited)
      if (r < size) bits[static_cast<std::size_t>(r) / 8] |= std::byte{1} << (r % 8);
    return bits;
  }
  void answered(int r, std::uint32_t number, std::span<const std::byte> awaits) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    peer.answered = number;
    peer.awaits.assign(awaits.begin(), awaits.end());
  }
  /// Further answers change nothing, or will not come.
  bool settled(std::span<const int> awaited) {
    const auto now = Clock::now();
    if (now - began_ < kRollCallPatience && !found(awaited).settled) return false;
    settled_ = std::min(settled_, now);
    return true;
  }
  /// Who holds up a call that waits for `awaited`. Nobody where it was not asked.
  HoldUp found(std::span<const int> awaited) const {
    if (!asked()) return {};
    return who_holds_up(
        self_, static_cast<int>(peers_.size()), awaited,
        [&](int r) {
          return peers_[static_cast<std::size_t>(r)].answered == number_ ? Heard::yes : Heard::no;
        },
        [&](int r, int q) {
          const std::vector<std::byte>& bits = peers_[static_cast<std::size_t>(r)].awaits;
          const std::size_t at = static_cast<std::size_t>(q) / 8;
          return at < bits.size() && (bits[at] >> (q % 8) & std::byte{1}) != std::byte{};
        });
  }

 private:
  static constexpr auto kFresh =
      std::chrono::milliseconds(20);  // one roll-call serves all calls due at a time
  struct Peer {
    std::uint32_t answered = 0;
    std::vector<std::byte> awaits;
  };
  bool asked() const noexcept { return number_ != 0 && Clock::now() - began_ < kRollCallStale; }

  const int self_;
  std::vector<Peer> peers_;
  std::uint32_t number_ = 0;
  Clock::time_point began_{}, settled_ = Clock::time_point::max();
};

}  // namespace weft
