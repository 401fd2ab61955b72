// How a collective begins and ends on this rank. The rank publishes its arrival line, reads the lines of the
// other ranks, compares the calls, and at the end publishes that it has read the lines. Only the owner of the
// group uses it.
#pragma once

#include <cstdint>
#include <string>

#include "backends/shm/collectives/call.hpp"
#include "backends/shm/single_copy.hpp"

namespace weft::shm {

class Arrivals {
 public:
  explicit Arrivals(const Group& group) : group_(group) {}

  /// Decides whether the payload travels with the arrival, and publishes the line if that is possible now.
  void plan(OpState& s) noexcept;
  /// Publishes the line if it is free, and reads the lines of the other ranks. Returns `done` if all ranks
  /// that this rank needs have arrived and have made the same call.
  Step step(OpState& s) noexcept;
  bool missing(const OpState& s, int r) const noexcept;

  /// Publishes that this rank has finished the call. It does not access memory of other ranks for this call
  /// any more, and reads their lines only if it must still compare them.
  void finish(const OpState& s) noexcept;
  /// Compares the calls that were not compared with all ranks yet, up to the last call in which all ranks
  /// have arrived.
  Step catch_up() noexcept;
  /// Returns whether it is time to compare calls from a root. It is time if there is nothing else to do
  /// (`idle`), and often enough that half of the ring stays free.
  bool is_behind(bool idle) const noexcept { return finished_ >= compared_ + (idle ? 1 : kRing / 2); }
  /// Called when this rank leaves, after RankBlock::left is set. Compares the calls that are not compared yet
  /// with those ranks that have made them, without waiting. If two ranks leave, one of them sees the other's
  /// call. A mismatch fails the group.
  void compare_the_rest() noexcept;
  /// Called when this rank leaves. Returns a call that needed no other rank, and that this rank or another
  /// leaving rank has not made. "" if no such call is known. One of the two ranks finds it.
  std::string left_out() const;
  bool has_arrived(int r, const OpState& s) const noexcept {
    return arrival(group_, r, s).sequence.load(std::memory_order_seq_cst) == s.call + 1;
  }

 private:
  bool publish(OpState& s) noexcept;
  Buffer expose(const OpState& s, std::int64_t count, const std::byte* data, std::int64_t elements) noexcept;
  bool has_free_line(const OpState& s) noexcept;
  bool may_expose(const OpState& s) const noexcept;
  bool must_see(const OpState& s, int peer) const noexcept;
  // If the compiler inlines it, the loop of step() is slower: 8 bytes took 0.52 us instead of 0.44 on a
  // machine on which a cache line takes long.
  [[gnu::noinline]] bool agree(int peer, std::uint64_t call) noexcept;
  [[gnu::cold, gnu::noinline]] void raise_difference(int peer, std::uint64_t call) noexcept;
  bool sends_what_is_expected(const OpState& s, int peer) noexcept;

  const Group& group_;
  std::uint64_t everybody_consumed_ = 0;  // a lower bound of what all ranks have consumed
  std::uint64_t published_ = 0;           // the number of calls whose line is written
  std::uint64_t compared_ = 0;            // the number of calls that are compared with all ranks
  // the number of calls finished here; after broadcast and scatter it is larger than compared_
  std::uint64_t finished_ = 0;
  OwnMemory own_;
};

}  // namespace weft::shm
