#include "weft/base/op.hpp"

namespace weft {

std::string_view name(Op op) noexcept {
  switch (op) {
    case Op::none: return "none";
    case Op::all_reduce: return "all_reduce";
    case Op::all_gather: return "all_gather";
    case Op::reduce_scatter: return "reduce_scatter";
    case Op::broadcast: return "broadcast";
    case Op::barrier: return "barrier";
    case Op::send: return "send";
    case Op::recv: return "recv";
  }
  return "?";
}

std::string_view name(ReduceOp op) noexcept {
  switch (op.kind) {
    case ReduceOp::Kind::sum: return "sum";
    case ReduceOp::Kind::avg: return "avg";
    case ReduceOp::Kind::min: return "min";
    case ReduceOp::Kind::max: return "max";
  }
  return "?";
}

}  // namespace weft
