#include "weft/backends/call.hpp"

namespace weft::call {

Call all_reduce(ConstTensorView in, TensorView out, const CallOptions& options) {
  return {.op = Op::all_reduce, .in = in, .out = out, .options = options};
}
Call reduce(ConstTensorView in, TensorView out, int root, const CallOptions& options) {
  return {.op = Op::reduce, .in = in, .out = out, .root = root, .options = options};
}
Call broadcast(ConstTensorView in, TensorView out, int root, const CallOptions& options) {
  return {.op = Op::broadcast, .in = in, .out = out, .root = root, .options = options};
}
Call all_gather(ConstTensorView in, TensorView out, const CallOptions& options) {
  return {.op = Op::all_gather, .in = in, .out = out, .options = options};
}
Call all_gather_v(ConstTensorView in, TensorView out, Blocks out_blocks, const CallOptions& options) {
  return {.op = Op::all_gather_v, .in = in, .out = out, .out_blocks = out_blocks, .options = options};
}
Call reduce_scatter(ConstTensorView in, TensorView out, const CallOptions& options) {
  return {.op = Op::reduce_scatter, .in = in, .out = out, .options = options};
}
Call reduce_scatter_v(ConstTensorView in, TensorView out, Blocks in_blocks, const CallOptions& options) {
  return {.op = Op::reduce_scatter_v, .in = in, .out = out, .in_blocks = in_blocks, .options = options};
}
Call gather(ConstTensorView in, TensorView out, int root, const CallOptions& options) {
  return {.op = Op::gather, .in = in, .out = out, .root = root, .options = options};
}
Call scatter(ConstTensorView in, TensorView out, int root, const CallOptions& options) {
  return {.op = Op::scatter, .in = in, .out = out, .root = root, .options = options};
}
Call all_to_all(ConstTensorView in, TensorView out, const CallOptions& options) {
  return {.op = Op::all_to_all, .in = in, .out = out, .options = options};
}
Call all_to_all_v(ConstTensorView in, Blocks in_blocks, TensorView out, Blocks out_blocks,
                  const CallOptions& options) {
  return {.op = Op::all_to_all_v,
          .in = in,
          .out = out,
          .in_blocks = in_blocks,
          .out_blocks = out_blocks,
          .options = options};
}
Call barrier(const CallOptions& options) { return {.op = Op::barrier, .options = options}; }
Call send(ConstTensorView in, int dst, const CallOptions& options) {
  return {.op = Op::send, .in = in, .peer = dst, .options = options};
}
Call recv(TensorView out, int src, const CallOptions& options) {
  return {.op = Op::recv, .out = out, .peer = src, .options = options};
}

}  // namespace weft::call
