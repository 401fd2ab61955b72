// A collective call as one rank sees it: its state, in the scratch of its slot, and the facts that follow
// from its arguments alone.
//
// All operations are one of two things. Moving: if this rank gets elements from a rank, its block of that
// rank's `in` is copied to this rank's `out`. Reducing: a part of all inputs is combined and stored where
// it is wanted. in_block() and out_block() of op_table.hpp give the blocks of a rank's own buffers; gets()
// and exposed_block() give those of the others' buffers.
//
// Every path of a collective is a class that answers the same three questions about a call:
//   plan(s)        begins: sets what the path needs of the state
//   step(s)        does the next piece of work that it can do, and never waits
//   missing(s, r)  is the call waiting for rank r?
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

/// Where a call is. A call goes from `unpublished` to `arriving` and from there to one of the paths.
enum class Phase : std::uint32_t { unpublished, arriving, inlined, direct, single, staged };

/// A call's state.
struct CallState {
  Phase phase;
  bool is_inline;        // its payload travels beside the arrival
  bool exposed_instead;  // it would, but some rank exposes its memory instead: see kExposed
  bool finished;         // direct, single: this rank's part is done; others may still touch its memory
  std::int32_t cursor;   // ranks below it have been seen; moving: blocks that are done
  std::int64_t done;     // direct, single: elements of the own part combined, or bytes of the block copied
  std::int64_t part;     // staged: elements per owner and round
  std::uint64_t base;    // staged: the group's rounds before this call
  std::uint64_t rounds;  // staged: of this call; the next three count up to it
  std::uint64_t staged, reduced, copied;
};
static_assert(sizeof(CallState) <= sizeof(OpState::scratch));

inline CallState& state(OpState& s) noexcept { return *reinterpret_cast<CallState*>(s.scratch.data()); }
inline const CallState& state(const OpState& s) noexcept {
  return *reinterpret_cast<const CallState*>(s.scratch.data());
}

/// Does rank `to` work on memory of rank `from`: take a block of it, or combine a part of it?
inline bool gets(const OpState& s, int to, int from) noexcept {
  const OpRow r = row(s.op);
  switch (r.rooted) {
    case Rooted::no: break;
    case Rooted::in_at_root: return from == s.root;
    case Rooted::out_at_root: return r.reduces || to == s.root;
  }
  return true;
}

/// The root alone gives. It waits for nobody, and the others wait for the root alone.
inline bool is_from_root(const OpState& s) noexcept { return row(s.op).rooted == Rooted::in_at_root; }

/// all_reduce, reduce and scans: each rank combines a slice of the whole, for all ranks or for the root.
inline bool is_sliced(const OpState& s) noexcept {
  const OpRow r = row(s.op);
  return r.reduces && r.counts == Counts::equal;
}

/// `in` has a block for each rank.
inline bool has_block_per_rank(const OpState& s) noexcept {
  const Counts c = row(s.op).counts;
  return c == Counts::in_is_n_out || c == Counts::in_blocks || c == Counts::both_blocks ||
         s.op == Op::all_to_all;
}

/// The part of rank `from`'s `in` that is for this rank; it begins at 0 where `in` has no block per rank.
/// All ranks divide their buffers alike, except with in_blocks. Each rank has published those, so the
/// offset may be any number.
inline Block exposed_block(const Group& g, const OpState& s, int from) noexcept {
  if (s.in_blocks && from == g.rank) return s.in_blocks[g.rank];
  if (s.in_blocks) {
    const Block& b = g.control.detail(from, s.call).blocks()[g.rank];
    return {read_once(b.offset), read_once(b.count)};
  }
  const std::int64_t count = out_block(s, from, g.size).count;
  return {has_block_per_rank(s) ? g.rank * count : 0, count};
}

/// The bytes that would travel beside an arrival: the most that a rank gives. All ranks know the same, except
/// with in_blocks.
inline std::int64_t payload_bytes(const Group& g, const OpState& s) noexcept {
  std::int64_t count = s.in_count;
  if (is_from_root(s)) {
    count = s.op == Op::scatter ? s.out_count * g.size : s.out_count;
  } else if (s.op == Op::all_gather_v) {
    for (int r = 0; r < g.size; ++r) count = std::max(count, s.out_blocks[r].count);
  }
  return count * size_bytes(s.dtype);
}

/// The single copy of the kernel that the call needs.
inline SingleCopy needed_single_copy(const OpState& s) noexcept {
  return is_sliced(s) ? SingleCopy::push : SingleCopy::pull;
}

/// Are single copies faster than staging? A pure function of what all ranks know; so is `count`.
inline bool is_single_copy_profitable(const Group& g, const OpState& s, std::int64_t count) noexcept {
  if (s.op == Op::all_to_all_v) return false;  // no rank knows the sum of all counts
  const Counts counts = row(s.op).counts;
  // If true, `count` is of one block.
  const bool per_rank = counts == Counts::out_is_n_in || counts == Counts::in_is_n_out;
  const std::int64_t bytes = count * size_bytes(s.dtype) * (per_rank ? g.size : 1);
  return profitable_single_copy(s.op, g.size).has(bytes);
}

/// Is the result so large that it is written around the caches?
inline bool streams(const OpState& s) noexcept {
  return std::max(s.in_count, s.out_count) * size_bytes(s.dtype) >= kStreamFrom;
}

/// Rank r's arrival line of the call.
inline const Arrival& arrival(const Group& g, int r, const OpState& s) noexcept {
  return g.of(r).arrivals[s.call % kRing];
}

/// The bytes from where a block begins to its element `first`; negative if the offset, which another rank
/// may have written to, is not an offset in memory.
inline std::int64_t bytes_before(const Block& b, std::int64_t first, std::int64_t element) noexcept {
  constexpr std::int64_t kMost = std::int64_t{1}
                                 << 52;  // elements: more than there are addresses, and in bytes no overflow
  return b.offset < 0 || b.offset > kMost ? -1 : (b.offset + first) * element;
}

/// A place in memory that is shared, read once.
inline Buffer place_in(const Buffer& b) noexcept {
  return {read_once(b.kind), read_once(b.segment), read_once(b.offset)};
}

/// Can other ranks read and write this memory themselves, without the kernel?
inline bool is_reachable(const Buffer& b) noexcept {
  return b.kind != Buffer::foreign && b.kind != Buffer::remote;
}

/// The most bytes of one input that a step of a scan combines: each goes into the prefixes of many ranks.
inline std::int64_t scan_bytes(int size) noexcept {
  return std::max<std::int64_t>(static_cast<std::int64_t>(kChunkBytes) / size, 4 << 10);
}

/// The arguments of one reduction: an input per rank and the outputs; for a scan an output per rank, null
/// if it is not wanted. Scratch of the paths.
struct Operands {
  explicit Operands(int size) : ins(static_cast<std::size_t>(size)), outs(static_cast<std::size_t>(size)) {}
  std::vector<const std::byte*> ins;
  std::vector<std::byte*> outs;
};

}  // namespace weft::shm
