#include "backends/compose.hpp"

#include "backends/op_table.hpp"
#include "backends/reduce.hpp"

namespace weft {
namespace {

bool exchanges(const Traits& t) noexcept {
  return t.has(Op::all_to_all_v) || (t.has(Op::send) && t.has(Op::recv));
}

}  // namespace

Road road(const Traits& t, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept {
  const OpRow r = row(op);
  if (r.counts != Counts::none && !t.moves(dtype)) return Road::unsupported;
  if (!r.reduces)
    return t.has(op) ? Road::native : r.collective && exchanges(t) ? Road::composed : Road::unsupported;
  if (t.has(op) && t.reduces_itself(kind, dtype) && (order == Order::native || t.native_is_canonical))
    return Road::native;
  return !t.device && can_reduce(dtype, ReduceOp{kind}) && exchanges(t) ? Road::composed : Road::unsupported;
}

bool needs_composition(const Traits& t) noexcept {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int o = 1; o < kOpCount; ++o) {
      const auto op = static_cast<Op>(o);
      for (int k = 0; k < (row(op).reduces ? kReduceKindCount : 1); ++k)
        for (const Order order : {Order::native, Order::canonical})
          if (road(t, op, dtype, static_cast<ReduceOp::Kind>(k), order) == Road::composed) return true;
    }
  }
  return false;
}

std::unique_ptr<Backend> compose(std::unique_ptr<Backend> inner, int, int) { return inner; }

}  // namespace weft
