// The staged path, for memory that only its owner can reach: data goes through buffers of the group, in
// rounds.
//
// A round moves one part of each block. If `in` has a block per rank, or each rank owns a slice of the sum, a
// rank stages the part for each peer into a separate slot. Otherwise all peers read the same slot. A moving
// operation is over when the peers have copied their slots. In a reduction the owner of a slice combines the
// slots with its own part. In all_reduce and reduce it then writes the sum back into one of the slots, and
// the ranks that need the sums copy them out. In a scan it writes each rank's prefix over that rank's slot.
// So an all_reduce of two ranks copies half of the message in and half of it out. Each rank has three
// counters, which only grow: the numbers of rounds that it has staged, reduced and copied. At most kRounds
// rounds are in flight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/shm/collectives/arrivals.hpp"
#include "backends/shm/collectives/call.hpp"

namespace weft::shm {

class StagedPath {
 public:
  StagedPath(const Group& group, Arrivals& arrivals, Operands& operands)
      : group_(group), arrivals_(arrivals), operands_(operands) {}
  /// Returns `failed` if the blocks that a rank has published are damaged.
  Step plan(OpState& s) noexcept;
  Step step(OpState& s) noexcept;
  bool missing(const OpState& s, int r) const noexcept {
    return delays_staging(s, r) || delays_reducing(s, r) || delays_copying(s, r);
  }

 private:
  bool stage_round(OpState& s) noexcept;
  bool reduce_round(OpState& s) noexcept;
  void scan_round(const OpState& s, BufferBlock own, std::uint64_t round) noexcept;
  bool copy_round(OpState& s) noexcept;
  bool delays_staging(const OpState& s, int r) const noexcept;
  bool delays_reducing(const OpState& s, int r) const noexcept;
  bool delays_copying(const OpState& s, int r) const noexcept;
  bool gives(const OpState& s) const noexcept;
  bool takes(const OpState& s) const noexcept;
  std::int64_t longest_block(const OpState& s) const noexcept;
  BufferBlock piece(const OpState& s, BufferBlock block, int owner, std::uint64_t round) const noexcept;
  std::byte* slot(const OpState& s, int from, int to, std::uint64_t round) const noexcept;
  std::byte* sum_slot(const OpState& s, int owner, std::uint64_t round) const noexcept;

  const Group& group_;
  Arrivals& arrivals_;
  Operands& operands_;
  std::uint64_t rounds_ = 0;  // the number of staging rounds since the group was made
};

}  // namespace weft::shm
