// The staged path, for memory that only its owner can reach: through buffers of the group, in rounds.
//
// A round moves one part of each block. Where `in` has a block per rank, or each rank owns a slice of the
// sum, a rank stages what is for each peer into a slot of its own; otherwise all read the same. Moving
// operations are over when the peer has copied its slot. In reductions the owner combines the slots with its
// own part; of all_reduce and reduce it then writes the sum back into one of the slots, and who wants it
// copies the sums out. So an all-reduce of two ranks copies half of the message in and half of it out.
// Three counters per rank, which only grow, say how far it has staged, reduced and copied; kRounds rounds are
// under way at once.
#include <algorithm>

#include "backends/shm/collectives.hpp"
#include "base/mutant.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {

// Whether peers read what this rank stages.
bool Collectives::gives(const OpState& s) const noexcept {
  const OpRow r = row(s.op);
  return r.rooted == Rooted::no || r.reduces || (group_.rank == s.root) == from_root(s);
}

// Whether this rank copies anything out.
bool Collectives::takes(const OpState& s) const noexcept {
  const OpRow r = row(s.op);
  return (sliced(s) || !r.reduces) && (r.rooted != Rooted::out_at_root || group_.rank == s.root);
}

// Elements per block and round, and rounds. Small messages are spread evenly over one round.
void Collectives::plan(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t n = group_.size, element = size_bytes(s.dtype), line = 64 / element;
  std::int64_t longest = 0;  // block, of all ranks'
  if (s.in_blocks || s.out_blocks) {
    for (int r = 0; r < group_.size; ++r)
      longest = std::max(longest, group_.control.detail(r, s.call).longest);
  } else if (sliced(s)) {
    longest = (s.in_count + n - 1) / n;
  } else {
    longest = s.op == Op::all_to_all ? s.in_count / n : arrival(group_.rank, s).count;
  }
  const bool apart = parted(s) || sliced(s);
  const std::int64_t slot_bytes = static_cast<std::int64_t>(kStageBytes) / (apart ? n - 1 : 1) / 64 * 64;
  st.part = std::min((longest + line - 1) / line * line, slot_bytes / element);
  const std::int64_t window = sliced(s) ? st.part * n : st.part;
  const std::int64_t count = sliced(s) ? s.in_count : longest;
  st.rounds = count == 0 ? 0 : static_cast<std::uint64_t>((count + window - 1) / window);
  st.base = rounds_;
  rounds_ += st.rounds;
  st.staged = gives(s) ? 0 : st.rounds;
  st.reduced = row(s.op).reduces ? 0 : st.rounds;
  st.copied = takes(s) ? 0 : st.rounds;
}

// What a round moves of a block, or, of a sum, the owner's slice of the round's window.
Block Collectives::piece(const OpState& s, Block block, int owner, std::uint64_t round) const noexcept {
  const State& st = state(s);
  const auto t = static_cast<std::int64_t>(round - st.base);
  if (sliced(s)) block = {0, s.in_count};
  const std::int64_t begin = std::min(block.count, (sliced(s) ? t * group_.size + owner : t) * st.part);
  return {block.offset + begin, std::min(st.part, block.count - begin)};
}

// Where rank `from` puts what is for `to`.
std::byte* Collectives::slot(const OpState& s, int from, int to, std::uint64_t round) const noexcept {
  const std::int64_t index = parted(s) || sliced(s) ? (to < from ? to : to - 1) : 0;
  return group_.control.stage(from, round) + index * state(s).part * size_bytes(s.dtype);
}

// Where the owner of a slice puts its sum: a slot that it has read.
std::byte* Collectives::sum_slot(const OpState& s, int owner, std::uint64_t round) const noexcept {
  return slot(s, owner == 0 ? 1 : 0, owner, round);
}

// Whether this rank's next round waits for rank `r`, which has its buffers, parts or sums still to read or to
// write. False where it is not that rank's turn, or there is no such round.
bool Collectives::holds_up_staging(const OpState& s, int r) const noexcept {
  const State& st = state(s);
  // Is the buffer of kRounds ago free? Those who read it have copied it; of an earlier call, whoever did.
  return st.staged < st.rounds && r != group_.rank && (st.staged < kRounds || gets(s, r, group_.rank)) &&
         group_.of(r).copied.load(std::memory_order_seq_cst) + kRounds +
                 (WEFT_MUTANT("stage_early") ? 1 : 0) <=
             st.base + st.staged;
}

bool Collectives::holds_up_reducing(const OpState& s, int r) const noexcept {
  const State& st = state(s);
  return st.reduced < st.rounds && r != group_.rank &&
         group_.of(r).staged.load(std::memory_order_seq_cst) <= st.base + st.reduced;
}

bool Collectives::holds_up_copying(const OpState& s, int r) const noexcept {
  const State& st = state(s);
  if (st.copied == st.rounds || r == group_.rank || !gets(s, group_.rank, r)) return false;
  const RankBlock& block = group_.of(r);
  return (row(s.op).reduces ? block.reduced : block.staged).load(std::memory_order_seq_cst) <=
         st.base + st.copied;
}

bool Collectives::stage_round(OpState& s) noexcept {
  State& st = state(s);
  if (st.staged == st.rounds) return false;
  const std::uint64_t round = st.base + st.staged;
  // Sums that this rank has yet to copy may lie in its own buffer.
  if (st.copied + kRounds <= st.staged) return false;
  for (int r = 0; r < group_.size; ++r)
    if (holds_up_staging(s, r)) return false;
  const std::int64_t element = size_bytes(s.dtype);
  for (int to = 0; to < group_.size; ++to) {
    if (to == group_.rank || !gets(s, to, group_.rank)) continue;
    const Block b = piece(s, in_block(s, to, group_.size), to, round);
    if (b.count > 0)
      copy_bytes(slot(s, group_.rank, to, round), s.in + b.offset * element, b.count * element);
    if (!parted(s) && !sliced(s)) break;  // the others read the same
  }
  ++st.staged;
  group_.mine().staged.store(round + 1, std::memory_order_release);
  group_.wake_all();
  return true;
}

bool Collectives::reduce_round(OpState& s) noexcept {
  State& st = state(s);
  if (st.reduced == st.rounds || st.staged <= st.reduced) return false;
  const std::uint64_t round = st.base + st.reduced;
  for (int r = 0; r < group_.size; ++r)
    if (holds_up_reducing(s, r)) return false;
  const std::int64_t element = size_bytes(s.dtype);
  const Block own = in_block(s, group_.rank, group_.size), b = piece(s, own, group_.rank, round);
  if (b.count > 0) {
    for (int r = 0; r < group_.size; ++r) {
      ins_[static_cast<std::size_t>(r)] =
          r == group_.rank ? s.in + b.offset * element : slot(s, r, group_.rank, round);
    }
    std::size_t outs = 0;
    if (s.out_count > 0) outs_[outs++] = s.out + (b.offset - (sliced(s) ? 0 : own.offset)) * element;
    if (s.op == Op::all_reduce || s.out_count == 0) outs_[outs++] = sum_slot(s, group_.rank, round);
    reduce(s.dtype, s.reduce, ins_, {outs_.data(), outs}, b.count);
  }
  ++st.reduced;
  group_.mine().reduced.store(round + 1, std::memory_order_release);
  if (!takes(s)) group_.mine().copied.store(round + 1, std::memory_order_release);  // the slots are read
  group_.wake_all();
  return true;
}

bool Collectives::copy_round(OpState& s) noexcept {
  State& st = state(s);
  const bool sums = row(s.op).reduces;
  if (st.copied == st.rounds || (sums ? st.reduced : st.staged) <= st.copied) return false;
  const std::uint64_t round = st.base + st.copied;
  for (int r = 0; r < group_.size; ++r)
    if (holds_up_copying(s, r)) return false;
  const std::int64_t element = size_bytes(s.dtype);
  for (int from = 0; from < group_.size; ++from) {
    if (!gets(s, group_.rank, from) || (sums && from == group_.rank)) continue;  // the own sum is there
    const Block to = piece(s, out_block(s, from, group_.size), from, round);
    const std::byte* source = sums ? sum_slot(s, from, round) : slot(s, from, group_.rank, round);
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

Step Collectives::staged(OpState& s) noexcept {
  State& st = state(s);
  bool moved = false;
  for (std::int64_t room = kChunkBytes, round = st.part * group_.size * size_bytes(s.dtype);
       room > 0 && (copy_round(s) || reduce_round(s) || stage_round(s)); room -= round)
    moved = true;
  if (st.copied < st.rounds || st.reduced < st.rounds || st.staged < st.rounds)
    return moved ? Step::advanced : Step::pending;
  // Rounds this rank took no part in count as done, so that later calls find the counters level.
  RankBlock& block = group_.mine();
  const std::uint64_t level = st.base + st.rounds;
  for (auto* counter : {&block.staged, &block.reduced, &block.copied})
    if (counter->load(std::memory_order_relaxed) < level) counter->store(level, std::memory_order_release);
  finish(s);
  return Step::done;
}

}  // namespace weft::shm
