// The staged path, for memory that only its owner can reach: through buffers of the group, in rounds.
//
// A round moves one part per owner. A rank stages, into a slot per peer, only what that peer owns; the owner
// combines the slots with its own part and writes the sum back into one of them; everybody copies the sums
// out. So an all-reduce of two ranks copies half of the message in and half of it out. Three counters per
// rank, which only grow, say how far it has staged, reduced and copied; kRounds rounds are under way at once.
#include <algorithm>

#include "backends/shm/collectives.hpp"

namespace weft::shm {

// Elements per owner and round. Small messages are spread evenly over one round.
void Collectives::plan(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t n = group_.size, element = size_bytes(s.dtype), line = 64 / element;
  const bool spread = s.op == Op::all_reduce || s.op == Op::reduce_scatter;  // a slot for each peer
  const std::int64_t slot_bytes = static_cast<std::int64_t>(kStageBytes) / (spread ? n - 1 : 1) / 64 * 64;
  std::int64_t share = s.op == Op::all_reduce   ? (s.in_count + n - 1) / n
                       : s.op == Op::all_gather ? s.in_count
                                                : s.out_count;
  share = (share + line - 1) / line * line;
  st.part = std::min(share, slot_bytes / element);
  const std::int64_t window = s.op == Op::all_reduce ? st.part * n : st.part;
  const std::int64_t count = s.op == Op::all_reduce || s.op == Op::all_gather ? s.in_count : s.out_count;
  st.rounds = static_cast<std::uint64_t>((count + window - 1) / window);
  st.base = rounds_;
  rounds_ += st.rounds;
  st.staged = st.reduced = st.copied = 0;
  const bool receiver = s.op == Op::broadcast && group_.rank != s.root;
  if (receiver) st.staged = st.rounds;
  if (!spread || receiver) st.reduced = st.rounds;
  if (s.op == Op::reduce_scatter || (s.op == Op::broadcast && !receiver)) st.copied = st.rounds;
}

// Where rank `from` puts what `owner` combines.
std::byte* Collectives::slot(int from, int owner, std::uint64_t round,
                             std::int64_t part_bytes) const noexcept {
  return group_.control.stage(from, round) + (owner < from ? owner : owner - 1) * part_bytes;
}

bool Collectives::stage_round(OpState& s) noexcept {
  State& st = state(s);
  if (st.staged == st.rounds) return false;
  const std::uint64_t round = st.base + st.staged;
  for (int r = 0; r < group_.size; ++r) {  // is the buffer of kRounds ago free?
    if (r != group_.rank && group_.of(r).copied.load(std::memory_order_seq_cst) + kRounds <= round)
      return false;
  }
  const std::int64_t element = size_bytes(s.dtype), part = st.part, t = static_cast<std::int64_t>(st.staged);
  if (s.op == Op::all_reduce || s.op == Op::reduce_scatter) {
    for (int owner = 0; owner < group_.size; ++owner) {
      if (owner == group_.rank) continue;
      const std::int64_t begin =
          s.op == Op::all_reduce ? (t * group_.size + owner) * part : owner * s.out_count + t * part;
      const std::int64_t end = s.op == Op::all_reduce ? s.in_count : (owner + 1) * s.out_count;
      const std::int64_t count = std::min(part, end - begin);
      if (count > 0)
        copy_bytes(slot(group_.rank, owner, round, part * element), s.in + begin * element, count * element);
    }
  } else {
    const std::int64_t count = std::min(part, s.in_count - t * part);
    copy_bytes(group_.control.stage(group_.rank, round), s.in + t * part * element, count * element);
  }
  ++st.staged;
  group_.mine().staged.store(round + 1, std::memory_order_seq_cst);
  group_.wake_all();
  return true;
}

bool Collectives::reduce_round(OpState& s) noexcept {
  State& st = state(s);
  if (st.reduced == st.rounds || st.staged <= st.reduced) return false;
  const std::uint64_t round = st.base + st.reduced;
  for (int r = 0; r < group_.size; ++r) {
    if (r != group_.rank && group_.of(r).staged.load(std::memory_order_seq_cst) <= round) return false;
  }
  const std::int64_t element = size_bytes(s.dtype), part = st.part, t = static_cast<std::int64_t>(st.reduced);
  const bool all = s.op == Op::all_reduce;
  const std::int64_t begin =
      all ? (t * group_.size + group_.rank) * part : group_.rank * s.out_count + t * part;
  const std::int64_t end = all ? s.in_count : (group_.rank + 1) * s.out_count;
  const std::int64_t count = std::min(part, end - begin);
  if (count > 0) {
    for (int r = 0; r < group_.size; ++r) {
      ins_[static_cast<std::size_t>(r)] =
          r == group_.rank ? s.in + begin * element : slot(r, group_.rank, round, part * element);
    }
    outs_[0] = s.out + (all ? begin : t * part) * element;
    if (all)
      outs_[1] =
          slot(group_.rank == 0 ? 1 : 0, group_.rank, round, part * element);  // for the others to copy
    reduce(s.dtype, s.reduce, ins_, {outs_.data(), all ? 2u : 1u}, count);
  }
  ++st.reduced;
  group_.mine().reduced.store(round + 1, std::memory_order_seq_cst);
  if (!all) group_.mine().copied.store(round + 1, std::memory_order_seq_cst);  // the slots are read
  group_.wake_all();
  return true;
}

bool Collectives::copy_round(OpState& s) noexcept {
  State& st = state(s);
  if (st.copied == st.rounds || st.reduced <= st.copied) return false;
  const std::uint64_t round = st.base + st.copied;
  const bool all = s.op == Op::all_reduce;
  for (int r = 0; r < group_.size; ++r) {
    if (r == group_.rank || (s.op == Op::broadcast && r != s.root)) continue;
    const RankBlock& block = group_.of(r);
    if ((all ? block.reduced : block.staged).load(std::memory_order_seq_cst) <= round) return false;
  }
  const std::int64_t element = size_bytes(s.dtype), part = st.part, t = static_cast<std::int64_t>(st.copied);
  for (int owner = 0; owner < group_.size; ++owner) {
    if (owner == group_.rank || (s.op == Op::broadcast && owner != s.root)) continue;
    // begin, end: in elements of `out`
    const std::int64_t block = s.op == Op::all_gather ? owner * s.in_count : 0;
    const std::int64_t begin = all ? (t * group_.size + owner) * part : block + t * part;
    const std::int64_t end = s.op == Op::all_gather ? block + s.in_count : s.out_count;
    const std::int64_t count = std::min(part, end - begin);
    if (count <= 0) continue;
    const std::byte* const from =
        all ? slot(owner == 0 ? 1 : 0, owner, round, part * element) : group_.control.stage(owner, round);
    copy_bytes(s.out + begin * element, from, count * element);
  }
  ++st.copied;
  group_.mine().copied.store(round + 1, std::memory_order_seq_cst);
  group_.wake_all();
  return true;
}

Step Collectives::staged(OpState& s) noexcept {
  State& st = state(s);
  if (!copy_round(s) && !reduce_round(s) && !stage_round(s)) return Step::pending;
  if (st.copied < st.rounds || st.reduced < st.rounds || st.staged < st.rounds) return Step::advanced;
  // The own block of a gather, the root's own output.
  if (s.op == Op::all_gather || (s.op == Op::broadcast && group_.rank == s.root)) {
    std::byte* const own =
        s.op == Op::all_gather ? s.out + group_.rank * s.in_count * size_bytes(s.dtype) : s.out;
    if (own != s.in) copy_bytes(own, s.in, s.in_count * size_bytes(s.dtype));
  }
  // Rounds this rank took no part in count as done, so that later calls find the counters level.
  RankBlock& block = group_.mine();
  const std::uint64_t level = st.base + st.rounds;
  for (auto* counter : {&block.staged, &block.reduced, &block.copied})
    if (counter->load(std::memory_order_relaxed) < level) counter->store(level, std::memory_order_seq_cst);
  finish(s);
  return Step::done;
}

}  // namespace weft::shm
