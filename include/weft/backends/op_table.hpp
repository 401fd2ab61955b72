// One row per operation: which ranks have which buffers, and how these are divided into blocks. Pure
// functions; any thread.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// How `in` and `out` relate, where n is the group's size.
enum class Counts : std::uint8_t {
  none,         ///< no buffers
  equal,        ///< out = in
  out_is_n_in,  ///< out = n x in
  in_is_n_out,  ///< in = n x out
  out_blocks,   ///< out has a block per rank, in is this rank's block
  in_blocks,    ///< in has a block per rank, out is this rank's block
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

inline constexpr OpRow kOpRows[kOpCount] = {
    /* none */ {Counts::none, true, false},
    /* all_reduce */ {Counts::equal, true, true},
    /* reduce */ {Counts::equal, true, true, Rooted::out_at_root},
    /* broadcast */ {Counts::equal, true, false, Rooted::in_at_root},
    /* all_gather */ {Counts::out_is_n_in, true, false},
    /* all_gather_v */ {Counts::out_blocks, true, false},
    /* reduce_scatter */ {Counts::in_is_n_out, true, true},
    /* reduce_scatter_v */ {Counts::in_blocks, true, true},
    /* gather */ {Counts::out_is_n_in, true, false, Rooted::out_at_root},
    /* scatter */ {Counts::in_is_n_out, true, false, Rooted::in_at_root},
    /* all_to_all */ {Counts::equal, true, false},
    /* all_to_all_v */ {Counts::both_blocks, true, false},
    /* barrier */ {Counts::none, true, false},
    /* send */ {Counts::in_only, false, false},
    /* recv */ {Counts::out_only, false, false},
    /* scan */ {Counts::equal, true, true},
    /* exscan */ {Counts::equal, true, true},
    /* wait_message */ {Counts::none, false, false},
    /* exchange */ {Counts::none, false, false},
};
static_assert(static_cast<int>(Op::exchange) == kOpCount - 1);

constexpr OpRow row(Op op) noexcept { return kOpRows[static_cast<int>(op)]; }

/// Whether the operation sends, receives or awaits a message. Such calls are ordered per (source,
/// destination, tag) only.
constexpr bool is_message(Op op) noexcept {
  return ((op_bit(Op::send) | op_bit(Op::recv) | op_bit(Op::wait_message)) & op_bit(op)) != 0;
}

/// Whether the operation is a scan, which gives each rank a different combination. exscan combines the ranks
/// below it; scan also includes the rank itself.
constexpr bool is_scan(Op op) noexcept { return op == Op::scan || op == Op::exscan; }

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

/// The part of this rank's `in` that goes to rank `to` (or that the group combines for rank `to`), in a group
/// of `size`. Empty if this rank has no `in`, or rank `to` gets nothing.
inline BufferBlock in_block(const OpState& s, int to, int size) noexcept {
  switch (row(s.op).counts) {
    case Counts::in_blocks:
    case Counts::both_blocks: return s.in_blocks[to];
    case Counts::in_is_n_out:
      if (s.in_count == 0) return {};
      return {to * s.out_count, s.out_count};
    case Counts::equal:
      if (s.op == Op::all_to_all) return {to * (s.in_count / size), s.in_count / size};
      break;
    case Counts::none:
    case Counts::out_is_n_in:
    case Counts::out_blocks:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  if (row(s.op).rooted == Rooted::out_at_root && to != s.root) return {};
  return {0, s.in_count};
}

/// The part of this rank's `out` that comes from rank `from`. Do not call it for operations that reduce,
/// since they have no such part.
inline BufferBlock out_block(const OpState& s, int from, int size) noexcept {
  switch (row(s.op).counts) {
    case Counts::out_blocks:
    case Counts::both_blocks: return s.out_blocks[from];
    case Counts::out_is_n_in:
      if (s.out_count == 0) return {};
      return {from * s.in_count, s.in_count};
    case Counts::equal:
      if (s.op == Op::all_to_all) return {from * (s.out_count / size), s.out_count / size};
      break;
    case Counts::none:
    case Counts::in_is_n_out:
    case Counts::in_blocks:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  if (row(s.op).rooted == Rooted::in_at_root && from != s.root) return {};
  return {0, s.out_count};
}

}  // namespace weft
