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
      const std::byte* const source = from == group_.rank ? s.in + skip : reach(s, from, place, skip, bytes);
      if (source == nullptr) return false;
      if (out != source) copy_bytes(out, source, bytes, streams(s));
      return true;
    };
    return pull(s, static_cast<std::int64_t>(kChunkBytes), copy);
  });
}

// Combines a chunk of this rank's part of all inputs. Returns `done` if it was the last chunk.
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
    const std::int64_t skip = bytes_before(exposed_block(group_, s, r), at, element);
    const std::byte*& in = operands_.ins[static_cast<std::size_t>(r)];
    if (r == group_.rank) {
      in = s.in + skip;
      if (s.out_count > 0) operands_.outs[outs++] = s.out + at * element;
      continue;
    }
    const Arrival& a = arrival(group_, r, s);
    in = reach(s, r, place_in(a.places.in), skip, step * element);
    if (in == nullptr) return Step::failed;
    if (!is_sliced(s)) continue;
    const Buffer place = place_in(a.places.out);
    if (place.kind == Buffer::none && !scans) continue;
    std::byte* const out = reach(s, r, place, at * element, step * element);
    if (out == nullptr) return Step::failed;
    operands_.outs[outs++] = out;
  }
  if (scans)  // every rank has an `out`
    scan(s.dtype, s.reduce, s.op == Op::exscan, operands_.ins, operands_.outs, step);
  else
    reduce(s.dtype, s.reduce, operands_.ins, {operands_.outs.data(), outs}, step, streams(s));
  st.done += step;
  return st.done >= count ? Step::done : Step::advanced;
}

}  // namespace weft::shm
