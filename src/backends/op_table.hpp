// One row per operation: what the checks, the recorder and the messages need to know about it.
#pragma once

#include "weft/backends/call.hpp"

namespace weft {

/// How `in` and `out` relate, n being the group's size.
enum class Counts : std::uint8_t {
  none,         ///< no buffers
  equal,        ///< out = in
  out_is_n_in,  ///< out = n x in
  in_is_n_out,  ///< in = n x out
  in_only,      ///< send
  out_only,     ///< recv
  root_in,      ///< out everywhere, in at the root, equal
};

struct OpRow {
  Counts counts;
  bool collective;  ///< numbered and ordered over the group
  bool reduces;     ///< the ReduceOp takes part
};

constexpr OpRow row(Op op) noexcept {
  switch (op) {
    case Op::none: break;
    case Op::all_reduce: return {Counts::equal, true, true};
    case Op::all_gather: return {Counts::out_is_n_in, true, false};
    case Op::reduce_scatter: return {Counts::in_is_n_out, true, true};
    case Op::broadcast: return {Counts::root_in, true, false};
    case Op::barrier: return {Counts::none, true, false};
    case Op::send: return {Counts::in_only, false, false};
    case Op::recv: return {Counts::out_only, false, false};
  }
  return {Counts::none, true, false};
}

}  // namespace weft
