// A collective call as one rank sees it: its state, in the scratch of its slot, and the facts that follow
// from its arguments alone.
//
// There are two kinds of operations. A moving operation copies, for each rank from which this rank gets
// elements, this rank's block of that rank's `in` to this rank's `out`. A reducing operation combines a part
// of all inputs, and stores the result where it is needed. in_block() and out_block() of op_table.hpp give
// the blocks of a rank's own buffers. gets() and exposed_block() give the blocks of other ranks' buffers.
//
// Each path of a collective is a class with three functions:
//   plan(s) begins a call: sets the members of the state that the path needs step(s) does the next piece of
//   work that is possible, and never waits missing(s, r) whether the call waits for rank r
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/shm/group.hpp"
#include "backends/shm/paths.hpp"
#include "base/shared_words.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::shm {

/// The phase of a call. It goes from `unpublished` to `arriving`, and from there to one of the paths.
enum class Phase : std::uint32_t { unpublished, arriving, inlined, direct, single, staged };

/// A call's state.
struct CallState {
  Phase phase;
  bool is_inline;  // the payload travels with the arrival
  // the payload would travel with the arrival, but some rank exposes its memory instead: see kExposed
  bool exposed_instead;
  bool finished;        // direct, single: this rank's part is done; other ranks may still access its memory
  std::int32_t cursor;  // lower ranks have arrived; in moving operations: the number of blocks that are done
  // direct, single: combined elements of the rank's own part, or copied bytes of the block
  std::int64_t done;
  std::int64_t part;     // staged: elements per owner and round
  std::uint64_t base;    // staged: the number of the group's rounds before this call
  std::uint64_t rounds;  // staged: the rounds of this call; the next three members count up to it
  std::uint64_t staged, reduced, copied;
};
static_assert(sizeof(CallState) <= sizeof(OpState::scratch));

inline CallState& state(OpState& s) noexcept { return *reinterpret_cast<CallState*>(s.scratch.data()); }
inline const CallState& state(const OpState& s) noexcept {
  return *reinterpret_cast<const CallState*>(s.scratch.data());
}

/// Returns whether rank `to` works on memory of rank `from`: takes a block of it, or combines a part of it.
inline bool gets(const OpState& s, int to, int from) noexcept {
  const OpRow r = row(s.op);
  switch (r.rooted) {
    case Rooted::no: break;
    case Rooted::in_at_root: return from == s.root;
    case Rooted::out_at_root: return r.reduces || to == s.root;
  }
  return true;
}

/// Returns whether only the root gives data. Such a root waits for no rank, and the others wait only for the
/// root.
inline bool is_from_root(const OpState& s) noexcept { return row(s.op).rooted == Rooted::in_at_root; }

/// Returns true for all_reduce, reduce and scans, in which each rank combines a slice of the buffer, for all
/// ranks or for the root.
inline bool is_sliced(const OpState& s) noexcept {
  const OpRow r = row(s.op);
  return r.reduces && r.counts == Counts::equal;
}

/// Returns whether `in` has a block for each rank.
inline bool has_block_per_rank(const OpState& s) noexcept {
  const Counts c = row(s.op).counts;
  return c == Counts::in_is_n_out || c == Counts::in_blocks || c == Counts::both_blocks ||
         s.op == Op::all_to_all;
}

/// Returns the part of rank `from`'s `in` that is for this rank; it begins at 0 if `in` has no block per
/// rank. All ranks divide their buffers in the same way, except with in_blocks. Each rank has published its
/// in_blocks, so the offset may be any number.
inline BufferBlock exposed_block(const Group& g, const OpState& s, int from) noexcept {
  if (s.in_blocks && from == g.rank) return s.in_blocks[g.rank];
  if (s.in_blocks) {
    const BufferBlock& b = g.control.detail(from, s.call).blocks()[g.rank];
    return {read_once(b.offset), read_once(b.count)};
  }
  const std::int64_t count = out_block(s, from, g.size).count;
  return {has_block_per_rank(s) ? g.rank * count : 0, count};
}

/// Returns the bytes that would travel with an arrival: the most that a rank gives. The value is equal on all
/// ranks, except with in_blocks.
inline std::int64_t payload_bytes(const Group& g, const OpState& s) noexcept {
  std::int64_t count = s.in_count;
  if (is_from_root(s)) {
    count = s.op == Op::scatter ? s.out_count * g.size : s.out_count;
  } else if (s.op == Op::all_gather_v) {
    for (int r = 0; r < g.size; ++r) count = std::max(count, s.out_blocks[r].count);
  }
  return count * size_bytes(s.dtype);
}

/// Returns the kind of single copy by the kernel that the call needs.
inline SingleCopy needed_single_copy(const OpState& s) noexcept {
  return is_sliced(s) ? SingleCopy::push : SingleCopy::pull;
}

/// Returns whether single copies are faster than staging. It uses only values that are equal on all ranks,
/// including `count`.
inline bool is_single_copy_profitable(const Group& g, const OpState& s, std::int64_t count) noexcept {
  if (s.op == Op::all_to_all_v) return false;  // no rank knows the sum of all counts
  const Counts counts = row(s.op).counts;
  // If true, `count` counts the elements of one block.
  const bool per_rank = counts == Counts::out_is_n_in || counts == Counts::in_is_n_out;
  const std::int64_t bytes = count * size_bytes(s.dtype) * (per_rank ? g.size : 1);
  return profitable_single_copy(s.op, g.size).has(bytes);
}

/// Returns whether the result is so large that it is written past the caches.
inline bool streams(const OpState& s) noexcept {
  return std::max(s.in_count, s.out_count) * size_bytes(s.dtype) >= kStreamFrom;
}

/// Returns rank r's arrival line of the call.
inline const Arrival& arrival(const Group& g, int r, const OpState& s) noexcept {
  return g.of(r).arrivals[s.call % kRing];
}

/// Returns the bytes from the beginning of the buffer to element `first` of a block. Negative if the offset,
/// which another rank may have overwritten, is not an offset in memory.
inline std::int64_t bytes_before(const BufferBlock& b, std::int64_t first, std::int64_t element) noexcept {
  constexpr std::int64_t kMost =
      std::int64_t{1}  // elements: more than there are addresses, and as bytes without overflow
      << 52;
  return b.offset < 0 || b.offset > kMost ? -1 : (b.offset + first) * element;
}

/// Returns a place from shared memory, which it reads once.
inline Buffer place_in(const Buffer& b) noexcept {
  return {read_once(b.kind), read_once(b.segment), read_once(b.offset)};
}

/// Returns whether other ranks can read and write this memory themselves, without the kernel.
inline bool is_reachable(const Buffer& b) noexcept {
  return b.kind != Buffer::foreign && b.kind != Buffer::remote;
}

/// Returns the most bytes of one input that a step of a scan combines: each byte goes into the prefixes of
/// many ranks.
inline std::int64_t scan_bytes(int size) noexcept {
  return std::max<std::int64_t>(static_cast<std::int64_t>(kChunkBytes) / size, 4 << 10);
}

/// The arguments of one reduction: an input per rank, and the outputs. A scan has an output per rank, which
/// is null if it is not needed. Scratch memory of the paths.
struct Operands {
  explicit Operands(int size) : ins(static_cast<std::size_t>(size)), outs(static_cast<std::size_t>(size)) {}
  std::vector<const std::byte*> ins;
  std::vector<std::byte*> outs;
};

}  // namespace weft::shm
