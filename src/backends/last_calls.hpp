// The last calls of the ranks of a group: how a transport records them, and how texts state them. Pure
// functions and plain values; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "weft/backends/call_record.hpp"
#include "weft/base/last_call.hpp"

namespace weft {

/// Returns the last call of a rank, from its record. Keeps a mark of kUsersCall.
inline LastCall last_call_of(int rank, LastCall::State state, const CallRecord& record) noexcept {
  LastCall c{.rank = rank, .state = state};
  c.op = record.op;
  c.dtype = record.dtype;
  c.reduce = record.reduce;
  c.root = record.root;
  c.count = record.count;
  c.call = record.call;
  if (state == LastCall::State::in_flight) c.oldest = c.call;
  return c;
}
/// Describes a message of the user in which a rank waits. Its peer is -1 if the call names no single rank.
inline LastCall::Message message_of(const OpState& s) noexcept {
  return {.op = s.op,
          .dtype = s.dtype,
          .peer = std::max(s.peer, -1),
          .tag = s.tag,
          .count = s.op == Op::send ? s.in_count : s.out_count};
}
/// Returns false for parts of composed calls, which are messages, too, but are not reported.
inline bool is_users_message(const OpState& s) noexcept { return s.user == nullptr && s.tag >= 0; }

/// Returns all last calls as one sentence of bounded length. Ranks with equal calls are grouped, and ranks
/// that are behind come first: "last calls: rank 3 finished barrier [call 16]; ranks 0, 1, 2 are in
/// all_reduce f32 x4096 sum [call 17]". Returns "" if nothing is known of any rank.
std::string tell_last_calls(std::span<const LastCall> calls);

/// "all_reduce: rank 1 left the group without it". It is for ranks for which a call waits and that ended
/// their group instead of calling it. Op::none: the caller names the operation.
std::string left_text(Op op, std::span<const int> ranks);

}  // namespace weft
