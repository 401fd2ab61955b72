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
    unknown,    ///< nothing is known about the rank's calls
    none,       ///< the rank has called no collective of this group
    called,     ///< the rank has called this collective; it is not known whether the rank has finished it
    in_flight,  ///< the rank has called this collective and has not finished it
    finished,   ///< the rank has finished this collective and has not called another one
  };
  std::int32_t rank = -1;
  State state = State::unknown;
  bool answered = false;  ///< the rank has answered the roll-call before the time-out
  Op op = Op::none;
  DType dtype = DType::u8;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  std::int32_t root = -1;
  /// elements of the block that must be equal on all ranks; 0 if there is no such block
  std::int64_t count = 0;
  std::uint64_t call = kNoCall;  ///< the collective's number in the group
  /// For state in_flight: the number of the first collective that the rank has not finished. It is this
  /// collective or an earlier one.
  std::uint64_t oldest = kNoCall;
  /// The oldest message for which the rank waits, if the rank has reported one.
  struct Message {
    Op op = Op::none;  ///< send or recv; none if no message is known
    DType dtype = DType::u8;
    std::int32_t peer = -1;
    std::int32_t tag = 0;
    std::int64_t count = 0;
    friend bool operator==(const Message&, const Message&) = default;
  } message{};
};

}  // namespace weft
