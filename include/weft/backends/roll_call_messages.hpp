// A roll-call by control messages, for transports whose ranks share no memory. A ping carries a number. The
// pong carries the same number, its sender's last call, and the ranks for which the sender waits. See
// hold_up.hpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "weft/backends/hold_up.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/last_call.hpp"

namespace weft {

/// The state of one rank's roll-call. The transport sends the messages. Not thread-safe; no function waits.
class RollCallMessages {
 public:
  RollCallMessages(int self, int size) : self_(self), peers_(static_cast<std::size_t>(size)) {}
  /// Begins a roll-call for a call whose deadline has passed, and returns the number of the ping that this
  /// rank must now send to every other rank. Returns 0 if an open or recent roll-call serves this call.
  std::uint32_t begin(Op op, std::uint64_t call) {
    const auto now = Clock::now();
    if (!times_.due(op, call, now)) return 0;
    times_.begin(op, call, now);
    return ++number_;
  }
  /// Returns the contents of a pong except its number: the last call of the answering rank, and the ranks
  /// below `size` for which it waits.
  static std::vector<std::byte> encode(std::span<const int> awaited, int size, const LastCall& last = {}) {
    std::vector<std::byte> bytes(kLastCallBytes + static_cast<std::size_t>(size + 7) / 8);
    std::memcpy(bytes.data(), &last, kLastCallBytes);
    std::byte* const bits = bytes.data() + kLastCallBytes;
    for (const int r : awaited)
      if (r >= 0 && r < size) bits[static_cast<std::size_t>(r) / 8] |= std::byte{1} << (r % 8);
    return bytes;
  }
  /// The bytes of a pong for the last call. The bytes for the ranks follow.
  static constexpr std::size_t kLastCallBytes = sizeof(LastCall);
  /// Takes in a pong of rank r. If the pong is too short, only its number is used. If its last call names an
  /// operation that does not exist, the last call is ignored.
  void answered(int r, std::uint32_t number, std::span<const std::byte> pong) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    peer.answered = number;
    peer.awaits.clear();
    peer.last = {};
    if (pong.size() < kLastCallBytes) return;
    std::memcpy(&peer.last, pong.data(), kLastCallBytes);
    if (!makes_sense(peer.last)) peer.last = {};
    peer.awaits.assign(pong.begin() + kLastCallBytes, pong.end());
  }
  /// Takes in a report of rank r about its current call, which rank r sent without being asked.
  void called(int r, const LastCall& call) { peers_[static_cast<std::size_t>(r)].last = call; }
  /// The last call of each rank, as that rank reported it. For this rank it is `own`. For another rank it is
  /// the report in its answer to the last ping, or an earlier report. `silent`: the state to return for a
  /// rank that has never reported a call.
  std::vector<LastCall> last_calls(LastCall own, LastCall::State silent) const {
    std::vector<LastCall> all;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      const Peer& peer = peers_[static_cast<std::size_t>(r)];
      LastCall c = r == self_ ? own : peer.last;
      c.rank = r;
      c.answered = r == self_ || (number_ != 0 && peer.answered == number_);
      if (!c.answered) {  // the rank may have continued since then
        c.message = {};
        c.oldest = kNoCall;
        const bool nothing = c.state == LastCall::State::unknown || c.state == LastCall::State::none;
        c.state = nothing ? silent : LastCall::State::called;
      }
      all.push_back(c);
    }
    return all;
  }
  /// Whether further answers would change nothing, or will not arrive any more. `own`: see found().
  bool settled(std::span<const int> awaited, std::span<const int> own = {}) {
    const auto now = Clock::now();
    if (times_.patient(now) && !found(awaited, own).settled) return false;
    times_.end(now);
    return true;
  }
  /// The ranks that hold up a call that waits for the ranks `awaited`. None if no rank was asked. `own`: the
  /// ranks for which this rank waits in any call.
  HoldUp found(std::span<const int> awaited, std::span<const int> own = {}) const {
    if (!times_.counts(Clock::now())) return {};
    return who_holds_up(
        self_, static_cast<int>(peers_.size()), awaited,
        [&](int r) {
          return peers_[static_cast<std::size_t>(r)].answered == number_ ? Answer::yes : Answer::no;
        },
        [&](int r, int q) {
          if (r == self_) return std::find(own.begin(), own.end(), q) != own.end();
          const std::vector<std::byte>& bits = peers_[static_cast<std::size_t>(r)].awaits;
          const std::size_t at = static_cast<std::size_t>(q) / 8;
          return at < bits.size() && (bits[at] >> (q % 8) & std::byte{1}) != std::byte{};
        });
  }

 private:
  struct Peer {
    std::uint32_t answered = 0;
    std::vector<std::byte> awaits;
    LastCall last{};
  };
  static_assert(std::is_trivially_copyable_v<LastCall>);
  static bool makes_sense(const LastCall& c) noexcept {
    const auto is_dtype = [](DType t) { return static_cast<int>(t) < kDTypeCount; };
    const LastCall::Message& m = c.message;
    const bool calls = c.state == LastCall::State::called || c.state == LastCall::State::in_flight ||
                       c.state == LastCall::State::finished;
    if (!calls && c.state != LastCall::State::none) return false;
    if (calls && (c.op == Op::none || static_cast<int>(c.op) >= kOpCount)) return false;
    if (m.op != Op::none && (static_cast<int>(m.op) >= kOpCount || row(m.op).collective)) return false;
    return is_dtype(c.dtype) && is_dtype(m.dtype) && static_cast<int>(c.reduce) < kReduceKindCount;
  }

  const int self_;
  std::vector<Peer> peers_;
  std::uint32_t number_ = 0;
  RollCallTimes times_;
};

}  // namespace weft
