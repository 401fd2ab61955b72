// A call as its caller's arguments lie: the way from a method of ProcessGroup to the slot of a group copies
// no view. Pure; any thread.
#pragma once

#include "weft/backends/call.hpp"

namespace weft {

/// Like Call, but borrowed: everything lives until the call is submitted.
struct Request {
  static inline const ConstTensorView kNoInput{};
  static inline const TensorView kNoOutput{};

  Op op;
  const ConstTensorView& in = kNoInput;
  const TensorView& out = kNoOutput;
  int root = -1;
  int peer = -1;
  Blocks in_blocks{}, out_blocks{};
  const CallOptions& options;
};

inline Request borrowed(const Call& c) noexcept {
  return {.op = c.op,
          .in = c.in,
          .out = c.out,
          .root = c.root,
          .peer = c.peer,
          .in_blocks = c.in_blocks,
          .out_blocks = c.out_blocks,
          .options = c.options};
}
inline Call copied(const Request& r) {
  return {.op = r.op,
          .in = r.in,
          .out = r.out,
          .root = r.root,
          .peer = r.peer,
          .in_blocks = r.in_blocks,
          .out_blocks = r.out_blocks,
          .options = r.options};
}

/// Which argument is which part of a call: for the methods of ProcessGroup and the functions of namespace
/// `call` alike.
namespace request {
using In = const ConstTensorView&;
using Out = const TensorView&;
using Options = const CallOptions&;

inline Request all_reduce(In in, Out out, Options options) noexcept {
  return {.op = Op::all_reduce, .in = in, .out = out, .options = options};
}
inline Request reduce(In in, Out out, int root, Options options) noexcept {
  return {.op = Op::reduce, .in = in, .out = out, .root = root, .options = options};
}
inline Request broadcast(In in, Out out, int root, Options options) noexcept {
  return {.op = Op::broadcast, .in = in, .out = out, .root = root, .options = options};
}
inline Request all_gather(In in, Out out, Options options) noexcept {
  return {.op = Op::all_gather, .in = in, .out = out, .options = options};
}
inline Request all_gather_v(In in, Out out, const Blocks& out_blocks, Options options) noexcept {
  return {.op = Op::all_gather_v, .in = in, .out = out, .out_blocks = out_blocks, .options = options};
}
inline Request reduce_scatter(In in, Out out, Options options) noexcept {
  return {.op = Op::reduce_scatter, .in = in, .out = out, .options = options};
}
inline Request reduce_scatter_v(In in, Out out, const Blocks& in_blocks, Options options) noexcept {
  return {.op = Op::reduce_scatter_v, .in = in, .out = out, .in_blocks = in_blocks, .options = options};
}
inline Request gather(In in, Out out, int root, Options options) noexcept {
  return {.op = Op::gather, .in = in, .out = out, .root = root, .options = options};
}
inline Request scatter(In in, Out out, int root, Options options) noexcept {
  return {.op = Op::scatter, .in = in, .out = out, .root = root, .options = options};
}
inline Request all_to_all(In in, Out out, Options options) noexcept {
  return {.op = Op::all_to_all, .in = in, .out = out, .options = options};
}
inline Request all_to_all_v(In in, const Blocks& in_blocks, Out out, const Blocks& out_blocks,
                            Options options) noexcept {
  return {.op = Op::all_to_all_v,
          .in = in,
          .out = out,
          .in_blocks = in_blocks,
          .out_blocks = out_blocks,
          .options = options};
}
inline Request barrier(Options options) noexcept { return {.op = Op::barrier, .options = options}; }
inline Request send(In in, int dst, Options options) noexcept {
  return {.op = Op::send, .in = in, .peer = dst, .options = options};
}
inline Request recv(Out out, int src, Options options) noexcept {
  return {.op = Op::recv, .out = out, .peer = src, .options = options};
}
}  // namespace request

}  // namespace weft
