#include "backends/shm/collectives/direct_path.hpp"

#include <algorithm>

#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"

namespace weft::shm {

Step DirectPath::step(OpState& s) noexcept {
  return chunk_in_peer_memory(s, 0, [&] {
    if (row(s.op).reduces) return combine_chunk(s);
    const auto copy = [&](int from, const Buffer& place, std::int64_t skip, std::byte* out,
                          std::int64_t bytes) {
      const std::byte* const source = (from == group_.rank ? s.in : group_.reach(from, place)) + skip;
      if (out != source) copy_bytes(out, source, bytes, streams(s));
      return true;
    };
    return pull(s, static_cast<std::int64_t>(kChunkBytes), copy);
  });
}

// Combines a chunk of this rank's part of all inputs. Done: it was the last.
Step DirectPath::combine_chunk(OpState& s) noexcept {
  CallState& st = state(s);
  const std::int64_t element = size_bytes(s.dtype);
  const auto [begin, count] = own_part(s);
  const bool scans = is_scan(s.op);
  const std::int64_t most = scans ? scan_bytes(group_.size) : static_cast<std::int64_t>(kChunkBytes);
  const std::int64_t step = std::min(count - st.done, most / element);
  if (step == 0) return Step::done;
  const std::int64_t at = begin + st.done;
  std::size_t outs = 0;
  for (int r = 0; r < group_.size; ++r) {
    const Arrival& a = arrival(group_, r, s);
    const std::byte* const in = r == group_.rank ? s.in : group_.reach(r, a.places.in);
    operands_.ins[static_cast<std::size_t>(r)] = in + (exposed_block(group_, s, r).offset + at) * element;
    if (r == group_.rank ? s.out_count > 0 : is_sliced(s) && a.places.out.kind != Buffer::none)
      operands_.outs[outs++] = (r == group_.rank ? s.out : group_.reach(r, a.places.out)) + at * element;
  }
  if (scans)  // every rank has an `out`
    scan(s.dtype, s.reduce, s.op == Op::exscan, operands_.ins, operands_.outs, step);
  else
    reduce(s.dtype, s.reduce, operands_.ins, {operands_.outs.data(), outs}, step, streams(s));
  st.done += step;
  return st.done >= count ? Step::done : Step::advanced;
}

}  // namespace weft::shm
