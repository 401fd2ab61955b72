#include "weft/base/op.hpp"

namespace weft {

std::string_view name(Op op) noexcept {
  switch (op) {
    case Op::none: return "none";
    case Op::all_reduce: return "all_reduce";
    case Op::reduce: return "reduce";
    case Op::broadcast: return "broadcast";
    case Op::all_gather: return "all_gather";
    case Op::all_gather_v: return "all_gather_v";
    case Op::reduce_scatter: return "reduce_scatter";
    case Op::reduce_scatter_v: return "reduce_scatter_v";
    case Op::gather: return "gather";
    case Op::scatter: return "scatter";
    case Op::all_to_all: return "all_to_all";
    case Op::all_to_all_v: return "all_to_all_v";
    case Op::barrier: return "barrier";
    case Op::send: return "send";
    case Op::recv: return "recv";
    case Op::scan: return "scan";
    case Op::exscan: return "exscan";
    case Op::wait_message: return "wait_message";
    case Op::exchange: return "exchange";
  }
  return "?";
}

std::string_view name(ReduceOp::Kind kind) noexcept {
  using Kind = ReduceOp::Kind;
  switch (kind) {
    case Kind::sum: return "sum";
    case Kind::avg: return "avg";
    case Kind::min: return "min";
    case Kind::max: return "max";
    case Kind::prod: return "prod";
    case Kind::premul_sum: return "premul_sum";
    case Kind::bit_and: return "bit_and";
    case Kind::bit_or: return "bit_or";
    case Kind::bit_xor: return "bit_xor";
    case Kind::logical_and: return "logical_and";
    case Kind::logical_or: return "logical_or";
    case Kind::logical_xor: return "logical_xor";
    case Kind::user: return "user";
  }
  return "?";
}

}  // namespace weft
