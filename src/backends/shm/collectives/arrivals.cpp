#include "backends/shm/collectives/arrivals.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "backends/call_word.hpp"
#include "backends/layout_tag.hpp"
#include "base/mutant.hpp"
#include "base/shared_words.hpp"
#include "host/prefetch.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {
namespace {

// A mutant: rank 1 behaves like a build with another threshold.
bool is_other_build(int rank) noexcept {
  return rank == 1 && (WEFT_MUTANT("mixed_builds") || WEFT_MUTANT("mixed_builds_unseen"));
}

}  // namespace

void Arrivals::plan(OpState& s) noexcept {
  CallState& st = state(s);
  st.phase = Phase::unpublished;
  st.cursor = 0;
  st.done = 0;
  st.exposed_instead = false;
  const std::int64_t bytes = payload_bytes(group_, s),
                     most = inline_bytes(s.op) / (is_other_build(group_.rank) ? 2 : 1),
                     limit = group_.path == Path::inline_only ? kInlineBytes : most,
                     room =
                         s.in_blocks ? std::min<std::int64_t>(limit, sizeof(Arrival::both.payload)) : limit;
  st.is_inline =
      bytes == 0 || (bytes <= room && (group_.path == Path::automatic || group_.path == Path::inline_only));
  // Calls are published in order: a rank that has published a call has published all calls before it.
  if (s.call == published_) publish(s);
}

// Returns whether this rank may expose its memory, if it is shared, although its payload fits into the
// arrival. Not in calls from a root, because the root then could not run ahead.
bool Arrivals::may_expose(const OpState& s) const noexcept {
  return state(s).is_inline && group_.path == Path::automatic && !is_from_root(s) && !s.in_blocks &&
         payload_bytes(group_, s) >= in_place_from(group_.size);
}

// Returns the place at which peers reach a buffer of the call. Memory that process_vm_readv refuses (driver
// mappings) is staged.
Buffer Arrivals::expose(const OpState& s, std::int64_t count, const std::byte* data,
                        std::int64_t elements) noexcept {
  const std::size_t bytes = static_cast<std::size_t>(elements * size_bytes(s.dtype));
  const Buffer place = group_.publish(data, bytes);
  const bool used = place.kind == Buffer::remote && group_.single_copy >= needed_single_copy(s) &&
                    (group_.path == Path::single ||
                     (group_.path == Path::automatic && is_single_copy_profitable(group_, s, count)));
  return used && !own_.copyable(data, bytes) ? Buffer{Buffer::foreign, 0, 0} : place;
}

// Returns whether the call's line is free. It is not free while a rank is kRing calls behind.
bool Arrivals::has_free_line(const OpState& s) noexcept {
  const std::uint64_t ring = kRing + (WEFT_MUTANT("slot_early") ? 1 : 0);
  if (s.call < everybody_consumed_ + ring) return true;
  everybody_consumed_ = s.call;
  // This rank counts, too, because it reads its own line until it has finished the call.
  for (int r = 0; r < group_.size; ++r)
    everybody_consumed_ =
        std::min(everybody_consumed_, group_.of(r).consumed.load(std::memory_order_seq_cst));
  return s.call < everybody_consumed_ + ring;
}

// Writes the arrival line. Returns false if the line is not free yet.
bool Arrivals::publish(OpState& s) noexcept {
  CallState& st = state(s);
  if (!has_free_line(s)) return false;
  Arrival& line = group_.mine().arrivals[s.call % kRing];
  const std::int64_t count = agreed_count(s, group_.size);
  std::uint64_t detail = has_detail(s) ? elaborate(group_, s, st.is_inline) : 0;
  if (!WEFT_MUTANT("layouts_unseen")) detail = with_layout_tag(detail, s);
  Buffer in{}, out{};
  if (!st.is_inline || s.in_blocks ||
      may_expose(s)) {  // with in_blocks another rank's payload may be too large
    in = expose(s, count, s.in, s.in_count);
    if (is_sliced(s)) out = expose(s, count, s.out, s.out_count);  // otherwise no other rank uses `out`
  }
  const bool exposes = may_expose(s) && is_reachable(in) && (!is_sliced(s) || is_reachable(out));
  const std::uint64_t word = call_word(s, group_.path) | (exposes ? kExposed : 0);
  // The first cache line is written last and all at once, because peers poll it.
  const std::int64_t bytes = st.is_inline && !exposes ? s.in_count * size_bytes(s.dtype) : 0;
  std::int64_t head = 0;
  if (s.in_blocks) {
    copy_bytes(line.both.payload, s.in, bytes);
  } else {
    head = std::min(bytes, kHeadBytes);
    copy_bytes(line.payload + head, s.in + head, bytes - head);
    copy_bytes(line.payload, s.in, head);
  }
  if (!st.is_inline || s.in_blocks || exposes) {
    line.places.in = in;
    line.places.out = out;
  }
  line.word = word;
  line.count = count;
  line.detail = detail;
  line.sequence.store(s.call + 1,
                      WEFT_MUTANT("lost_order") ? std::memory_order_relaxed : std::memory_order_release);
  published_ = s.call + 1;
  group_.wake_all();
  st.phase = Phase::arriving;
  return true;
}

// Returns whether this rank needs the arrival of `peer` before it can continue. It needs the arrivals of all
// ranks, or, in calls from a root, only that of the root.
bool Arrivals::must_see(const OpState& s, int peer) const noexcept {
  return peer != group_.rank && (!is_from_root(s) || peer == s.root);
}

bool Arrivals::missing(const OpState& s, int r) const noexcept {
  if (r == group_.rank) return false;
  if (state(s).phase == Phase::unpublished)
    return group_.of(r).consumed.load(std::memory_order_seq_cst) + kRing <= s.call;
  return must_see(s, r) && !has_arrived(r, s);
}

// A rank goes on when the ranks that it needs have arrived and have made the same call. In most operations
// these are all ranks. In a broadcast and a scatter the receivers need only the root, and the root needs no
// other rank. In these calls a rank compares its call with those of the other ranks later, at the latest in
// the next call that needs all ranks. Until then its `consumed` does not advance, so that no rank rewrites
// the lines.
Step Arrivals::step(OpState& s) noexcept {
  CallState& st = state(s);
  // Catches up, because peers may also wait for this rank.
  if (st.phase == Phase::unpublished && !publish(s)) return catch_up();
  for (; st.cursor < group_.size; ++st.cursor) {
    if (!must_see(s, st.cursor)) continue;
    const Arrival& theirs = arrival(group_, st.cursor, s);
    // Each poll of the first line also prefetches the following lines of the payload, so that they arrive
    // together with the first line. If this rank exposes its memory, it expects that peers do so, too, and
    // prefetches nothing.
    const bool exposes = (arrival(group_, group_.rank, s).word & kExposed) != 0;
    const std::int64_t behind = st.is_inline && !exposes ? payload_bytes(group_, s) - kHeadBytes : 0;
    prefetch_to_read(theirs.payload + kHeadBytes, std::min(behind, kAskedAhead));
    if (theirs.sequence.load(std::memory_order_seq_cst) != s.call + 1) return Step::pending;
    if ((theirs.word & kExposed) == 0)
      prefetch_to_read(theirs.payload + kHeadBytes + kAskedAhead, behind - kAskedAhead);
    const std::uint64_t first = is_from_root(s) ? s.call : compared_;
    for (std::uint64_t call = first; call <= s.call; ++call)
      if (!agree(st.cursor, call)) return Step::failed;
    if (s.op == Op::all_to_all_v && !sends_what_is_expected(s, st.cursor)) return Step::failed;
  }
  if (!is_from_root(s)) compared_ = s.call + 1;
  if (s.in_blocks) {
    for (int r = 0; r < group_.size; ++r)
      if (group_.control.detail(r, s.call).small == 0) st.is_inline = false;
  }
  if (may_expose(s)) {
    for (int r = 0; r < group_.size; ++r)
      if ((arrival(group_, r, s).word & kExposed) != 0) st.exposed_instead = true;
    if (st.exposed_instead) st.is_inline = false;
  }
  return Step::done;
}

Step Arrivals::catch_up() noexcept {
  const std::uint64_t before = compared_;
  const auto all_came = [&](std::uint64_t call) {
    for (int r = 0; r < group_.size; ++r)
      if (group_.of(r).arrivals[call % kRing].sequence.load(std::memory_order_seq_cst) != call + 1)
        return false;
    return true;
  };
  for (; compared_ < finished_ && all_came(compared_); ++compared_) {
    if (compared_ == before) {  // without this the loop would wait for one line after the other
      for (std::uint64_t call = before + 1; call < finished_; ++call)
        for (int r = 0; r < group_.size; ++r) __builtin_prefetch(&group_.of(r).arrivals[call % kRing]);
    }
    for (int r = 0; r < group_.size; ++r)
      if (!agree(r, compared_)) return Step::failed;
  }
  if (compared_ == before) return Step::pending;
  group_.mine().consumed.store(compared_, std::memory_order_release);
  group_.wake_all();
  return Step::advanced;
}

void Arrivals::compare_the_rest() noexcept {
  for (std::uint64_t call = compared_; call < published_; ++call)
    for (int r = 0; r < group_.size; ++r)
      if (group_.of(r).arrivals[call % kRing].sequence.load(std::memory_order_seq_cst) == call + 1 &&
          !agree(r, call))
        return;
}

std::string Arrivals::left_out() const {
  if (WEFT_MUTANT("left_out_unseen")) return {};
  const auto has = [&](int r, std::uint64_t call) {
    return group_.of(r).arrivals[call % kRing].sequence.load(std::memory_order_seq_cst) == call + 1;
  };
  for (int r = 0; r < group_.size; ++r) {
    if (r == group_.rank) continue;
    // The next call is one that this rank will not make. If other ranks wait for this rank in it, they are
    // notified that this rank has left.
    if (has(r, published_)) {
      const CallRecord call = record_of(group_, r, published_);
      if (row(call.op).rooted == Rooted::in_at_root && call.root != group_.rank)
        return fmt::format("{}, rank {} left the group without it", describe(group_, r, published_),
                           group_.rank);
    }
    if (group_.of(r).left.load(std::memory_order_seq_cst) == 0) continue;
    for (std::uint64_t call = compared_; call < finished_; ++call)
      if (!has(r, call))
        return fmt::format("{}, rank {} left the group without it", describe(group_, group_.rank, call), r);
  }
  return {};
}

// Returns whether `peer` has made the same call as this rank; raises a mismatch if it has not.
bool Arrivals::agree(int peer, std::uint64_t call) noexcept {
  const Arrival& own = group_.mine().arrivals[call % kRing];
  const Arrival& theirs = group_.of(peer).arrivals[call % kRing];
  if (((theirs.word ^ own.word) & ~kExposed) == 0 &&
      (theirs.count == own.count || WEFT_MUTANT("unchecked_count")) && theirs.detail == own.detail)
    return true;
  raise_difference(peer, call);
  return false;
}

// A separate function, so that a call without a mismatch needs no room on the stack for these texts.
void Arrivals::raise_difference(int peer, std::uint64_t call) noexcept {
  const CallRecord called = record_of(group_, group_.rank, call), they_called = record_of(group_, peer, call);
  int block = -1;  // the first block that differs
  for (const int r : {group_.rank, peer}) {
    const CallWord word(read_once(group_.of(r).arrivals[call % kRing].word));
    if (word.op() == (r == peer ? they_called : called).op && word.op() != Op::none) continue;
    raise(group_, damaged(r, "what it called", word.bits(), "the word of a collective"));
    return;
  }
  if (called.op == they_called.op && (called.op == Op::all_gather_v || called.op == Op::reduce_scatter_v)) {
    const auto count = [&](int r, int b) {
      return read_once(group_.control.detail(r, call).blocks()[b].count);
    };
    for (int b = 0; b < group_.size && block < 0; ++b)
      if (count(peer, b) != count(group_.rank, b)) block = b;
  }
  raise(group_, mismatch_of(peer, they_called, describe(group_, peer, call, block), group_.rank, called,
                            describe(group_, group_.rank, call, block)));
}

// Returns whether `peer` sends as many elements as this rank expects. Only all_to_all_v has separate counts
// for each pair.
bool Arrivals::sends_what_is_expected(const OpState& s, int peer) noexcept {
  const std::int64_t sent = exposed_block(group_, s, peer).count, wanted = s.out_blocks[peer].count;
  if (sent == wanted) return true;
  raise(group_, mismatch_of_blocks(record_of(group_, group_.rank, s.call), peer, sent, group_.rank, wanted));
  return false;
}

void Arrivals::finish(const OpState& s) noexcept {
  finished_ = s.call + 1;
  RankBlock& block = group_.mine();
  if (state(s).is_inline)  // the next call is often like this one
    prefetch_to_write(
        &block.arrivals[(s.call + 1) % kRing],
        static_cast<std::int64_t>(offsetof(Arrival, payload)) + s.in_count * size_bytes(s.dtype));
  if (!is_from_root(s)) block.consumed.store(s.call + 1, std::memory_order_release);
  block.finished.store(s.call + 1, std::memory_order_release);
  // No rank waits for the end of an inline call. Peers that wait for a free line are woken twice per round of
  // the ring. After a broadcast they are woken when the call has been compared.
  if (!state(s).is_inline || (!is_from_root(s) && s.call % (kRing / 2) == 0)) group_.wake_all();
  if (is_from_root(s) && s.root != group_.rank)  // a root runs ahead
    __builtin_prefetch(&group_.of(s.root).arrivals[(s.call + 1) % kRing]);
}

}  // namespace weft::shm
