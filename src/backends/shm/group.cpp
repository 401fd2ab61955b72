#include "backends/shm/group.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "backends/call_word.hpp"
#include "base/shared_words.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::shm {
namespace {

// A rank may have to request a new segment from its owner, which may be stopped. The rank waits this long for
// an answer, and asks again after the pause.
constexpr auto kMapPatience = std::chrono::milliseconds(50);
constexpr auto kMapPause = std::chrono::seconds(1);

// the bit of a call word's note at which the forced path begins; the order is below it
constexpr int kPathBit = 4;

std::string_view forced(Path path) noexcept {
  switch (path) {
    case Path::automatic: break;
    case Path::inline_only: return "inline";
    case Path::direct: return "direct";
    case Path::staged: return "staged";
    case Path::single: return "single";
  }
  return {};
}

}  // namespace

Buffer Group::publish(const std::byte* data, std::size_t bytes, int reader) const noexcept {
  if (bytes == 0) return {Buffer::none, 0, 0};
  if (one_process) return {Buffer::pointer, 0, reinterpret_cast<std::uint64_t>(data)};
  const Buffer foreign = single_copy != SingleCopy::off
                             ? Buffer{Buffer::remote, 0, reinterpret_cast<std::uint64_t>(data)}
                             : Buffer{Buffer::foreign, 0, 0};
  const std::optional<SegmentPlace> place = arena_of(context).find(data, bytes);
  if (!place) return foreign;
  show_segments();
  for (int r = 0; r < size; ++r)  // all readers must have mapped the segment
    if (r != rank && (reader == kEverybody || reader == r) &&
        control.mapped(r, rank).load(std::memory_order_seq_cst) <= place->segment)
      return foreign;
  return {Buffer::shared, place->segment, place->offset};
}

void Group::show_segments() const noexcept {
  const std::uint32_t segments = arena_of(context).segment_count();
  if (mine().segments.load(std::memory_order_relaxed) == segments) return;
  host_peers_of(context).show_segments();
  mine().segments.store(segments, std::memory_order_seq_cst);
}

void Group::map_news() const noexcept {
  for (int r = 0; r < size; ++r) map_news(r);
}

void Group::map_news(int r) const noexcept {
  if (one_process || r == rank) return;
  std::atomic<std::uint32_t>& mapped = control.mapped(rank, r);
  const std::uint32_t wanted = of(r).segments.load(std::memory_order_seq_cst);
  std::uint32_t have = mapped.load(std::memory_order_relaxed);
  if (have >= wanted) return;
  Clock::time_point& not_before = ask_again[static_cast<std::size_t>(r)];
  if (Clock::now() < not_before) return;
  PeerProcess& process = *processes[static_cast<std::size_t>(r)];
  if (!process.map_segments(wanted, Deadline::after(kMapPatience))) not_before = Clock::now() + kMapPause;
  while (have < wanted && process.segment(have) != nullptr) ++have;
  mapped.store(have, std::memory_order_seq_cst);
}

void Group::say_damaged(const OpState& s, int r, const Buffer& b, std::int64_t skip,
                        std::int64_t bytes) const noexcept {
  raise(*this, damaged(r, "the place of a buffer",
                       fmt::format("{} bytes at {} from (kind {}, segment {}, offset {})", bytes, skip,
                                   static_cast<std::uint32_t>(b.kind), b.segment, b.offset),
                       "bytes of a segment that is mapped", s.op, s.call));
}

bool Group::enter(std::uint64_t call, std::uint64_t how) const noexcept {
  mine().active.store((call + 1) | how, std::memory_order_seq_cst);
  if (!aborted()) return true;
  leave();
  return false;
}

void Control::touch(int r) const noexcept {
  const auto touch = [](std::atomic<std::uint64_t>& word) { word.fetch_add(0, std::memory_order_relaxed); };
  RankBlock& block = rank(r);
  touch(block.consumed);
  touch(block.inbox);
  for (Arrival& a : block.arrivals) touch(a.sequence);
}

std::uint64_t call_word(const OpState& s, Path path) noexcept {
  const auto reduce = row(s.op).reduces ? s.reduce.kind : ReduceOp::Kind::sum;
  const auto note = static_cast<unsigned>(s.order) | static_cast<unsigned>(path) << kPathBit;
  return CallWord(s.op, s.dtype, reduce, note, s.root).bits();
}

std::uint64_t elaborate(const Group& g, const OpState& s, bool small) noexcept {
  const bool reduces = row(s.op).reduces;
  if (!reduces && s.in_blocks == nullptr && s.out_blocks == nullptr) return 0;
  Detail& d = g.control.detail(g.rank, s.call);
  if (reduces && s.reduce.kind == ReduceOp::Kind::premul_sum) d.scale = s.reduce.scale;
  if (reduces && s.reduce.kind == ReduceOp::Kind::user) {
    const std::string& name = s.reduce.user->name;
    d.user[name.copy(d.user, sizeof(d.user) - 1)] = '\0';
  }
  if (const BufferBlock* const blocks = s.in_blocks ? s.in_blocks : s.out_blocks) {
    d.longest = 0;
    d.small = small ? 1 : 0;
    for (int r = 0; r < g.size; ++r) {
      d.blocks()[r] = blocks[r];
      d.longest = std::max(d.longest, blocks[r].count);
    }
  }
  return detail_hash(s, g.size);
}

CallRecord record_of(const Group& g, int r, std::uint64_t call) noexcept {
  const Arrival& a = g.of(r).arrivals[call % kRing];
  const CallWord word(read_once(a.word));
  return {.call = call,
          .count = read_once(a.count),
          .hash = read_once(a.detail),
          .root = word.rank(),
          .op = known_or(word.op(), static_cast<Op>(kOpCount - 1), Op::none),
          .dtype = known_or(word.dtype(), static_cast<DType>(kDTypeCount - 1), DType::u8),
          .reduce =
              known_or(word.reduce(), static_cast<ReduceOp::Kind>(kReduceKindCount - 1), ReduceOp::Kind::sum),
          .order = known_or(static_cast<Order>(word.note() & ((1u << kPathBit) - 1)), Order::canonical,
                            Order::native)};
}

std::string describe(const Group& g, int r, std::uint64_t call, int block) {
  const CallRecord record = record_of(g, r, call);
  const Detail& d = g.control.detail(r, call);
  const std::string user = text_in(d.user);
  CallDetail detail;
  detail.block = block;
  if (block >= 0) detail.block_count = read_once(d.blocks()[block].count);
  if (row(record.op).reduces && record.reduce == ReduceOp::Kind::premul_sum) detail.scale = d.scale;
  if (row(record.op).reduces && record.reduce == ReduceOp::Kind::user) detail.user = user;
  const CallWord word(read_once(g.of(r).arrivals[call % kRing].word));
  detail.path = forced(static_cast<Path>(word.note() >> kPathBit));
  return describe(r, record, detail);
}

}  // namespace weft::shm
