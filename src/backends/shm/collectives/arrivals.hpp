// How a collective begins and ends on this rank: it publishes its arrival line, reads the others' lines and
// compares what they called, and at the end publishes that it has read them. Only the owner of the group
// uses it.
#pragma once

#include <cstdint>
#include <string>

#include "backends/shm/collectives/call.hpp"
#include "backends/shm/single_copy.hpp"

namespace weft::shm {

class Arrivals {
 public:
  explicit Arrivals(const Group& group) : group_(group) {}

  /// Decides whether the payload travels beside the arrival, and publishes the line if that is possible now.
  void plan(OpState& s) noexcept;
  /// Publishes the line, if it is free, and looks for the others'. Done: all that this rank needs have
  /// arrived and called the same.
  Step step(OpState& s) noexcept;
  bool missing(const OpState& s, int r) const noexcept;

  /// This rank has finished the call: it reads no more of the others' lines, unless they are still to be
  /// compared, and touches no more of their memory.
  void finish(const OpState& s) noexcept;
  /// Compares the calls that were not compared with all ranks yet, up to the last call in which all ranks
  /// have arrived.
  Step catch_up() noexcept;
  /// Is it time to catch up? After roots' calls: when there is nothing else to do (`idle`), and often enough
  /// that half of the ring stays free.
  bool is_behind(bool idle) const noexcept { return finished_ >= compared_ + (idle ? 1 : kRing / 2); }
  /// Leaving (RankBlock::left says so already): compares the calls that are not compared yet with the ranks
  /// that have called them, without waiting. If two ranks leave, one of them sees the other's call. A
  /// mismatch fails the group.
  void compare_the_rest() noexcept;
  /// Leaving: a call that needed nobody, and that a rank which leaves has left out, this one or another.
  /// Empty: none is known. One of the two ranks sees it.
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
  // Inlined, it makes the loop of step() slower: 8 bytes took 0.52 us instead of 0.44 where a cache line
  // takes long.
  [[gnu::noinline]] bool agree(int peer, std::uint64_t call) noexcept;
  [[gnu::cold, gnu::noinline]] void raise_difference(int peer, std::uint64_t call) noexcept;
  bool sends_what_is_expected(const OpState& s, int peer) noexcept;

  const Group& group_;
  std::uint64_t everybody_consumed_ = 0;  // a lower bound
  std::uint64_t published_ = 0;           // calls whose line is written
  std::uint64_t compared_ = 0;            // calls compared with all ranks
  std::uint64_t finished_ = 0;  // calls finished here: ahead of compared_ after broadcast and scatter
  OwnMemory own_;
};

}  // namespace weft::shm
