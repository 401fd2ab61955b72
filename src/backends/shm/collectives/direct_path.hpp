// The direct path: every rank reaches the others' memory, so nothing is copied on the way.
//
// all_reduce and reduce: rank r combines slice r of all inputs and stores it to slice r of all outputs, or of
// the root's. All other operations pull: a rank writes its own memory only.
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
