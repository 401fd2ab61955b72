// The last call of a rank of a group. The Error of a time-out has a LastCall for every rank of its group.
// Plain values; any thread.
#pragma once

#include <cstdint>

#include "weft/base/dtype.hpp"
#include "weft/base/op.hpp"

namespace weft {

inline constexpr std::uint64_t kNoCall = ~std::uint64_t{0};

/// The last collective that a rank called in a group, as far as another rank knows. Trivially copyable, of
/// fixed size: ranks of one build may send its bytes.
struct LastCall {
  enum class State : std::uint8_t {
    unknown,    ///< nothing is known of the rank's calls
    none,       ///< it has called no collective of this group
    called,     ///< it has called this collective; whether it has finished it is not known
    in_flight,  ///< it has called this collective and not finished it
    finished,   ///< it has finished this collective and called no other
  };
  std::int32_t rank = -1;
  State state = State::unknown;
  bool answered = false;  ///< the rank answered when it was asked, before the time-out
  Op op = Op::none;
  DType dtype = DType::u8;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  std::int32_t root = -1;
  std::int64_t count = 0;        ///< elements of the block that all ranks give alike; 0 if there is none
  std::uint64_t call = kNoCall;  ///< the collective's number in the group
  /// in_flight: the first call that the rank has not finished: this one, or an earlier one.
  std::uint64_t oldest = kNoCall;
  /// The oldest message for which the rank waits, if the rank has reported one.
  struct Message {
    Op op = Op::none;  ///< send or recv; none: no message is known
    DType dtype = DType::u8;
    std::int32_t peer = -1;
    std::int32_t tag = 0;
    std::int64_t count = 0;
    friend bool operator==(const Message&, const Message&) = default;
  } message{};
};

}  // namespace weft
