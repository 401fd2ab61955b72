// The path of single copies, for foreign memory that the kernel may copy between processes (see
// WEFT_SINGLE_COPY).
//
// all_reduce and reduce push, if the setting is `push`: a rank reads a piece of its part of each peer's `in`
// into a buffer that stays in the cache, combines the pieces, and writes the result to its own `out` and from
// there to the others' `out`. In reduce_scatter it only keeps the result. All other operations pull. The
// kernel copies from the peer's `in` to this rank's `out`. Shared memory, which this rank can access itself,
// is read and written in place, as on the direct path.
#pragma once

#include <cstddef>
#include <memory>

#include "backends/shm/collectives/peer_memory_path.hpp"
#include "backends/shm/single_copy.hpp"

namespace weft::shm {

class SinglePath : private PeerMemoryPath {
 public:
  SinglePath(const Group& group, Arrivals& arrivals, Operands& operands)
      : PeerMemoryPath(group, arrivals, operands), peers_(group) {}
  void plan(OpState& s) const noexcept { begin(s, Phase::single); }
  Step step(OpState& s) noexcept;
  using PeerMemoryPath::missing;

 private:
  Step push_piece(OpState& s) noexcept;
  bool gather_inputs(const OpState& s, std::int64_t at, std::int64_t count) noexcept;
  bool place_sums(const OpState& s, std::int64_t at, std::int64_t count, std::size_t& outs) noexcept;
  bool place_prefixes(const OpState& s, std::int64_t at, std::int64_t count) noexcept;
  bool write_to_peers(const OpState& s, std::int64_t at, std::int64_t count) noexcept;
  bool make_pieces(const OpState& s) noexcept;
  std::byte* piece_of(int r) const noexcept;

  PeerMemory peers_;
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  /// A piece for each rank, with bytes that the kernel has read or will write; kChunkBytes in all. Made at
  /// the first push_piece().
  std::unique_ptr<Line[]> pieces_;
};

}  // namespace weft::shm
