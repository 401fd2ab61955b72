// One row per operation: what the checks, the recorder, the messages, composition and the transports need to
// know about it.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// How `in` and `out` relate, n being the group's size.
enum class Counts : std::uint8_t {
  none,         ///< no buffers
  equal,        ///< out = in
  out_is_n_in,  ///< out = n x in
  in_is_n_out,  ///< in = n x out
  out_blocks,   ///< out has a block per rank, in is this rank's
  in_blocks,    ///< in has a block per rank, out is this rank's
  both_blocks,  ///< in and out have a block per rank
  in_only,      ///< send
  out_only,     ///< recv
};

/// Which ranks have `in`, and which have `out`.
enum class Rooted : std::uint8_t { no, in_at_root, out_at_root };

struct OpRow {
  Counts counts;
  bool collective;  ///< numbered and ordered over the group
  bool reduces;     ///< the ReduceOp takes part
  Rooted rooted = Rooted::no;
};

constexpr OpRow row(Op op) noexcept {
  switch (op) {
    case Op::none: break;
    case Op::all_reduce: return {Counts::equal, true, true};
    case Op::reduce: return {Counts::equal, true, true, Rooted::out_at_root};
    case Op::broadcast: return {Counts::equal, true, false, Rooted::in_at_root};
    case Op::all_gather: return {Counts::out_is_n_in, true, false};
    case Op::all_gather_v: return {Counts::out_blocks, true, false};
    case Op::reduce_scatter: return {Counts::in_is_n_out, true, true};
    case Op::reduce_scatter_v: return {Counts::in_blocks, true, true};
    case Op::gather: return {Counts::out_is_n_in, true, false, Rooted::out_at_root};
    case Op::scatter: return {Counts::in_is_n_out, true, false, Rooted::in_at_root};
    case Op::all_to_all: return {Counts::equal, true, false};
    case Op::all_to_all_v: return {Counts::both_blocks, true, false};
    case Op::barrier: return {Counts::none, true, false};
    case Op::send: return {Counts::in_only, false, false};
    case Op::recv: return {Counts::out_only, false, false};
  }
  return {Counts::none, true, false};
}

constexpr bool has_in(Op op, bool at_root) noexcept {
  const OpRow r = row(op);
  return r.counts != Counts::none && r.counts != Counts::out_only &&
         (r.rooted != Rooted::in_at_root || at_root);
}
constexpr bool has_out(Op op, bool at_root) noexcept {
  const OpRow r = row(op);
  return r.counts != Counts::none && r.counts != Counts::in_only &&
         (r.rooted != Rooted::out_at_root || at_root);
}

/// The part of this rank's `in` that goes to rank `to` (or is combined for it), in a group of `size`.
/// Empty where this rank has no `in`, or `to` gets nothing.
inline Block in_block(const OpState& s, int to, int size) noexcept {
  switch (row(s.op).counts) {
    case Counts::in_blocks:
    case Counts::both_blocks: return s.in_blocks[to];
    case Counts::in_is_n_out:
      if (s.in_count == 0) return {};
      return {to * s.out_count, s.out_count};
    case Counts::equal:
      if (s.op == Op::all_to_all) return {to * (s.in_count / size), s.in_count / size};
      break;
    default: break;
  }
  if (row(s.op).rooted == Rooted::out_at_root && to != s.root) return {};
  return {0, s.in_count};
}

/// The part of this rank's `out` that comes from rank `from`; operations that reduce have none.
inline Block out_block(const OpState& s, int from, int size) noexcept {
  switch (row(s.op).counts) {
    case Counts::out_blocks:
    case Counts::both_blocks: return s.out_blocks[from];
    case Counts::out_is_n_in:
      if (s.out_count == 0) return {};
      return {from * s.in_count, s.in_count};
    case Counts::equal:
      if (s.op == Op::all_to_all) return {from * (s.out_count / size), s.out_count / size};
      break;
    default: break;
  }
  if (row(s.op).rooted == Rooted::in_at_root && from != s.root) return {};
  return {0, s.out_count};
}

}  // namespace weft
