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

}  // namespace weft
