// The direct path: every rank reaches the other ranks' memory, so no intermediate copy is needed.
//
// all_reduce and reduce: rank r combines slice r of all inputs, and stores the result in slice r of all
// outputs, or of the root's output. All other operations pull. A rank then writes only its own memory.
#pragma once

#include "backends/shm/collectives/peer_memory_path.hpp"

namespace weft::shm {

class DirectPath : private PeerMemoryPath {
 public:
  DirectPath(const Group& group, Arrivals& arrivals, Operands& operands)
      : PeerMemoryPath(group, arrivals, operands) {}
  void plan(OpState& s) const noexcept { begin(s, Phase::direct); }
  Step step(OpState& s) noexcept;
  using PeerMemoryPath::missing;

 private:
  Step combine_chunk(OpState& s) noexcept;
};

}  // namespace weft::shm
