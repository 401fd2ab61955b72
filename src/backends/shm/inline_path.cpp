// The inline path: the payload came with the arrival, so one synchronisation is all there is.
#include "backends/reduce.hpp"
#include "backends/shm/collectives.hpp"

namespace weft::shm {

Step Collectives::finish_inline(OpState& s) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  const auto payload = [&](int r) {
    const Arrival& a = arrival(r, s);
    return s.in_blocks ? a.both.payload : a.payload;
  };
  if (s.out_count == 0) {
    // a barrier, or nothing is for this rank
  } else if (row(s.op).reduces) {
    for (int r = 0; r < group_.size; ++r)
      ins_[static_cast<std::size_t>(r)] = payload(r) + lent(s, r).offset * element;
    reduce(s.dtype, s.reduce, ins_, {&s.out, 1}, s.out_count);
  } else {
    for (int from = 0; from < group_.size; ++from) {
      if (!gets(s, group_.rank, from)) continue;
      const Block to = out_block(s, from, group_.size);
      copy_bytes(s.out + to.offset * element, payload(from) + lent(s, from).offset * element,
                 to.count * element);
    }
  }
  finish(s);
  return Step::done;
}

}  // namespace weft::shm
