// Memory of pairs of ranks, for their messages and their exchanges. The sending rank makes it at its first
// use, in its process's arena, which the other rank has mapped anyway. So it costs no descriptor and no
// mapping. It takes memory only for neighbours, a page at a time. If all ranks are threads of one process, it
// is plain memory of that process. If a rank has no such memory, or cannot map the memory of other ranks,
// rank 0 makes one region with memory for the messages of all pairs. Exchanges then consist of messages. Only
// the owner of the group uses it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/shm/group.hpp"

namespace weft::shm {

class PairMemory {
 public:
  explicit PairMemory(const Group& group);
  /// Memory that the other ranks of the pairs may still use is kept until they have left the group or died.
  /// This is checked when another group or more such memory is made, and when the Context ends.
  ~PairMemory();
  PairMemory(const PairMemory&) = delete;
  PairMemory& operator=(const PairMemory&) = delete;

  /// Whether all ranks can make and access such memory. It is equal on all ranks. If not, only Pairs have
  /// memory.
  bool usable() const noexcept { return group_.pairs_usable; }
  /// Makes memory for this rank and rank `to`, 64-byte aligned and uninitialised. Throws system if there is
  /// none.
  std::byte* make(int to, std::size_t bytes);
  /// Returns the place of this memory, in the form for rank `to`. The caller must store it (seq_cst), and
  /// then wake that rank.
  std::uint64_t place(const std::byte* memory, std::size_t bytes) const noexcept;
  /// Whether rank `to` has mapped the segment of that place.
  bool is_mapped(int to, std::uint64_t place) const noexcept;
  /// Returns the memory that rank `from` has made for this rank. Returns null if it is not mapped yet. Call
  /// it again later. Throws system if it cannot be mapped, and corrupt if that rank can have no memory at
  /// this place.
  std::byte* find(int from, std::uint64_t place, std::size_t bytes) const;

 private:
  struct Block {
    std::byte* memory;
    std::size_t bytes;
    int to;
  };
  class Kept;
  std::byte* of_all_pairs(int from, int to) const noexcept;
  const Group& group_;
  std::vector<Block> blocks_;
};

}  // namespace weft::shm
