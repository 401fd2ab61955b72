#include "backends/recorder.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "backends/op_table.hpp"

namespace weft {

std::string Recorder::json(const std::string& group, int rank, int size) const {
  std::string escaped;
  for (const char c : group) {
    if (c == '"' || c == '\\') escaped += '\\';
    escaped += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  }
  std::string out =
      fmt::format("{{\"group\": \"{}\", \"rank\": {}, \"size\": {}, \"calls\": [", escaped, rank, size);
  const std::uint64_t next = next_.load(std::memory_order_acquire), n = std::min(next, kEntries);
  for (std::uint64_t k = 0; k < n; ++k) {
    const Entry& e = entries_[(next - n + k) % kEntries];
    const std::uint64_t word = e.word.load(std::memory_order_relaxed);
    const Op op = static_cast<Op>(word & 0xff);
    const auto state = static_cast<State>((word >> 24) & 0xff);
    const auto peer = static_cast<std::int32_t>(word >> 32);
    const std::uint64_t finished = e.finished.load(std::memory_order_relaxed);
    out += fmt::format("{}\n  {{\"op\": \"{}\", \"call\": {}, \"dtype\": \"{}\", \"count\": {}", k ? "," : "",
                       name(op), e.call.load(std::memory_order_relaxed),
                       name(static_cast<DType>((word >> 8) & 0xff)), e.count.load(std::memory_order_relaxed));
    if (row(op).reduces)
      out += fmt::format(", \"reduce\": \"{}\"", name(static_cast<ReduceOp::Kind>((word >> 16) & 0xff)));
    if (peer >= 0) out += fmt::format(", \"{}\": {}", row(op).collective ? "root" : "peer", peer);
    out += fmt::format(", \"posted_ns\": {}, \"finished_ns\": {}, \"state\": \"{}\"}}",
                       scale_.nanoseconds(e.posted.load(std::memory_order_relaxed)),
                       finished ? scale_.nanoseconds(finished) : 0,
                       state == State::pending ? "pending"
                       : state == State::done  ? "done"
                                               : "failed");
  }
  return out + "\n]}\n";
}

}  // namespace weft
