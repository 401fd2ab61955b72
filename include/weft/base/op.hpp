// The operations that ranks perform together, and the reductions that combine elements.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "weft/base/dtype.hpp"

namespace weft {

/// The operation that a call requests. `none` is for errors that belong to no call.
enum class Op : std::uint8_t {
  none,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  all_gather_v,
  reduce_scatter,
  reduce_scatter_v,
  gather,
  scatter,
  all_to_all,
  all_to_all_v,
  barrier,
  send,
  recv,
  scan,
  exscan,
  wait_message,
  exchange,
};
inline constexpr int kOpCount = 19;

/// The operation's name as users write it: "all_reduce".
std::string_view name(Op op) noexcept;

/// A reduction of the user's own: for each i < count, out[i] = left[i] combined with right[i], all of
/// `dtype`. The function must be associative, or the result depends on the number of ranks. It need not be
/// commutative, since `left` always comes from lower ranks. `out` may be `left`. Any thread may call it. It
/// must not throw. In a group of one rank weft does not call it. It works on all dtypes except f8, in host
/// memory only. Ranks compare `name`.
struct UserReduction {
  std::string name;
  std::function<void(const void* left, const void* right, void* out, std::int64_t count, DType dtype)>
      combine;
};

/// The rule by which elements of several ranks are combined to one element. A small value; compare with ==.
///
/// `avg` divides the sum by the number of ranks (a true division, in the accumulator) and then rounds once.
/// Integer averages are truncated toward zero. Integer sums and products wrap. `min` and `max` give the quiet
/// NaN if any input is a NaN, and order -0 before +0. `premul_sum` multiplies each input by `scale` in the
/// accumulator and then sums. `scale` must be the same on all ranks, and a whole number for integers. Bit and
/// logical operations work on integers and bool. Logical operations give 0 or 1. Complex numbers have sum,
/// avg and prod, where (a + bi)(c + di) is (ac - bd) + (ad + bc)i and each operation is rounded. bool has
/// min, max, bit and logical operations. f8 has no reductions. A user's function works on every dtype except
/// f8.
struct ReduceOp {
  enum class Kind : std::uint8_t {
    sum,
    avg,
    min,
    max,
    prod,
    premul_sum,
    bit_and,
    bit_or,
    bit_xor,
    logical_and,
    logical_or,
    logical_xor,
    user,
  };
  Kind kind = Kind::sum;
  double scale = 1;                     ///< premul_sum
  const UserReduction* user = nullptr;  ///< user: the caller keeps it until the call is done

  static const ReduceOp sum, avg, min, max, prod, bit_and, bit_or, bit_xor, logical_and, logical_or,
      logical_xor;
  static constexpr ReduceOp premul_sum(double scale) { return {Kind::premul_sum, scale, nullptr}; }
  static ReduceOp of(const UserReduction& user) { return {Kind::user, 1, &user}; }
  friend bool operator==(const ReduceOp&, const ReduceOp&) = default;
};
inline constexpr int kReduceKindCount = 13;
inline constexpr ReduceOp ReduceOp::sum{Kind::sum};
inline constexpr ReduceOp ReduceOp::avg{Kind::avg};
inline constexpr ReduceOp ReduceOp::min{Kind::min};
inline constexpr ReduceOp ReduceOp::max{Kind::max};
inline constexpr ReduceOp ReduceOp::prod{Kind::prod};
inline constexpr ReduceOp ReduceOp::bit_and{Kind::bit_and};
inline constexpr ReduceOp ReduceOp::bit_or{Kind::bit_or};
inline constexpr ReduceOp ReduceOp::bit_xor{Kind::bit_xor};
inline constexpr ReduceOp ReduceOp::logical_and{Kind::logical_and};
inline constexpr ReduceOp ReduceOp::logical_or{Kind::logical_or};
inline constexpr ReduceOp ReduceOp::logical_xor{Kind::logical_xor};

/// "sum", "avg", …, "user".
std::string_view name(ReduceOp::Kind kind) noexcept;
inline std::string_view name(const ReduceOp& op) noexcept { return name(op.kind); }

/// The order in which elements are combined. `native`: the backend's own. `canonical`: a binary tree over the
/// rank index, split at the largest power of two below n (n = 3: (0+1)+2), the same bits on every backend. A
/// scan gives the result of this tree over the ranks that it combines, as if the group had no other ranks.
enum class Order : std::uint8_t { native, canonical };

}  // namespace weft
