// The direct path: every rank reaches the others' memory, so nothing is copied on the way. Two
// synchronisations: the arrival, and the `finished` of those who touch this rank's memory.
//
// all_reduce and reduce: rank r combines slice r of all inputs and stores it to slice r of all outputs, or of
// the root's. Everything else pulls: ranks write only their own memory.
#include <algorithm>

#include "backends/shm/collectives.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {

// A step inside peers' memory, for this path and that of single copies.
Step Collectives::touch(OpState& s) noexcept {
  State& st = state(s);
  const bool reduces = row(s.op).reduces, by_kernel = st.phase == Phase::single;
  if (!group_.enter(s.call, by_kernel && sliced(s) ? kByKernel : 0)) return Step::failed;
  if (group_.in_chunk) group_.in_chunk(s.call);
  const Step step = !reduces ? pull(s) : by_kernel ? push(s) : combine(s);
  if (!group_.leave()) return Step::failed;
  if (step != Step::done) return step;
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

// A chunk of this rank's part of all inputs. Done: it was the last.
Step Collectives::combine(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t element = size_bytes(s.dtype);
  const auto [begin, count] = own_part(s);
  const std::int64_t step = std::min(count - st.done, static_cast<std::int64_t>(kChunkBytes) / element);
  if (step == 0) return Step::done;
  const std::int64_t at = begin + st.done;
  std::size_t outs = 0;
  for (int r = 0; r < group_.size; ++r) {
    const Arrival& a = arrival(r, s);
    const std::byte* const in = r == group_.rank ? s.in : group_.reach(r, a.places.in);
    ins_[static_cast<std::size_t>(r)] = in + (exposed_block(s, r).offset + at) * element;
    if (r == group_.rank ? s.out_count > 0 : sliced(s) && a.places.out.kind != Buffer::none)
      outs_[outs++] = (r == group_.rank ? s.out : group_.reach(r, a.places.out)) + at * element;
  }
  reduce(s.dtype, s.reduce, ins_, {outs_.data(), outs}, step, streams(s));
  st.done += step;
  return st.done >= count ? Step::done : Step::advanced;
}

// A chunk of the blocks for this rank. Each rank begins with its own, so that readers spread. Done: it was
// the last.
Step Collectives::pull(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t element = size_bytes(s.dtype);
  std::int64_t room = st.phase == Phase::single ? peers_.most() : static_cast<std::int64_t>(kChunkBytes);
  for (; st.cursor < group_.size; ++st.cursor, st.done = 0) {
    const int from = (group_.rank + st.cursor) % group_.size;
    if (!gets(s, group_.rank, from)) continue;
    const Block to = out_block(s, from, group_.size);
    const std::int64_t bytes = to.count * element, skip = exposed_block(s, from).offset * element + st.done;
    if (bytes == 0) continue;
    const std::int64_t step = std::min(bytes - st.done, room);
    std::byte* const out = s.out + to.offset * element + st.done;
    const Buffer& place = arrival(from, s).places.in;
    if (from != group_.rank && group_.by_kernel(from, place)) {
      if (!peers_.read(s, from, place.offset + static_cast<std::uint64_t>(skip), out, step))
        return Step::failed;
    } else {
      const std::byte* const source = (from == group_.rank ? s.in : group_.reach(from, place)) + skip;
      if (out == source) continue;
      copy_bytes(out, source, step, streams(s));
    }
    st.done += step;
    room -= step;
    if (st.done < bytes || room == 0) return Step::advanced;
  }
  return Step::done;
}

}  // namespace weft::shm
