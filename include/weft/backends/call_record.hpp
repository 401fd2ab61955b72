// The description of a rank's call, in a form that can be sent. Some libraries of transports do not compare
// calls. Such a transport exchanges these descriptions before a collective, because a mismatch inside the
// library would lead to a crash or to wrong numbers. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "weft/backends/backend.hpp"
#include "weft/base/error.hpp"

namespace weft {

/// A bit that marks the number of the user's call. It is set if the transport sees only the parts of a
/// composed call: these parts have numbers of their own.
inline constexpr std::uint64_t kUsersCall = std::uint64_t{1} << 62;

/// All values that must be equal on all ranks. For a part of a composed call the record holds the values of
/// the user's call. Trivially copyable, of fixed size. The transport sends the bytes, and compares them.
struct CallRecord {
  std::uint64_t call = 0;  ///< the call's number; for a composed call it is marked with kUsersCall
  std::int64_t count = 0;  ///< elements of the block that must be equal on all ranks
  std::uint64_t hash = 0;  ///< hash of count vectors, a scale, the name of a user's reduction
  std::int32_t root = -1;
  Op op = Op::none;
  DType dtype = DType::u8;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  Order order = Order::native;
  friend bool operator==(const CallRecord&, const CallRecord&) = default;
};

/// The record of a collective in a group of `size` ranks.
CallRecord record_of(const OpState& s, int size);

/// The message of one rank to another before a collective: the sender's record, and the numbers that concern
/// only these two ranks. Trivially copyable, of fixed size.
struct Announcement {
  CallRecord record{};
  std::int64_t gives = 0;    ///< all_to_all_v: elements from the sender of this message to its receiver
  std::int64_t expects = 0;  ///< all_to_all_v: elements in the other direction
  std::int64_t largest = 0;  ///< all_to_all_v: the largest block that the sender gives
};

/// The Announcement of a collective in a group of `size` ranks, without the numbers for one receiver, which
/// announce_to() adds.
Announcement announcement_of(const OpState& s, int size);
void announce_to(Announcement& a, const OpState& s, int peer, int size) noexcept;

/// The call, or the message, as text: "all_gather f32 x1000".
std::string what(const OpState& s, int size);
/// "rank 1 called all_gather f32 x1000 [call 17]"
std::string describe(int rank, const CallRecord& record);
/// The failure that names both calls: `rank 1 called … [call 17], rank 0 … [call 17]`.
Failure mismatch(int peer, const CallRecord& theirs, int rank, const CallRecord& own);
/// The failure of an all_to_all_v in which rank `source` sends another number of elements than rank `target`
/// expects.
Failure mismatch_of_blocks(const CallRecord& call, int source, std::int64_t sent, int target,
                           std::int64_t expected);

}  // namespace weft
