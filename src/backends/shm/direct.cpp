// The direct path: every rank reaches the others' memory, so nothing is copied on the way. Two
// synchronisations: the arrival, and the `finished` of those who touch this rank's memory.
//
// all_reduce and reduce: rank r combines slice r of all inputs and stores it to slice r of all outputs, or of
// the root's. Everything else pulls: ranks write only their own memory.
#include <algorithm>

#include "backends/reduce.hpp"
#include "backends/shm/collectives.hpp"

namespace weft::shm {
Step Collectives::direct(OpState& s) noexcept {
  State& st = state(s);
  if (!group_.enter(s.call)) return Step::failed;
  if (group_.in_chunk) group_.in_chunk(s.call);
  const bool finished = row(s.op).reduces ? combine(s) : move(s);
  if (!group_.leave()) return Step::failed;
  if (!finished) return Step::advanced;
  finish(s);
  st.cursor = 0;
  st.phase = Phase::leaving;
  return leave(s) == Step::done ? Step::done : Step::advanced;
}

Block Collectives::own_part(const OpState& s) const noexcept {
  if (!sliced(s)) return {0, s.out_count};
  const std::int64_t line =
      64 / size_bytes(s.dtype);  // slices meet at cache-line borders of an aligned buffer
  const std::int64_t slice = ((s.in_count + group_.size - 1) / group_.size + line - 1) / line * line;
  const std::int64_t begin = std::min(s.in_count, group_.rank * slice);
  return {begin, std::min(s.in_count, begin + slice) - begin};
}

// A chunk of this rank's part of all inputs. True: it was the last.
bool Collectives::combine(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t element = size_bytes(s.dtype);
  const auto [begin, count] = own_part(s);
  const std::int64_t step = std::min(count - st.done, static_cast<std::int64_t>(kChunkBytes) / element);
  if (step == 0) return true;
  const std::int64_t at = begin + st.done;
  std::size_t outs = 0;
  for (int r = 0; r < group_.size; ++r) {
    const Arrival& a = arrival(r, s);
    const std::byte* const in = r == group_.rank ? s.in : group_.reach(r, a.places.in);
    ins_[static_cast<std::size_t>(r)] = in + (lent(s, r).offset + at) * element;
    if (r == group_.rank ? s.out_count > 0 : sliced(s) && a.places.out.kind != Buffer::none)
      outs_[outs++] = (r == group_.rank ? s.out : group_.reach(r, a.places.out)) + at * element;
  }
  reduce(s.dtype, s.reduce, ins_, {outs_.data(), outs}, step, streams(s));
  st.done += step;
  return st.done >= count;
}

// A chunk of the blocks for this rank. Each rank begins with its own, so that readers spread. True: it was
// the last.
bool Collectives::move(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t element = size_bytes(s.dtype);
  std::int64_t room = kChunkBytes;
  for (; st.cursor < group_.size; ++st.cursor, st.done = 0) {
    const int from = (group_.rank + st.cursor) % group_.size;
    if (!gets(s, group_.rank, from)) continue;
    const Block to = out_block(s, from, group_.size);
    const std::int64_t bytes = to.count * element;
    if (bytes == 0) continue;
    const std::byte* const source =
        (from == group_.rank ? s.in : group_.reach(from, arrival(from, s).places.in)) +
        lent(s, from).offset * element;
    std::byte* const out = s.out + to.offset * element;
    if (out == source) continue;
    const std::int64_t step = std::min(bytes - st.done, room);
    copy_bytes(out + st.done, source + st.done, step, streams(s));
    st.done += step;
    room -= step;
    if (st.done < bytes) return false;
  }
  return true;
}

}  // namespace weft::shm
