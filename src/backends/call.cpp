#include "weft/backends/call.hpp"

#include "backends/request.hpp"

namespace weft::call {

Call all_reduce(const ConstTensorView& in, const TensorView& out, const CallOptions& options) {
  return copied(request::all_reduce(in, out, options));
}
Call reduce(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options) {
  return copied(request::reduce(in, out, root, options));
}
Call broadcast(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options) {
  return copied(request::broadcast(in, out, root, options));
}
Call all_gather(const ConstTensorView& in, const TensorView& out, const CallOptions& options) {
  return copied(request::all_gather(in, out, options));
}
Call all_gather_v(const ConstTensorView& in, const TensorView& out, const Blocks& out_blocks,
                  const CallOptions& options) {
  return copied(request::all_gather_v(in, out, out_blocks, options));
}
Call reduce_scatter(const ConstTensorView& in, const TensorView& out, const CallOptions& options) {
  return copied(request::reduce_scatter(in, out, options));
}
Call reduce_scatter_v(const ConstTensorView& in, const TensorView& out, const Blocks& in_blocks,
                      const CallOptions& options) {
  return copied(request::reduce_scatter_v(in, out, in_blocks, options));
}
Call gather(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options) {
  return copied(request::gather(in, out, root, options));
}
Call scatter(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options) {
  return copied(request::scatter(in, out, root, options));
}
Call all_to_all(const ConstTensorView& in, const TensorView& out, const CallOptions& options) {
  return copied(request::all_to_all(in, out, options));
}
Call all_to_all_v(const ConstTensorView& in, const Blocks& in_blocks, const TensorView& out,
                  const Blocks& out_blocks, const CallOptions& options) {
  return copied(request::all_to_all_v(in, in_blocks, out, out_blocks, options));
}
Call barrier(const CallOptions& options) { return copied(request::barrier(options)); }
Call send(const ConstTensorView& in, int dst, const CallOptions& options) {
  return copied(request::send(in, dst, options));
}
Call recv(const TensorView& out, int src, const CallOptions& options) {
  return copied(request::recv(out, src, options));
}

}  // namespace weft::call
