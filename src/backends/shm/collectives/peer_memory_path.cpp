#include "backends/shm/collectives/peer_memory_path.hpp"

namespace weft::shm {

BufferBlock PeerMemoryPath::own_part(const OpState& s) const noexcept {
  if (!is_sliced(s)) return {0, s.out_count};
  // Slices meet at the borders of cache lines, if the buffer is aligned to one.
  const std::int64_t line = static_cast<std::int64_t>(kLine) / size_bytes(s.dtype);
  const std::int64_t slice = ((s.in_count + group_.size - 1) / group_.size + line - 1) / line * line;
  const std::int64_t begin = std::min(s.in_count, group_.rank * slice);
  return {begin, std::min(s.in_count, begin + slice) - begin};
}

// Waits until the ranks that access this rank's memory have finished.
Step PeerMemoryPath::wait_for_peers(OpState& s) const noexcept {
  CallState& st = state(s);
  for (; st.cursor < group_.size; ++st.cursor)
    if (missing(s, st.cursor)) return Step::pending;
  return Step::done;
}

}  // namespace weft::shm
