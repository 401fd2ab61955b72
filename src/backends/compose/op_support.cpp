#include "backends/compose/op_support.hpp"

#include "reduce/reduce.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {
namespace {

bool exchanges(const Traits& t) noexcept {
  return t.has(Op::all_to_all_v) || (t.has(Op::send) && t.has(Op::recv));
}

}  // namespace

OpSupport op_support(const Traits& t, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept {
  const OpRow r = row(op);
  if (r.counts != Counts::none && !t.moves(dtype)) return OpSupport::unsupported;
  if (!r.reduces)
    return t.has(op)                                              ? OpSupport::native
           : (r.collective || op == Op::exchange) && exchanges(t) ? OpSupport::composed
                                                                  : OpSupport::unsupported;
  if (t.has(op) && t.reduces_itself(kind, dtype) && (order == Order::native || t.native_is_canonical))
    return OpSupport::native;
  return !t.device && can_reduce(dtype, kind) && exchanges(t) ? OpSupport::composed : OpSupport::unsupported;
}

bool needs_composition(const Traits& t) noexcept {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int o = 1; o < kOpCount; ++o) {
      const auto op = static_cast<Op>(o);
      for (int k = 0; k < (row(op).reduces ? kReduceKindCount : 1); ++k)
        for (const Order order : {Order::native, Order::canonical})
          if (op_support(t, op, dtype, static_cast<ReduceOp::Kind>(k), order) == OpSupport::composed)
            return true;
    }
  }
  return false;
}

}  // namespace weft
