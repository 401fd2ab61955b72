// The steps that the direct path and the path of single copies share. A rank works in its peers' memory, one
// chunk at a time. When its part is done, it waits until the peers that work in its own memory have finished,
// too. So there are two synchronisations: the arrival, and `finished`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/shm/collectives/arrivals.hpp"
#include "backends/shm/collectives/call.hpp"

namespace weft::shm {

class PeerMemoryPath {
 public:
  bool missing(const OpState& s, int r) const noexcept {
    return state(s).finished && r != group_.rank && gets(s, r, group_.rank) &&
           group_.of(r).finished.load(std::memory_order_seq_cst) < s.call + 1;
  }

 protected:
  PeerMemoryPath(const Group& group, Arrivals& arrivals, Operands& operands)
      : group_(group), arrivals_(arrivals), operands_(operands) {}

  void begin(OpState& s, Phase phase) const noexcept {
    CallState& st = state(s);
    st.phase = phase;
    st.cursor = 0;
    st.done = 0;
    st.finished = false;
  }

  /// Runs `chunk` inside the peers' memory. If `chunk` returns that this rank's part is done, waits for the
  /// peers.
  template <class Chunk>
  Step chunk_in_peer_memory(OpState& s, std::uint64_t how, Chunk&& chunk) noexcept {
    CallState& st = state(s);
    if (!st.finished) {
      if (!group_.enter(s.call, how)) return Step::failed;
      if (group_.in_chunk) group_.in_chunk(s.call);
      const Step step = chunk();
      if (!group_.leave()) return Step::failed;
      if (step != Step::done) return step;
      arrivals_.finish(s);
      st.cursor = 0;
      st.finished = true;
    }
    return wait_for_peers(s);
  }

  /// Returns the address at which this rank reaches the bytes of a place of another rank r, from `skip` on.
  /// Returns null, and the group has failed, if there is none.
  std::byte* reach(const OpState& s, int r, const Buffer& place, std::int64_t skip,
                   std::int64_t bytes) const noexcept {
    std::byte* const found = group_.reach(r, place, skip, bytes);
    if (found == nullptr) group_.say_damaged(s, r, place, skip, bytes);
    return found;
  }

  /// Returns the part that this rank combines, in elements: an offset from the beginning of each rank's
  /// block, and a count.
  BufferBlock own_part(const OpState& s) const noexcept;

  /// Copies the blocks for this rank, at most `room` bytes. Each rank begins with its own block, so that
  /// different ranks read different memory. `copy(from, place, skip, out, bytes)` copies from rank `from`'s
  /// `in`, and returns false if that fails. Returns `done` if these were the last bytes.
  template <class Copy>
  Step pull(OpState& s, std::int64_t room, Copy&& copy) noexcept {
    CallState& st = state(s);
    const std::int64_t element = size_bytes(s.dtype);
    for (; st.cursor < group_.size; ++st.cursor, st.done = 0) {
      const int from = (group_.rank + st.cursor) % group_.size;
      if (!gets(s, group_.rank, from)) continue;
      const BufferBlock to = out_block(s, from, group_.size);
      const std::int64_t bytes = to.count * element;
      if (bytes == 0) continue;
      const std::int64_t before = bytes_before(exposed_block(group_, s, from), 0, element),
                         skip = before + st.done;
      const std::int64_t step = std::min(bytes - st.done, room);
      const Buffer place = place_in(arrival(group_, from, s).places.in);
      if (before < 0) {
        group_.say_damaged(s, from, place, before, step);
        return Step::failed;
      }
      std::byte* const out = s.out + to.offset * element + st.done;
      if (from == group_.rank && s.in + skip == out) continue;  // in place
      if (!copy(from, place, skip, out, step)) return Step::failed;
      st.done += step;
      room -= step;
      if (st.done < bytes || room == 0) return Step::advanced;
    }
    return Step::done;
  }

  const Group& group_;
  Arrivals& arrivals_;
  Operands& operands_;

 private:
  Step wait_for_peers(OpState& s) const noexcept;
};

}  // namespace weft::shm
