#include "weft/backends/matching.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "backends/exchange/head.hpp"
#include "weft/base/env.hpp"
#include "weft/base/name_ranks.hpp"

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
  return message_mismatch(recv, recv.peer, rank, dtype, count);
}
Failure message_mismatch(const OpState& recv, int source, int rank, DType dtype, std::int64_t count) {
  return message_mismatch(recv, source, rank, dtype, count, nullptr);
}
Failure message_mismatch(const OpState& recv, int source, int rank, DType dtype, std::int64_t count,
                         const std::byte* elements) {
  if (recv.tag == kExchangeTag)
    return {.code = ErrorCode::mismatch,
            .text = fmt::format("{}: {}", name(Op::exchange),
                                exchange_difference(source, words_of_part(elements, dtype, count), rank,
                                                    words_of_part(recv.out, recv.dtype, recv.out_count))),
            .op = Op::exchange,
            .call = recv.call,
            .ranks = {std::min(source, rank), std::max(source, rank)}};
  return {.code = ErrorCode::mismatch,
          .text = fmt::format("rank {} sent {} x{} with tag {}, rank {} receives {} x{}", source, name(dtype),
                              count, recv.tag, rank, name(recv.dtype), recv.out_count),
          .op = Op::recv,
          .call = recv.call,
          .ranks = {std::min(source, rank), std::max(source, rank)}};
}

std::vector<int> awaited_sources(const OpState& recv, int rank, int size) {
  if (recv.peer != any_source) return {recv.peer};
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r)
    if (r != rank || size == 1) ranks.push_back(r);
  return ranks;
}

std::string not_received(const OpState& send) {
  if (send.tag == kExchangeTag) return fmt::format("rank {} has not received its part", send.peer);
  return fmt::format("rank {} has not received it (tag {})", send.peer, send.tag);
}

std::string not_sent(const OpState& recv, std::span<const int> ranks, int rank, int size) {
  if (recv.tag == kExchangeTag) return fmt::format("rank {} has not sent its part", recv.peer);
  if (recv.peer != any_source)
    return recv.op == Op::recv ? fmt::format("rank {} has not sent it (tag {})", recv.peer, recv.tag)
                               : fmt::format("rank {} has sent no message with tag {}", recv.peer, recv.tag);
  std::string text = fmt::format("no rank has sent a message with tag {}", recv.tag);
  if (ranks.size() < awaited_sources(recv, rank, size).size())
    text += fmt::format("; {} could", name_ranks(ranks));
  return text;
}

std::string not_received(std::span<const std::pair<int, std::int32_t>> kept) {
  constexpr std::size_t kMost = 4;
  std::string text;
  for (const auto& [source, tag] : kept.first(std::min(kept.size(), kMost)))
    text += fmt::format("{} tag {} from rank {}", text.empty() ? "; messages that were not received:" : ",",
                        tag, source);
  return kept.size() > kMost ? text + fmt::format(" and {} more", kept.size() - kMost) : text;
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
