// The trace of one rank in one group, in the forms that files have: JSON for `weft doctor trace` and for
// users, and Chrome's trace format for chrome://tracing and Perfetto. Pure functions. Any thread may call
// them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/base/error.hpp"

namespace weft {

enum class TracedState : std::uint8_t { pending, done, failed };
std::string_view name(TracedState state) noexcept;

/// Times are nanoseconds since the group was made.
struct TracedCall {
  Op op = Op::none;
  std::uint64_t call = 0;  ///< the call's number among the group's collectives, or among its messages
  DType dtype = DType::u8;
  std::int64_t count = 0;  ///< elements of the longer of `in` and `out`
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  int peer = -1;  ///< the root of a collective, or the other rank of a message
  std::int64_t posted_ns = 0;
  std::int64_t finished_ns = 0;  ///< 0: not finished, or finished at once, without a wait
  TracedState state = TracedState::pending;
};

struct Trace {
  std::string group, id;  ///< the group's name, and a text that identifies the group in its job
  int rank = 0, size = 1;
  std::string backend, host;
  std::string boot;  ///< equal for traces with the same monotonic clock
  int process = 0, process_rank = 0;
  /// Two clocks at the time when the group was made. The first is used to align the ranks of a host, and the
  /// second to align the hosts.
  std::int64_t began_monotonic_ns = 0, began_realtime_ns = 0;
  std::int64_t taken_ns = 0;
  std::uint64_t forgotten = 0;      ///< earlier calls that the trace does not contain
  std::vector<TracedCall> calls{};  ///< in the order in which they were posted
  struct Failed {
    Failure why;
    std::int64_t noticed_ns = 0;
  };
  std::optional<Failed> failure{};
};

/// Returns one JSON object. `events`: adds a key traceEvents, so that the file also opens in Chrome's
/// viewers.
std::string to_json(const Trace& trace, bool events = false);
/// Puts all traces on one time line, one process per rank. `shifts`: nanoseconds to add to each trace's
/// times. If empty, the monotonic clock is used.
std::string to_chrome(std::span<const Trace> traces, std::span<const std::int64_t> shifts = {});

}  // namespace weft
