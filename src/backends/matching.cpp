#include "weft/backends/matching.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "weft/base/env.hpp"

namespace weft {

UnexpectedLimits UnexpectedLimits::from_env() {
  UnexpectedLimits limits;
  const auto read = [](const char* name, std::int64_t& value) {
    value = env::get_int(name, 1, std::int64_t{1} << 48).value_or(value);
  };
  read("WEFT_UNEXPECTED_MESSAGES", limits.messages);
  read("WEFT_UNEXPECTED_BYTES", limits.bytes);
  return limits;
}

Failure message_mismatch(const OpState& recv, int rank, DType dtype, std::int64_t count) {
  return {.code = ErrorCode::mismatch,
          .text = fmt::format("rank {} sent {} x{} with tag {}, rank {} receives {} x{}", recv.peer,
                              name(dtype), count, recv.tag, rank, name(recv.dtype), recv.out_count),
          .op = Op::recv,
          .call = recv.call,
          .ranks = {std::min(recv.peer, rank), std::max(recv.peer, rank)}};
}

Failure too_many_unexpected(const UnexpectedLimits& limits, std::int64_t held, std::int64_t held_bytes,
                            int rank, int source, std::int32_t tag, std::int64_t bytes) {
  const bool number = held >= limits.messages;
  return {
      .code = ErrorCode::system,
      .text = fmt::format("rank {} has no room for a message of {} bytes with tag {} from rank {}: it holds "
                          "{} messages of {} bytes that it has not received yet, and {} is {}",
                          rank, bytes, tag, source, held, held_bytes,
                          number ? "WEFT_UNEXPECTED_MESSAGES" : "WEFT_UNEXPECTED_BYTES",
                          number ? limits.messages : limits.bytes),
      .ranks = {std::min(source, rank), std::max(source, rank)}};
}

}  // namespace weft
