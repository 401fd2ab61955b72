// The inline path: the payload came with the arrival, so one synchronisation is all there is.
#include "backends/shm/collectives.hpp"

namespace weft::shm {

Step Collectives::finish_inline(OpState& s) noexcept {
  const auto n = static_cast<std::size_t>(group_.size);
  const std::int64_t block = s.out_count * size_bytes(s.dtype);
  switch (s.op) {
    case Op::all_reduce:
    case Op::reduce_scatter:
      // in: the part of each rank's payload that is combined here
      for (std::size_t r = 0; r < n; ++r) {
        ins_[r] =
            arrival(static_cast<int>(r), s).payload + (s.op == Op::reduce_scatter ? group_.rank * block : 0);
      }
      reduce(s.dtype, s.reduce, ins_, {&s.out, 1}, s.out_count);
      break;
    case Op::all_gather: {
      const std::int64_t bytes = s.in_count * size_bytes(s.dtype);
      for (int r = 0; r < group_.size; ++r) copy_bytes(s.out + r * bytes, arrival(r, s).payload, bytes);
      break;
    }
    case Op::broadcast: copy_bytes(s.out, arrival(s.root, s).payload, block); break;
    default: break;
  }
  finish(s);
  return Step::done;
}

}  // namespace weft::shm
