// How an operation is carried out over a transport: by itself, composed from others, or not at all. Pure
// functions; any thread.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// How a call is carried out over a transport of these traits: what docs/support.md says of it.
enum class OpSupport : std::uint8_t { native, composed, unsupported };
OpSupport op_support(const Traits& traits, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept;

/// Whether any operation is composed, so that compose() adds something.
bool needs_composition(const Traits& traits) noexcept;

/// Whether an `avg` is composed as the transport's own sum, divided afterwards. Only where that gives the
/// rounding of avg: 16-bit floats would be rounded before the division. Not of scans, whose ranks divide by
/// different numbers.
bool divides_after(const Traits& traits, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept;

}  // namespace weft
