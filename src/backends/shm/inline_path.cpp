// The inline path: the payload came with the arrival, so one synchronisation is all there is.
#include <cstddef>

#include "backends/shm/collectives.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {

Step Collectives::finish_inline(OpState& s) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  const std::size_t before = s.in_blocks ? offsetof(Arrival, both.payload) - offsetof(Arrival, payload) : 0;
  const auto payload = [&](int r) { return arrival(r, s).payload + before; };
  if (s.out_count == 0) {
    // a barrier, or nothing is for this rank
  } else if (row(s.op).reduces) {
    // The same in all `in` that are divided alike.
    const std::int64_t at = in_block(s, group_.rank, group_.size).offset;
    for (int r = 0; r < group_.size; ++r)
      ins_[static_cast<std::size_t>(r)] =
          payload(r) + (s.in_blocks ? exposed_block(s, r).offset : at) * element;
    reduce(s.dtype, s.reduce, ins_, {&s.out, 1}, s.out_count);
  } else {
    for (int from = 0; from < group_.size; ++from) {
      if (!gets(s, group_.rank, from)) continue;
      const Block to = out_block(s, from, group_.size);
      copy_bytes(s.out + to.offset * element, payload(from) + exposed_block(s, from).offset * element,
                 to.count * element);
    }
  }
  finish(s);
  return Step::done;
}

}  // namespace weft::shm
