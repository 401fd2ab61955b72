// One call, as it travels from the user's method through ProcessGroup::submit to a backend.
#pragma once

#include <cstdint>
#include <span>

#include "weft/base/clock.hpp"
#include "weft/base/op.hpp"
#include "weft/base/view.hpp"

namespace weft {

/// What may be said about any call. All ranks give the same `op` and `order`; the rest is each rank's own.
struct CallOptions {
  ReduceOp op = ReduceOp::sum;
  Order order = Order::native;
  Duration deadline{};  ///< zero: the group's
  int tag = 0;          ///< send and recv: 0 … 2^31-1
  void* stream =
      nullptr;  ///< stream backends: the cudaStream_t the call is ordered on; null: the default stream
};

/// How a buffer is divided among the ranks of a group: block r has `counts[r]` elements and begins at element
/// `offsets[r]`. Without offsets the blocks follow one another. Blocks that are written may not overlap. The
/// vectors are copied when the call is submitted.
struct Blocks {
  std::span<const std::int64_t> counts;
  std::span<const std::int64_t> offsets{};
};

/// A call that is not submitted yet, for ProcessGroup::coalesced(); made by the functions of namespace
/// `call`. The memory of its views lives until the Work is done, the rest until it is submitted.
struct Call {
  Op op = Op::none;
  ConstTensorView in{};
  TensorView out{};
  int root = -1;  ///< reduce, broadcast, gather, scatter
  int peer = -1;  ///< send: the destination; recv: the source
  Blocks in_blocks{}, out_blocks{};
  CallOptions options{};
};

/// See the functions of ProcessGroup of the same names.
namespace call {
Call all_reduce(const ConstTensorView& in, const TensorView& out, const CallOptions& options = {});
Call reduce(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options = {});
Call broadcast(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options = {});
Call all_gather(const ConstTensorView& in, const TensorView& out, const CallOptions& options = {});
Call all_gather_v(const ConstTensorView& in, const TensorView& out, const Blocks& out_blocks,
                  const CallOptions& options = {});
Call reduce_scatter(const ConstTensorView& in, const TensorView& out, const CallOptions& options = {});
Call reduce_scatter_v(const ConstTensorView& in, const TensorView& out, const Blocks& in_blocks,
                      const CallOptions& options = {});
Call gather(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options = {});
Call scatter(const ConstTensorView& in, const TensorView& out, int root, const CallOptions& options = {});
Call all_to_all(const ConstTensorView& in, const TensorView& out, const CallOptions& options = {});
Call all_to_all_v(const ConstTensorView& in, const Blocks& in_blocks, const TensorView& out,
                  const Blocks& out_blocks, const CallOptions& options = {});
Call barrier(const CallOptions& options = {});
Call send(const ConstTensorView& in, int dst, const CallOptions& options = {});
Call recv(const TensorView& out, int src, const CallOptions& options = {});
}  // namespace call

}  // namespace weft
