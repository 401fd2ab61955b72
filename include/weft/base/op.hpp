// The operations ranks perform together, and how elements are combined.
#pragma once

#include <cstdint>
#include <string_view>

namespace weft {

/// What a call asks for. `none` stands in errors that belong to no call.
enum class Op : std::uint8_t {
  none,
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  barrier,
  send,
  recv,
};

/// The operation's name as users write it: "all_reduce".
std::string_view name(Op op) noexcept;

/// How elements of several ranks become one. A small value; compare with ==.
///
/// `avg` is the sum, truly divided by the number of ranks in the accumulator and then rounded once; integer
/// averages truncate toward zero and integer sums wrap. `min` and `max` give the one quiet NaN where any
/// input is NaN, and order -0 before +0.
struct ReduceOp {
  enum class Kind : std::uint8_t { sum, avg, min, max };
  Kind kind = Kind::sum;

  static const ReduceOp sum, avg, min, max;
  friend bool operator==(const ReduceOp&, const ReduceOp&) = default;
};
inline constexpr ReduceOp ReduceOp::sum{Kind::sum};
inline constexpr ReduceOp ReduceOp::avg{Kind::avg};
inline constexpr ReduceOp ReduceOp::min{Kind::min};
inline constexpr ReduceOp ReduceOp::max{Kind::max};

/// "sum", "avg", "min" or "max".
std::string_view name(ReduceOp op) noexcept;

/// In which order elements are combined. `native`: the backend's own. `canonical`: a binary tree over the
/// rank index, split at the largest power of two below n (n = 3: (0+1)+2), the same bits on every backend.
enum class Order : std::uint8_t { native, canonical };

}  // namespace weft
