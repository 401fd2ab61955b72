#include "backends/shm/collectives/staged_path.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "backends/call_word.hpp"
#include "base/mutant.hpp"
#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"

namespace weft::shm {

// Returns whether peers read data that this rank stages.
bool StagedPath::gives(const OpState& s) const noexcept {
  const OpRow r = row(s.op);
  return r.rooted == Rooted::no || r.reduces || (group_.rank == s.root) == is_from_root(s);
}

// Returns whether this rank copies data out of the buffers.
bool StagedPath::takes(const OpState& s) const noexcept {
  const OpRow r = row(s.op);
  if (s.op == Op::exscan && group_.rank == 0) return false;  // the rank fills in the identity
  return (is_sliced(s) || !r.reduces) && (r.rooted != Rooted::out_at_root || group_.rank == s.root);
}

// Returns the longest block of all ranks, in elements. Returns -1, and the group has failed, if a rank has
// published a block that fits in no memory.
std::int64_t StagedPath::longest_block(const OpState& s) const noexcept {
  if (const BufferBlock* const blocks = s.in_blocks ? s.in_blocks : s.out_blocks) {
    const std::int64_t most = (std::int64_t{1} << 56) / size_bytes(s.dtype);
    std::int64_t longest = 0;
    for (int r = 0; r < group_.size; ++r) {
      longest = std::max(longest, blocks[r].count);
      if (r == group_.rank) continue;
      const std::int64_t theirs = read_once(group_.control.detail(r, s.call).longest);
      if (theirs < 0 || theirs > most) {
        raise(group_, damaged(r, "the elements of its longest block", theirs, fmt::format("0 to {}", most),
                              s.op, s.call));
        return -1;
      }
      longest = std::max(longest, theirs);
    }
    return longest;
  }
  if (is_sliced(s)) return (s.in_count + group_.size - 1) / group_.size;
  return s.op == Op::all_to_all ? s.in_count / group_.size : agreed_count(s, group_.size);
}

// Chooses how many elements of a block one round moves, and the number of rounds. A small message takes one
// round, in which its parts are equal.
Step StagedPath::plan(OpState& s) noexcept {
  CallState& st = state(s);
  st.phase = Phase::staged;
  const std::int64_t n = group_.size, element = size_bytes(s.dtype), line = 64 / element;
  const std::int64_t longest = longest_block(s);
  if (longest < 0) return Step::failed;
  const bool apart = has_block_per_rank(s) || is_sliced(s);
  const std::int64_t slot_bytes = static_cast<std::int64_t>(kStageBytes) / (apart ? n - 1 : 1) / 64 * 64;
  st.part = std::min((longest + line - 1) / line * line, slot_bytes / element);
  const std::int64_t window = is_sliced(s) ? st.part * n : st.part;
  const std::int64_t count = is_sliced(s) ? s.in_count : longest;
  st.rounds = count == 0 ? 0 : static_cast<std::uint64_t>((count + window - 1) / window);
  st.base = rounds_;
  rounds_ += st.rounds;
  st.staged = gives(s) ? 0 : st.rounds;
  st.reduced = row(s.op).reduces ? 0 : st.rounds;
  st.copied = takes(s) ? 0 : st.rounds;
  return Step::advanced;
}

// Returns the part of a block that a round moves. For a reduction, it is the slice that `owner` combines in
// this round.
BufferBlock StagedPath::piece(const OpState& s, BufferBlock block, int owner,
                              std::uint64_t round) const noexcept {
  const CallState& st = state(s);
  const auto t = static_cast<std::int64_t>(round - st.base);
  if (is_sliced(s)) block = {0, s.in_count};
  const std::int64_t begin = std::min(block.count, (is_sliced(s) ? t * group_.size + owner : t) * st.part);
  return {block.offset + begin, std::min(st.part, block.count - begin)};
}

// Returns the slot into which rank `from` writes data for rank `to`.
std::byte* StagedPath::slot(const OpState& s, int from, int to, std::uint64_t round) const noexcept {
  const std::int64_t index = has_block_per_rank(s) || is_sliced(s) ? (to < from ? to : to - 1) : 0;
  return group_.control.stage(from, round) + index * state(s).part * size_bytes(s.dtype);
}

// Returns the slot into which the owner of a slice writes its sum: a slot that it has read.
std::byte* StagedPath::sum_slot(const OpState& s, int owner, std::uint64_t round) const noexcept {
  return slot(s, owner == 0 ? 1 : 0, owner, round);
}

// Returns whether this rank's next round waits for rank `r`, because r has not yet read or written buffers,
// parts or sums. Returns false if this rank needs nothing from r, or if there is no further round.
bool StagedPath::delays_staging(const OpState& s, int r) const noexcept {
  const CallState& st = state(s);
  // The buffer of kRounds ago is free when its readers have copied it. If it belonged to an earlier call, any
  // rank may have been a reader.
  return st.staged < st.rounds && r != group_.rank && (st.staged < kRounds || gets(s, r, group_.rank)) &&
         group_.of(r).copied.load(std::memory_order_seq_cst) + kRounds +
                 (WEFT_MUTANT("stage_early") ? 1 : 0) <=
             st.base + st.staged;
}

bool StagedPath::delays_reducing(const OpState& s, int r) const noexcept {
  const CallState& st = state(s);
  return st.reduced < st.rounds && r != group_.rank &&
         group_.of(r).staged.load(std::memory_order_seq_cst) <= st.base + st.reduced;
}

bool StagedPath::delays_copying(const OpState& s, int r) const noexcept {
  const CallState& st = state(s);
  if (st.copied == st.rounds || r == group_.rank || !gets(s, group_.rank, r)) return false;
  const RankBlock& block = group_.of(r);
  return (row(s.op).reduces ? block.reduced : block.staged).load(std::memory_order_seq_cst) <=
         st.base + st.copied;
}

bool StagedPath::stage_round(OpState& s) noexcept {
  CallState& st = state(s);
  if (st.staged == st.rounds) return false;
  const std::uint64_t round = st.base + st.staged;
  // Sums that this rank has not copied yet may lie in its own buffer.
  if (st.copied + kRounds <= st.staged) return false;
  for (int r = 0; r < group_.size; ++r)
    if (delays_staging(s, r)) return false;
  const std::int64_t element = size_bytes(s.dtype);
  for (int to = 0; to < group_.size; ++to) {
    if (to == group_.rank || !gets(s, to, group_.rank)) continue;
    const BufferBlock b = piece(s, in_block(s, to, group_.size), to, round);
    if (b.count > 0)
      copy_bytes(slot(s, group_.rank, to, round), s.in + b.offset * element, b.count * element);
    if (!has_block_per_rank(s) && !is_sliced(s)) break;  // all other ranks read the same slot
  }
  ++st.staged;
  group_.mine().staged.store(round + 1, std::memory_order_release);
  group_.wake_all();
  return true;
}

// Writes each rank's prefix over that rank's input, in that rank's own buffer.
void StagedPath::scan_round(const OpState& s, BufferBlock own, std::uint64_t round) noexcept {
  for (int r = 0; r < group_.size; ++r)
    operands_.outs[static_cast<std::size_t>(r)] =
        r == group_.rank ? s.out + own.offset * size_bytes(s.dtype) : slot(s, r, group_.rank, round);
  if (s.op == Op::exscan) operands_.outs[0] = nullptr;
  scan(s.dtype, s.reduce, s.op == Op::exscan, operands_.ins, operands_.outs, own.count);
}

bool StagedPath::reduce_round(OpState& s) noexcept {
  CallState& st = state(s);
  if (st.reduced == st.rounds || st.staged <= st.reduced) return false;
  const std::uint64_t round = st.base + st.reduced;
  for (int r = 0; r < group_.size; ++r)
    if (delays_reducing(s, r)) return false;
  const std::int64_t element = size_bytes(s.dtype);
  const BufferBlock own = in_block(s, group_.rank, group_.size), b = piece(s, own, group_.rank, round);
  if (b.count > 0) {
    for (int r = 0; r < group_.size; ++r) {
      operands_.ins[static_cast<std::size_t>(r)] =
          r == group_.rank ? s.in + b.offset * element : slot(s, r, group_.rank, round);
    }
    if (is_scan(s.op)) {
      scan_round(s, b, round);
    } else {
      std::size_t outs = 0;
      if (s.out_count > 0)
        operands_.outs[outs++] = s.out + (b.offset - (is_sliced(s) ? 0 : own.offset)) * element;
      if (s.op == Op::all_reduce || s.out_count == 0)
        operands_.outs[outs++] = sum_slot(s, group_.rank, round);
      reduce(s.dtype, s.reduce, operands_.ins, {operands_.outs.data(), outs}, b.count);
    }
  }
  ++st.reduced;
  group_.mine().reduced.store(round + 1, std::memory_order_release);
  // this rank has read the slots
  if (!takes(s)) group_.mine().copied.store(round + 1, std::memory_order_release);
  group_.wake_all();
  return true;
}

bool StagedPath::copy_round(OpState& s) noexcept {
  CallState& st = state(s);
  const bool sums = row(s.op).reduces;
  if (st.copied == st.rounds || (sums ? st.reduced : st.staged) <= st.copied) return false;
  const std::uint64_t round = st.base + st.copied;
  for (int r = 0; r < group_.size; ++r)
    if (delays_copying(s, r)) return false;
  const std::int64_t element = size_bytes(s.dtype);
  for (int from = 0; from < group_.size; ++from) {
    if (!gets(s, group_.rank, from) || (sums && from == group_.rank))
      continue;  // this rank's own sum is already in `out`
    const BufferBlock to = piece(s, out_block(s, from, group_.size), from, round);
    const std::byte* source = is_scan(s.op) ? slot(s, group_.rank, from, round)
                              : sums        ? sum_slot(s, from, round)
                                            : slot(s, from, group_.rank, round);
    if (from == group_.rank)
      source = s.in + piece(s, in_block(s, from, group_.size), from, round).offset * element;
    std::byte* const out = s.out + to.offset * element;
    if (to.count > 0 && out != source) copy_bytes(out, source, to.count * element, streams(s));
  }
  ++st.copied;
  group_.mine().copied.store(round + 1, std::memory_order_release);
  group_.wake_all();
  return true;
}

Step StagedPath::step(OpState& s) noexcept {
  CallState& st = state(s);
  bool moved = false;
  for (std::int64_t room = kChunkBytes, round = st.part * group_.size * size_bytes(s.dtype);
       room > 0 && (copy_round(s) || reduce_round(s) || stage_round(s)); room -= round)
    moved = true;
  if (st.copied < st.rounds || st.reduced < st.rounds || st.staged < st.rounds)
    return moved ? Step::advanced : Step::pending;
  if (s.op == Op::exscan && group_.rank == 0) fill_identity(s.dtype, s.reduce.kind, s.out, s.out_count);
  // Rounds in which this rank took no part count as done, so that the counters of all ranks are equal in
  // later calls.
  RankBlock& block = group_.mine();
  const std::uint64_t level = st.base + st.rounds;
  for (auto* counter : {&block.staged, &block.reduced, &block.copied})
    if (counter->load(std::memory_order_relaxed) < level) counter->store(level, std::memory_order_release);
  arrivals_.finish(s);
  return Step::done;
}

}  // namespace weft::shm
