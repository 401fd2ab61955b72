// How an operation is carried out over a transport: natively, composed from other operations, or not at all.
// Pure functions. Any thread may call them.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft {

/// How a call is carried out over a transport with these traits. docs/support.md has the table.
enum class OpSupport : std::uint8_t { native, composed, unsupported };
OpSupport op_support(const Traits& traits, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept;

/// Returns whether any operation is composed, so that compose() adds something.
bool needs_composition(const Traits& traits) noexcept;

}  // namespace weft
