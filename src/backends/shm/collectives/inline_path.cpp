#include "backends/shm/collectives/inline_path.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"

namespace weft::shm {

// A separate function, so that a call without damage needs no room on the stack for these texts.
void InlinePath::raise_damaged(const OpState& s, int r, std::int64_t offset,
                               std::int64_t count) const noexcept {
  raise(group_,
        damaged(r, fmt::format("the offset of its block for rank {}", group_.rank), offset,
                fmt::format("that of {} elements among {} bytes", count, sizeof(Arrival::both.payload)), s.op,
                s.call));
}

Step InlinePath::step(OpState& s) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  const std::size_t before = s.in_blocks ? offsetof(Arrival, both.payload) - offsetof(Arrival, payload) : 0;
  const auto payload = [&](int r) { return arrival(group_, r, s).payload + before; };
  // Returns the address of rank r's payload for this rank. Returns null, and the group has failed, if the
  // offset is beyond the line.
  const auto block_of = [&](int r, std::int64_t count) -> const std::byte* {
    const BufferBlock block = exposed_block(group_, s, r);
    const std::int64_t skip = bytes_before(block, 0, element);
    if (!s.in_blocks || (skip >= 0 && is_within(static_cast<std::uint64_t>(skip), count * element,
                                                sizeof(Arrival::both.payload))))
      return payload(r) + skip;
    raise_damaged(s, r, block.offset, count);
    return nullptr;
  };
  if (s.out_count == 0) {
    // a barrier, or a call without data for this rank
  } else if (row(s.op).reduces) {
    auto& ins = operands_.ins;
    // All ranks divide `in` in the same way, except with in_blocks.
    const std::int64_t at = in_block(s, group_.rank, group_.size).offset;
    for (int r = 0; r < group_.size; ++r) {
      const std::byte* const in = s.in_blocks ? block_of(r, s.out_count) : payload(r) + at * element;
      if (in == nullptr) return Step::failed;
      ins[static_cast<std::size_t>(r)] = in;
    }
    if (is_scan(s.op))
      scan_of(group_.rank, s.dtype, s.reduce, s.op == Op::exscan, ins, s.out, s.out_count);
    else
      reduce(s.dtype, s.reduce, ins, {&s.out, 1}, s.out_count);
  } else {
    for (int from = 0; from < group_.size; ++from) {
      if (!gets(s, group_.rank, from)) continue;
      const BufferBlock to = out_block(s, from, group_.size);
      const std::byte* const in = block_of(from, to.count);
      if (in == nullptr) return Step::failed;
      copy_bytes(s.out + to.offset * element, in, to.count * element);
    }
  }
  arrivals_.finish(s);
  return Step::done;
}

}  // namespace weft::shm
