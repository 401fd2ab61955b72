#include "backends/shm/group.hpp"

#include <fmt/format.h>

#include "backends/op_table.hpp"

namespace weft::shm {
namespace {

constexpr auto kMapPatience = std::chrono::milliseconds(50);  // for a stopped owner of a new segment

}  // namespace

Buffer Group::publish(const std::byte* data, std::size_t bytes, int reader) const noexcept {
  if (bytes == 0) return {Buffer::none, 0, 0};
  if (one_process) return {Buffer::pointer, 0, reinterpret_cast<std::uint64_t>(data)};
  const std::optional<Place> place = context.arena().find(data, bytes);
  if (!place) return {Buffer::foreign, 0, 0};
  const std::uint32_t segments = context.arena().segment_count();
  if (mine().segments.load(std::memory_order_relaxed) != segments)
    mine().segments.store(segments, std::memory_order_seq_cst);
  for (int r = 0; r < size; ++r)  // who reads it has mapped it, or may not be sent there
    if (r != rank && (reader == kEverybody || reader == r) &&
        control.mapped(r, rank).load(std::memory_order_seq_cst) <= place->segment)
      return {Buffer::foreign, 0, 0};
  return {Buffer::shared, place->segment, place->offset};
}

void Group::map_news() const noexcept {
  if (one_process) return;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    std::atomic<std::uint32_t>& mapped = control.mapped(rank, r);
    const std::uint32_t wanted = of(r).segments.load(std::memory_order_seq_cst);
    std::uint32_t have = mapped.load(std::memory_order_relaxed);
    if (have >= wanted) continue;
    Neighbour& home = *homes[static_cast<std::size_t>(r)];
    home.map_segments(wanted, Deadline::after(kMapPatience));
    while (have < wanted && home.segment(have) != nullptr) ++have;
    mapped.store(have, std::memory_order_seq_cst);
  }
}

bool Group::enter(std::uint64_t call) const noexcept {
  mine().active.store(call + 1, std::memory_order_seq_cst);
  if (!aborted()) return true;
  leave();
  return false;
}

std::uint64_t call_word(const OpState& s, Path path) noexcept {
  const bool reduces = row(s.op).reduces;
  return static_cast<std::uint64_t>(s.op) | static_cast<std::uint64_t>(s.dtype) << 8 |
         static_cast<std::uint64_t>(reduces ? static_cast<unsigned>(s.reduce.kind) : 0u) << 16 |
         static_cast<std::uint64_t>(s.order) << 24 | static_cast<std::uint64_t>(path) << 28 |
         static_cast<std::uint64_t>(s.root + 1) << 32;
}

std::string describe(int rank, std::uint64_t word, std::int64_t count, std::uint64_t call) {
  const auto op = static_cast<Op>(word & 0xff);
  const auto dtype = static_cast<DType>((word >> 8) & 0xff);
  const auto reduce = static_cast<ReduceOp::Kind>((word >> 16) & 0xff);
  std::string text = fmt::format("rank {} called {}", rank, name(op));
  if (op != Op::barrier) text += fmt::format(" {} x{}", name(dtype), count);
  if (row(op).reduces) text += fmt::format(" {}", name(reduce));
  if (row(op).rooted != Rooted::no)
    text += fmt::format(" root {}", static_cast<std::int64_t>(word >> 32) - 1);
  if (const auto path = static_cast<Path>((word >> 28) & 0xf); path != Path::automatic)
    text += fmt::format(" by path {}", path == Path::inline_only ? "inline"
                                       : path == Path::direct    ? "direct"
                                                                 : "staged");
  return text + fmt::format(" [call {}]", call);
}

}  // namespace weft::shm
