// Plans composed calls: decides which inner steps they have, which blocks the ranks exchange, and what this
// rank computes.
#include <algorithm>
#include <cstring>
#include <new>

#include "backends/compose/composed_call.hpp"
#include "backends/compose/op_support.hpp"
#include "base/mutant.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/chunk.hpp"

namespace weft {
namespace {

void allot(Composed& c, std::int64_t bytes, LocalMemory& memory) {
  c.scratch_bytes = static_cast<std::size_t>(bytes);
  c.scratch = static_cast<std::byte*>(memory.allocate(name(c.user->op), c.scratch_bytes));
}

// A barrier: every rank sends one byte to every other rank.
void plan_barrier(Composed& c, int rank, int size, LocalMemory& memory) {
  Exchange& x = c.exchange;
  allot(c, size + 1, memory);
  std::memset(c.scratch, 0, c.scratch_bytes);
  x.in = c.scratch + size;
  x.out = c.scratch;
  x.in_count = 1;
  x.out_count = size;
  for (int p = 0; p < size; ++p) {
    x.to[static_cast<std::size_t>(p)] = {0, p != rank};
    x.from[static_cast<std::size_t>(p)] = {p, p != rank};
  }
}

// This rank copies its own block itself, unless the block already lies in place, or lies on a device (then
// the transport moves it).
void plan_exchange(Composed& c, bool device, int rank, int size) {
  const OpState& s = *c.user;
  Exchange& x = c.exchange;
  x.in = s.in;
  x.out = s.out;
  x.in_count = s.in_count;
  x.out_count = s.out_count;
  for (int p = 0; p < size; ++p) {
    x.to[static_cast<std::size_t>(p)] = in_block(s, p, size);
    x.from[static_cast<std::size_t>(p)] = out_block(s, p, size);
  }
  const auto own = static_cast<std::size_t>(rank);
  if (x.to[own].count == 0) return;
  const std::int64_t element = size_bytes(s.dtype);
  const std::byte* const from = s.in + x.to[own].offset * element;
  std::byte* const to = s.out + x.from[own].offset * element;
  if (device && from != to) return;
  if (from != to) {
    c.copy_from = from;
    c.copy_to = to;
    c.copy.total = WEFT_MUTANT("composed_own_block") ? 0 : x.to[own].count * element;
  }
  x.to[own].count = x.from[own].count = 0;
}

// Each rank combines a slice: of the whole buffer (all_reduce, reduce, scans), or its own block
// (reduce_scatter).
void plan_reduce(Composed& c, int rank, int size, LocalMemory& memory) {
  const OpState& s = *c.user;
  Exchange& x = c.exchange;
  // the other ranks need this rank's result: all_reduce, reduce
  const bool sliced = row(s.op).counts == Counts::equal;
  const auto own = static_cast<std::size_t>(rank);
  const std::int64_t element = size_bytes(s.dtype);
  for (int p = 0; p < size; ++p)
    x.to[static_cast<std::size_t>(p)] = sliced ? slice(s.in_count, p, size) : in_block(s, p, size);
  c.mine = x.to[own];
  x.to[own].count = 0;
  // Scratch: one row for each other rank, and one row for the result.
  const std::int64_t bytes = c.mine.count * element;
  allot(c, bytes * size, memory);
  c.result = c.scratch + bytes * (size - 1);
  for (int p = 0; p < size; ++p) {
    const int r = p < rank ? p : p - 1;
    x.from[static_cast<std::size_t>(p)] =
        p == rank ? BufferBlock{} : BufferBlock{r * c.mine.count, c.mine.count};
    c.ins[static_cast<std::size_t>(p)] = p == rank ? s.in + c.mine.offset * element : c.scratch + r * bytes;
  }
  if (WEFT_MUTANT("composed_order")) std::reverse(c.ins.begin(), c.ins.end());
  x.in = s.in;
  x.in_count = s.in_count;
  x.out = c.scratch;
  x.out_count = c.mine.count * (size - 1);
  c.outs_count = 0;
  if (c.plan == Plan::scan) {
    c.steps = 2;
    // The row of a rank's input becomes its prefix. This rank's own prefix goes to its final place.
    for (int p = 0; p < size; ++p)
      c.prefixes[static_cast<std::size_t>(p)] =
          p == rank ? s.out + c.mine.offset * element
                    : c.scratch + x.from[static_cast<std::size_t>(p)].offset * element;
    if (s.op == Op::exscan) c.prefixes[0] = nullptr;
  } else if (sliced) {
    c.steps = 2;
    c.outs[c.outs_count++] = c.result;
    if (s.out != nullptr) c.outs[c.outs_count++] = s.out + c.mine.offset * element;
  } else {
    c.outs[c.outs_count++] = s.out;
  }
  c.work.total = c.mine.count;
}

}  // namespace

BufferBlock slice(std::int64_t count, int r, int n) noexcept {
  const Chunk chunk = chunk_of(count, n, r);
  return {chunk.offset, chunk.size};
}

void plan_call(Composed& c, OpState& s, const Traits& traits, int rank, int size, LocalMemory& memory) {
  c.user = &s;
  c.posted = c.count = c.open = 0;
  c.steps = 1;
  c.copy = c.work = {};
  const bool native = op_support(traits, s.op, s.dtype, s.reduce.kind, s.order) == OpSupport::native;
  c.plan = native               ? Plan::same
           : !row(s.op).reduces ? Plan::exchange
           : is_scan(s.op)      ? Plan::scan
                                : Plan::reduce;
  switch (c.plan) {
    case Plan::same: return;
    case Plan::reduce:
    case Plan::scan: return plan_reduce(c, rank, size, memory);
    case Plan::exchange: break;
  }
  if (s.op == Op::barrier)
    plan_barrier(c, rank, size, memory);
  else
    plan_exchange(c, traits.device, rank, size);
}

namespace {

// The rows that arrived with the inputs now hold the prefixes of their ranks.
void plan_prefixes(Composed& c, int rank, int size) noexcept {
  const OpState& s = *c.user;
  Exchange& x = c.exchange;
  const auto gets = [&](int p) { return p > 0 || s.op == Op::scan; };
  x.to.swap(x.from);
  for (int p = 0; p < size; ++p) {
    if (!gets(p)) x.to[static_cast<std::size_t>(p)].count = 0;
    x.from[static_cast<std::size_t>(p)] =
        p != rank && gets(rank) ? slice(s.out_count, p, size) : BufferBlock{};
  }
  x.in = x.out;
  x.in_count = x.out_count;
  x.out = s.out;
  x.out_count = s.out_count;
  if (!gets(rank)) c.work = {0, s.out_count};
}

}  // namespace

void plan_results(Composed& c, int rank, int size) noexcept {
  if (c.plan == Plan::scan) return plan_prefixes(c, rank, size);
  const OpState& s = *c.user;
  Exchange& x = c.exchange;
  const bool all = s.op == Op::all_reduce;
  for (int p = 0; p < size; ++p) {
    x.to[static_cast<std::size_t>(p)] = {0, p != rank && (all || p == s.root) ? c.mine.count : 0};
    x.from[static_cast<std::size_t>(p)] =
        p != rank && s.out != nullptr ? slice(s.out_count, p, size) : BufferBlock{};
  }
  x.in = c.result;
  x.in_count = c.mine.count;
  x.out = s.out;
  x.out_count = s.out_count;
}

}  // namespace weft
