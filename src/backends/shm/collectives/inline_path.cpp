#include "backends/shm/collectives/inline_path.hpp"

#include <cstddef>

#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"

namespace weft::shm {

Step InlinePath::step(OpState& s) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  const std::size_t before = s.in_blocks ? offsetof(Arrival, both.payload) - offsetof(Arrival, payload) : 0;
  const auto payload = [&](int r) { return arrival(group_, r, s).payload + before; };
  if (s.out_count == 0) {
    // a barrier, or nothing in it is for this rank
  } else if (row(s.op).reduces) {
    auto& ins = operands_.ins;
    // All `in` are divided alike, except with in_blocks.
    const std::int64_t at = in_block(s, group_.rank, group_.size).offset;
    for (int r = 0; r < group_.size; ++r)
      ins[static_cast<std::size_t>(r)] =
          payload(r) + (s.in_blocks ? exposed_block(group_, s, r).offset : at) * element;
    if (is_scan(s.op))
      scan_of(group_.rank, s.dtype, s.reduce, s.op == Op::exscan, ins, s.out, s.out_count);
    else
      reduce(s.dtype, s.reduce, ins, {&s.out, 1}, s.out_count);
  } else {
    for (int from = 0; from < group_.size; ++from) {
      if (!gets(s, group_.rank, from)) continue;
      const Block to = out_block(s, from, group_.size);
      copy_bytes(s.out + to.offset * element, payload(from) + exposed_block(group_, s, from).offset * element,
                 to.count * element);
    }
  }
  arrivals_.finish(s);
  return Step::done;
}

}  // namespace weft::shm
