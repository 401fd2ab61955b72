// The direct path: every rank reaches the others' memory, so nothing is copied on the way. Two
// synchronisations: the arrival, and everybody's `finished`.
//
// all_reduce: rank r combines slice r of all inputs and stores it to slice r of all outputs. reduce_scatter,
// all_gather and broadcast pull: they write only their own memory.
#include <algorithm>

#include "backends/shm/collectives.hpp"

namespace weft::shm {
namespace {

// Beyond this a result leaves the caches anyway, and stores that go around them save reading the lines first.
constexpr std::int64_t kStreamFrom = std::int64_t{64} << 20;

}  // namespace

Step Collectives::direct(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t element = size_bytes(s.dtype);
  const auto in_of = [&](int r) { return group_.reach(r, arrival(r, s).places.in); };
  const std::int64_t total = (s.op == Op::broadcast ? s.out_count : s.in_count) * element;
  const bool stream = total >= kStreamFrom;
  if (!group_.enter(s.call)) return Step::failed;
  if (group_.in_chunk) group_.in_chunk(s.call);
  bool finished = true;

  switch (s.op) {
    case Op::all_reduce:
    case Op::reduce_scatter: {
      // begin, count: the elements of `in` that this rank combines
      std::int64_t begin = 0, count = 0;
      if (s.op == Op::all_reduce) {
        const std::int64_t line = 64 / element;  // slices meet at cache-line borders of an aligned buffer
        const std::int64_t slice = ((s.in_count + group_.size - 1) / group_.size + line - 1) / line * line;
        begin = std::min(s.in_count, group_.rank * slice);
        count = std::min(s.in_count, begin + slice) - begin;
      } else {
        begin = group_.rank * s.out_count;
        count = s.out_count;
      }
      const std::int64_t step = std::min(count - st.done, static_cast<std::int64_t>(kChunkBytes) / element);
      const std::int64_t at = (begin + st.done) * element;
      std::size_t outs = 0;
      for (int r = 0; r < group_.size; ++r) {
        ins_[static_cast<std::size_t>(r)] = (r == group_.rank ? s.in : in_of(r)) + at;
        if (s.op == Op::all_reduce)
          outs_[outs++] = (r == group_.rank ? s.out : group_.reach(r, arrival(r, s).places.out)) + at;
      }
      if (s.op == Op::reduce_scatter) outs_[outs++] = s.out + st.done * element;
      if (step > 0) reduce(s.dtype, s.reduce, ins_, {outs_.data(), outs}, step, stream);
      st.done += step;
      finished = st.done >= count;
      break;
    }
    case Op::all_gather:
    case Op::broadcast: {
      // done counts bytes over the blocks to copy; each rank begins with its own, so that readers spread
      const std::int64_t block = s.op == Op::broadcast ? total : s.in_count * element;
      const std::int64_t blocks = s.op == Op::broadcast ? 1 : group_.size;
      const std::int64_t which = st.done / block, inside = st.done % block;
      const int from = s.op == Op::broadcast ? s.root : static_cast<int>((group_.rank + which) % group_.size);
      const std::int64_t step = std::min(block - inside, static_cast<std::int64_t>(kChunkBytes));
      std::byte* const to = s.out + (s.op == Op::broadcast ? 0 : from * block) + inside;
      const std::byte* const source = (from == group_.rank ? s.in : in_of(from)) + inside;
      if (to != source) copy_bytes(to, source, step, stream);
      st.done += step;
      finished = st.done >= block * blocks;
      break;
    }
    default: break;
  }
  if (!group_.leave()) return Step::failed;
  if (!finished) return Step::advanced;
  finish(s);
  st.cursor = 0;
  st.phase = Phase::leaving;
  return leave(s) == Step::done ? Step::done : Step::advanced;
}

}  // namespace weft::shm
