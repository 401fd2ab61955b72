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
};

/// Borrows its views: they live in the caller's frame until submit() returns, the memory until the Work is
/// done.
struct Call {
  Op op = Op::none;
  std::span<const ConstTensorView> in;
  std::span<const TensorView> out;
  int root = -1;  ///< broadcast
  int peer = -1;  ///< send: the destination; recv: the source
  CallOptions options;
};

}  // namespace weft
