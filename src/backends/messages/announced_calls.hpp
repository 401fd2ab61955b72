// Records the collectives that the ranks have announced, and compares them. It is for transports whose ranks
// announce each call before they perform it. Not thread-safe. No function waits.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/last_calls.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/base/error.hpp"

namespace weft {

/// Announced collectives have sequence numbers of their own, because not all calls are announced.
class AnnouncedCalls {
 public:
  AnnouncedCalls(int rank, int size) : rank_(rank), size_(size), peers_(static_cast<std::size_t>(size)) {}

  /// Records a call of this rank; returns its sequence number. The caller must then call compare() for every
  /// rank.
  std::uint64_t announce(const Announcement& call, const OpState& s);
  /// Records a call of rank r. The caller must then call compare(r).
  void arrived(int r, const Announcement& call) { peer(r).ahead.push_back(call); }
  /// Compares the calls that both ranks have made. Returns the mismatch, if there is one.
  std::optional<Failure> compare(int r);
  /// Records that this rank has finished the call.
  void finish(std::uint64_t sequence);

  /// Called when this rank leaves: returns a call that needed no other rank, and that this rank or another
  /// leaving rank has not made. Returns "" if no such call is known.
  std::string left_out(const std::vector<bool>& left) const;

  /// The number of collectives that rank r has announced to this rank.
  std::uint64_t announced_by(int r) const { return peer(r).compared + peer(r).ahead.size(); }
  /// Returns whether rank r has called the same collective.
  bool agrees(int r, std::uint64_t sequence) const { return peer(r).compared > sequence; }
  /// The ranks that have not called this collective.
  std::vector<int> late(std::uint64_t sequence) const;
  /// For an all_to_all_v: the largest block among the ranks that have announced their blocks.
  std::int64_t largest(std::uint64_t sequence) const { return own(sequence).largest; }
  const CallRecord& record(std::uint64_t sequence) const { return own(sequence).record; }

  /// The call that this rank has announced last. Nothing if it has announced none.
  std::optional<LastCall> last(int self) const {
    if (!last_) return std::nullopt;
    LastCall call =
        last_call_of(self, has_current() ? LastCall::State::in_flight : LastCall::State::finished, *last_);
    if (has_current()) call.oldest = own(done_).record.call;
    return call;
  }
  /// The oldest call that this rank has announced and not finished.
  std::uint64_t current() const noexcept { return done_; }
  bool has_current() const noexcept { return done_ < first_own_ + own_.size(); }
  /// The number of this rank's calls that are not yet compared with all ranks, or not finished.
  std::size_t kept() const noexcept { return own_.size(); }

 private:
  struct Own {
    CallRecord record;
    std::vector<std::int64_t> given, expected;  // all_to_all_v: elements to and from each rank
    std::int64_t largest = 0;
  };
  struct Peer {
    std::uint64_t compared = 0;      // the number of the rank's calls that were compared
    std::deque<Announcement> ahead;  // calls that arrived before this rank has made them
  };
  const Own& own(std::uint64_t sequence) const { return own_[sequence - first_own_]; }
  Peer& peer(int r) { return peers_[static_cast<std::size_t>(r)]; }
  const Peer& peer(int r) const { return peers_[static_cast<std::size_t>(r)]; }
  void forget();

  const int rank_, size_;
  std::vector<Peer> peers_;
  std::deque<Own> own_;
  std::optional<CallRecord> last_;
  // the sequence number of the first entry of own_; all calls below done_ are finished here
  std::uint64_t first_own_ = 0, done_ = 0;
};

}  // namespace weft
