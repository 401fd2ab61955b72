// One call, as it travels from the user's method through ProcessGroup::submit to the slot of a group. Plain
// values; any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "weft/base/buffer.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/op.hpp"

namespace weft {

/// The source of a recv that takes the next message of its tag, from any rank. No rank has this number,
/// and arithmetic on ranks does not give it by mistake. There is no any_tag, since every recv names its
/// tag.
inline constexpr int any_source = std::numeric_limits<int>::min();

/// A message that has arrived and for which there was no recv yet.
struct MessageInfo {
  int source = -1;
  int tag = 0;
  DType dtype = DType::u8;
  std::int64_t count = 0;  ///< elements
  friend bool operator==(const MessageInfo&, const MessageInfo&) = default;
};

/// The options of any call. All ranks must give the same `op` and `order`. The other options may differ
/// between ranks.
struct CallOptions {
  ReduceOp op = ReduceOp::sum;
  Order order = Order::native;
  Duration deadline{};  ///< zero: the group's deadline
  int tag = 0;          ///< send and recv: 0 … 2^31-1
  /// Stream backends: the stream of the group's device on which the call is ordered. Stream{}: the device's
  /// default stream.
  Stream stream{};
};

/// The division of a buffer among the ranks of a group: block r has `counts[r]` elements and begins at
/// element `offsets[r]`. Without offsets the blocks follow one another. Blocks that are written may not
/// overlap. The vectors are copied when the call is submitted.
struct Blocks {
  std::span<const std::int64_t> counts;
  std::span<const std::int64_t> offsets{};
};

/// The description of a call that is not submitted yet. Methods of ProcessGroup, functions of weft.h and
/// lists for ProcessGroup::coalesced() pass it to the group. The functions of namespace `call` make it. The
/// caller must keep the memory of the buffers alive until the Work is done, and the blocks until the call is
/// submitted.
struct Call {
  Op op = Op::none;
  ConstBuffer in{};
  Buffer out{};
  int root = -1;  ///< reduce, broadcast, gather, scatter
  int peer = -1;  ///< send: the destination; recv: the source, or any_source
  Blocks in_blocks{}, out_blocks{};
  CallOptions options{};
};

/// One function for each operation. ProcessGroup has a method of the same name and arguments, which submits
/// the Call. The comments of the methods describe the operations. These functions check nothing. They are
/// inline, so that the Call is built directly at the place where the group reads it.
namespace call {

inline Call all_reduce(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
  return {.op = Op::all_reduce, .in = in, .out = out, .options = options};
}
inline Call all_reduce(const Buffer& x, const CallOptions& options = {}) {
  return {.op = Op::all_reduce, .in = x, .out = x, .options = options};
}
inline Call scan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
  return {.op = Op::scan, .in = in, .out = out, .options = options};
}
inline Call scan(const Buffer& x, const CallOptions& options = {}) {
  return {.op = Op::scan, .in = x, .out = x, .options = options};
}
inline Call exscan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
  return {.op = Op::exscan, .in = in, .out = out, .options = options};
}
inline Call exscan(const Buffer& x, const CallOptions& options = {}) {
  return {.op = Op::exscan, .in = x, .out = x, .options = options};
}
inline Call reduce(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
  return {.op = Op::reduce, .in = in, .out = out, .root = root, .options = options};
}
inline Call reduce(const Buffer& x, int root, const CallOptions& options = {}) {
  return {.op = Op::reduce, .in = x, .out = x, .root = root, .options = options};
}
inline Call broadcast(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
  return {.op = Op::broadcast, .in = in, .out = out, .root = root, .options = options};
}
inline Call broadcast(const Buffer& x, int root, const CallOptions& options = {}) {
  return {.op = Op::broadcast, .in = x, .out = x, .root = root, .options = options};
}
inline Call all_gather(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
  return {.op = Op::all_gather, .in = in, .out = out, .options = options};
}
inline Call all_gather_v(const ConstBuffer& in, const Buffer& out, const Blocks& out_blocks,
                         const CallOptions& options = {}) {
  return {.op = Op::all_gather_v, .in = in, .out = out, .out_blocks = out_blocks, .options = options};
}
inline Call reduce_scatter(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
  return {.op = Op::reduce_scatter, .in = in, .out = out, .options = options};
}
inline Call reduce_scatter_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                             const CallOptions& options = {}) {
  return {.op = Op::reduce_scatter_v, .in = in, .out = out, .in_blocks = in_blocks, .options = options};
}
inline Call gather(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
  return {.op = Op::gather, .in = in, .out = out, .root = root, .options = options};
}
inline Call scatter(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
  return {.op = Op::scatter, .in = in, .out = out, .root = root, .options = options};
}
inline Call all_to_all(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
  return {.op = Op::all_to_all, .in = in, .out = out, .options = options};
}
inline Call all_to_all_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                         const Blocks& out_blocks, const CallOptions& options = {}) {
  return {.op = Op::all_to_all_v,
          .in = in,
          .out = out,
          .in_blocks = in_blocks,
          .out_blocks = out_blocks,
          .options = options};
}
inline Call barrier(const CallOptions& options = {}) { return {.op = Op::barrier, .options = options}; }
inline Call send(const ConstBuffer& in, int dst, const CallOptions& options = {}) {
  return {.op = Op::send, .in = in, .peer = dst, .options = options};
}
inline Call recv(const Buffer& out, int src, const CallOptions& options = {}) {
  return {.op = Op::recv, .out = out, .peer = src, .options = options};
}
inline Call wait_message(int src, const CallOptions& options = {}) {
  return {.op = Op::wait_message, .peer = src, .options = options};
}

}  // namespace call

}  // namespace weft
