// Prefix reductions of several inputs, made of reduce(). Pure functions; any thread.
//
// Prefix r of a scan is reduce() of in[0] … in[r]. So its bits are those of an all_reduce in canonical order
// in a group of ranks 0 … r. Prefix r of an exscan is reduce() of in[0] … in[r-1].
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "weft/base/dtype.hpp"
#include "weft/base/op.hpp"

namespace weft {

/// Returns whether the reduction has an identity: an average and a user's function have none.
constexpr bool has_identity(ReduceOp::Kind kind) noexcept {
  return kind != ReduceOp::Kind::avg && kind != ReduceOp::Kind::user;
}

/// Fills `to` with the identity; does nothing if there is no identity.
void fill_identity(DType dtype, ReduceOp::Kind kind, std::byte* to, std::int64_t count) noexcept;

/// Computes every prefix: out[r] receives prefix r, unless it is null. Prefix 0 of an exscan is the identity.
/// If there is none, out[0] does not change. out[r] may be in[r]. Any other overlap is not allowed. Each
/// element of an input is read up to n times.
void scan(DType dtype, const ReduceOp& op, bool exclusive, std::span<const std::byte* const> in,
          std::span<std::byte* const> out, std::int64_t count) noexcept;

/// Computes only prefix `rank`.
void scan_of(int rank, DType dtype, const ReduceOp& op, bool exclusive, std::span<const std::byte* const> in,
             std::byte* out, std::int64_t count) noexcept;

}  // namespace weft
