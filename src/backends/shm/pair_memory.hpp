// Memory of pairs of ranks, for their messages and their exchanges. The rank that sends makes it at its first
// use, from its process's arena, which the other one has mapped anyway: so it costs no descriptor and no
// mapping, and only neighbours cost memory, each page of it when it is first touched. If all ranks are
// threads of one process, it is plain memory of that process. If a rank has no such memory, or cannot map
// that of others, rank 0 has made one region with memory for the messages of all pairs, and exchanges go by
// messages. The owner of the group uses it.
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
  /// Memory that the other ranks of the pairs may still use stays until they have left the group or died.
  /// This is checked when another group is made or such memory is, and when the Context ends.
  ~PairMemory();
  PairMemory(const PairMemory&) = delete;
  PairMemory& operator=(const PairMemory&) = delete;

  /// Whether all ranks can make and reach such memory; alike on all of them. If not, it is for Pair alone.
  bool usable() const noexcept { return group_.pairs_usable; }
  /// Memory for this rank and rank `to`, 64-byte aligned, of any content. Throws system if there is none.
  std::byte* make(int to, std::size_t bytes);
  /// Where that lies, for rank `to` to read: after it is stored (seq_cst), it wakes that rank.
  std::uint64_t place(const std::byte* memory, std::size_t bytes) const noexcept;
  /// Whether rank `to` has mapped the segment of that place.
  bool is_mapped(int to, std::uint64_t place) const noexcept;
  /// The memory that rank `from` has made for this one. Null: it is not mapped yet; look again. Throws
  /// system if it cannot be mapped, and corrupt if no memory of that rank can be there.
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
