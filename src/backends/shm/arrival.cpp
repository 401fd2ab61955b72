// How a collective begins and ends: the arrival line, the comparison of what the ranks called, the choice of
// a path.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "backends/shm/collectives.hpp"
#include "backends/shm/prefetch.hpp"
#include "base/mutant.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {
namespace {

// The count that all ranks must agree on; no less than any block.
std::int64_t agreed_count(const OpState& s, int size) noexcept {
  switch (row(s.op).counts) {
    case Counts::equal: return std::max(s.in_count, s.out_count);  // either may be a root's alone
    case Counts::out_is_n_in: return s.in_count;
    case Counts::in_is_n_out: return s.out_count;
    case Counts::out_blocks:
    case Counts::in_blocks: {
      const Block* const blocks = s.in_blocks ? s.in_blocks : s.out_blocks;
      return std::accumulate(blocks, blocks + size, std::int64_t{0},
                             [](std::int64_t sum, const Block& b) { return sum + b.count; });
    }
    case Counts::none:
    case Counts::both_blocks:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  return 0;
}

// Most calls are told by their word and count alone.
bool plain(const OpState& s) noexcept {
  return s.in_blocks == nullptr && s.out_blocks == nullptr && s.reduce.kind != ReduceOp::Kind::premul_sum &&
         s.reduce.kind != ReduceOp::Kind::user;
}

// Rank 1 is of a build with another threshold.
bool is_other_build(int rank) noexcept {
  return rank == 1 && (WEFT_MUTANT("mixed_builds") || WEFT_MUTANT("mixed_builds_unseen"));
}

bool reachable(const Buffer& b) noexcept { return b.kind != Buffer::foreign && b.kind != Buffer::remote; }

}  // namespace

Collectives::Collectives(const Group& group)
    : group_(group),
      ins_(static_cast<std::size_t>(group.size)),
      outs_(static_cast<std::size_t>(group.size)),
      peers_(group) {
  static_assert(sizeof(State) <= sizeof(OpState::scratch));
}

// The bytes that would travel beside an arrival: what a rank gives at most. A pure function of what all ranks
// know, but for in_blocks.
std::int64_t Collectives::payload_bytes(const OpState& s) const noexcept {
  std::int64_t count = s.in_count;
  if (from_root(s)) {
    count = s.op == Op::scatter ? s.out_count * group_.size : s.out_count;
  } else if (s.op == Op::all_gather_v) {
    for (int r = 0; r < group_.size; ++r) count = std::max(count, s.out_blocks[r].count);
  }
  return count * size_bytes(s.dtype);
}

void Collectives::post(OpState& s) noexcept {
  State& st = state(s);
  st.phase = Phase::unpublished;
  st.cursor = 0;
  st.done = 0;
  st.small = false;
  const std::int64_t bytes = payload_bytes(s),
                     most = inline_bytes(s.op) / (is_other_build(group_.rank) ? 2 : 1),
                     limit = group_.path == Path::inline_only ? kInlineBytes : most,
                     room =
                         s.in_blocks ? std::min<std::int64_t>(limit, sizeof(Arrival::both.payload)) : limit;
  st.fits =
      bytes == 0 || (bytes <= room && (group_.path == Path::automatic || group_.path == Path::inline_only));
  // In order, so that who has published a call has published all before it.
  if (s.call == published_) publish(s);
}

// Whether this rank exposes its memory, where it is shared, though its payload fits beside the arrival. A
// root that waits for nobody keeps running ahead.
bool Collectives::may_place(const OpState& s) const noexcept {
  return state(s).fits && group_.path == Path::automatic && !from_root(s) && !s.in_blocks &&
         payload_bytes(s) >= in_place_from(group_.size);
}

// Where peers reach a buffer of a call: not by the kernel where that would not copy it.
Buffer Collectives::expose(const OpState& s, std::int64_t count, const std::byte* data,
                           std::int64_t elements) noexcept {
  const std::size_t bytes = static_cast<std::size_t>(elements * size_bytes(s.dtype));
  const Buffer place = group_.publish(data, bytes);
  const bool used =
      place.kind == Buffer::remote && group_.single_copy >= needed(s) &&
      (group_.path == Path::single || (group_.path == Path::automatic && is_profitable(s, count)));
  return used && !own_.copyable(data, bytes) ? Buffer{Buffer::foreign, 0, 0} : place;
}

// Writes the arrival line, if it is free. False: a peer is still kRing calls behind.
bool Collectives::publish(OpState& s) noexcept {
  State& st = state(s);
  const std::uint64_t ring = kRing + (WEFT_MUTANT("slot_early") ? 1 : 0);
  if (s.call >= everybody_consumed_ + ring) {
    everybody_consumed_ = s.call;
    // This rank too: it reads its own line until it has finished the call.
    for (int r = 0; r < group_.size; ++r)
      everybody_consumed_ =
          std::min(everybody_consumed_, group_.of(r).consumed.load(std::memory_order_seq_cst));
    if (s.call >= everybody_consumed_ + ring) return false;
  }
  Arrival& line = group_.mine().arrivals[s.call % kRing];
  const std::int64_t count = agreed_count(s, group_.size);
  const std::uint64_t detail = plain(s) ? 0 : elaborate(group_, s, st.fits);
  Buffer in{}, out{};
  if (!st.fits || s.in_blocks || may_place(s)) {  // with in_blocks others may still have too much
    in = expose(s, count, s.in, s.in_count);
    if (sliced(s)) out = expose(s, count, s.out, s.out_count);  // else nobody else touches it
  }
  const bool placed = may_place(s) && reachable(in) && (!sliced(s) || reachable(out));
  const std::uint64_t word = call_word(s, group_.path) | (placed ? kPlaced : 0);
  // The first cache line is written last and all at once: peers poll it.
  const std::int64_t bytes = st.fits && !placed ? s.in_count * size_bytes(s.dtype) : 0;
  std::int64_t head = 0;
  if (s.in_blocks) {
    copy_bytes(line.both.payload, s.in, bytes);
  } else {
    head = std::min(bytes, kHeadBytes);
    copy_bytes(line.payload + head, s.in + head, bytes - head);
    copy_bytes(line.payload, s.in, head);
  }
  if (!st.fits || s.in_blocks || placed) {
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

// Whose arrival this rank needs before it can go on: everybody's, but where the root alone gives, the root's.
bool Collectives::must_see(const OpState& s, int peer) const noexcept {
  return peer != group_.rank && (!from_root(s) || peer == s.root);
}

Step Collectives::poll(OpState& s) noexcept {
  State& st = state(s);
  current_ = &s;
  if (st.phase == Phase::unpublished && !publish(s)) return catch_up();  // peers may wait for the same of us
  Step step = Step::pending;
  Phase before = Phase::unpublished;
  do {  // one phase leads to the next at once
    before = st.phase;
    switch (st.phase) {
      case Phase::unpublished: break;
      case Phase::arriving: step = arrive(s); break;
      case Phase::direct:
      case Phase::single: step = touch(s); break;
      case Phase::leaving: step = leave(s); break;
      case Phase::staged: step = staged(s); break;
    }
  } while (step == Step::advanced && st.phase != before);
  if (step == Step::done) current_ = nullptr;
  // After roots' calls: when there is time, and so often that the ring's other half stays free meanwhile.
  if (finished_ < compared_ + (step == Step::pending ? 1 : kRing / 2)) return step;
  const Step caught = catch_up();
  return caught == Step::failed || step == Step::pending ? caught : step;
}

// A rank goes on when those it needs have arrived and called the same. In most operations these are all. In
// a broadcast and a scatter the receivers need the root alone and the root nobody, so the comparison with the
// others is made up for later, at the latest in the next call that needs all: until then this rank's
// `consumed` stays behind and nobody rewrites the lines.
Step Collectives::arrive(OpState& s) noexcept {
  State& st = state(s);
  for (; st.cursor < group_.size; ++st.cursor) {
    if (!must_see(s, st.cursor)) continue;
    const Arrival& theirs = arrival(st.cursor, s);
    // Asked for with the first line, and again with every look, the others come with it and not after it. A
    // rank that exposes its memory expects the others to.
    const bool exposes = (arrival(group_.rank, s).word & kPlaced) != 0;
    const std::int64_t behind = st.fits && !exposes ? payload_bytes(s) - kHeadBytes : 0;
    prefetch_to_read(theirs.payload + kHeadBytes, std::min(behind, kAskedAhead));
    if (theirs.sequence.load(std::memory_order_seq_cst) != s.call + 1) return Step::pending;
    if ((theirs.word & kPlaced) == 0)
      prefetch_to_read(theirs.payload + kHeadBytes + kAskedAhead, behind - kAskedAhead);
    const std::uint64_t first = from_root(s) ? s.call : compared_;
    for (std::uint64_t call = first; call <= s.call; ++call)
      if (!agree(st.cursor, call)) return Step::failed;
    if (s.op == Op::all_to_all_v && !expected(s, st.cursor)) return Step::failed;
  }
  if (!from_root(s)) compared_ = s.call + 1;
  if (s.in_blocks) {
    for (int r = 0; r < group_.size; ++r)
      if (group_.control.detail(r, s.call).small == 0) st.fits = false;
  }
  if (may_place(s)) {
    for (int r = 0; r < group_.size; ++r)
      if ((arrival(r, s).word & kPlaced) != 0) st.small = true;
    if (st.small) st.fits = false;
  }
  return st.fits ? finish_inline(s) : choose(s);
}

// Compares calls that were not compared with everybody yet, as far as everybody has come.
Step Collectives::catch_up() noexcept {
  const std::uint64_t before = compared_;
  const auto all_came = [&](std::uint64_t call) {
    for (int r = 0; r < group_.size; ++r)
      if (group_.of(r).arrivals[call % kRing].sequence.load(std::memory_order_seq_cst) != call + 1)
        return false;
    return true;
  };
  for (; compared_ < finished_ && all_came(compared_); ++compared_) {
    if (compared_ == before) {  // these lines come one after the other otherwise
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

void Collectives::compare_the_rest() noexcept {
  for (std::uint64_t call = compared_; call < published_; ++call)
    for (int r = 0; r < group_.size; ++r)
      if (group_.of(r).arrivals[call % kRing].sequence.load(std::memory_order_seq_cst) == call + 1 &&
          !agree(r, call))
        return;
}

// Did `peer` call the same as this rank? Raises a mismatch where not.
bool Collectives::agree(int peer, std::uint64_t call) noexcept {
  const Arrival& own = group_.mine().arrivals[call % kRing];
  const Arrival& theirs = group_.of(peer).arrivals[call % kRing];
  if (((theirs.word ^ own.word) & ~kPlaced) == 0 &&
      (theirs.count == own.count || WEFT_MUTANT("unchecked_count")) && theirs.detail == own.detail)
    return true;
  const auto op = static_cast<Op>(own.word & 0xff);
  int block = -1;  // the first that differs
  if (op == static_cast<Op>(theirs.word & 0xff) && (op == Op::all_gather_v || op == Op::reduce_scatter_v)) {
    const auto count = [&](int r, int b) { return group_.control.detail(r, call).blocks()[b].count; };
    for (int b = 0; b < group_.size && block < 0; ++b)
      if (count(peer, b) != count(group_.rank, b)) block = b;
  }
  std::string mine = describe(group_, group_.rank, call, block);
  mine.erase(mine.find("called "), 7);
  raise(group_, {.code = ErrorCode::mismatch,
                 .text = fmt::format("{}, {}", describe(group_, peer, call, block), mine),
                 .op = op,
                 .call = call,
                 .ranks = {std::min(peer, group_.rank), std::max(peer, group_.rank)}});
  return false;
}

// Does `peer` send as much as this rank expects? Only all_to_all_v has counts of its own for each pair.
bool Collectives::expected(const OpState& s, int peer) noexcept {
  const std::int64_t sent = exposed_block(s, peer).count, wanted = s.out_blocks[peer].count;
  if (sent == wanted) return true;
  raise(group_, {.code = ErrorCode::mismatch,
                 .text = fmt::format("{}: rank {} sends {} elements to rank {}, which expects {}", name(s.op),
                                     peer, sent, group_.rank, wanted),
                 .op = s.op,
                 .call = s.call,
                 .ranks = {std::min(peer, group_.rank), std::max(peer, group_.rank)}});
  return false;
}

Step Collectives::refuse(const OpState& s, int because_of, std::string why) noexcept {
  raise(group_, {.code = ErrorCode::unsupported,
                 .text = fmt::format("{}: {}", name(s.op), why),
                 .op = s.op,
                 .call = s.call,
                 .ranks = {because_of}});
  return Step::failed;
}

// Direct, by single copies or staged: a pure function of what the ranks whose memory others touch have
// published: every `in` that is read, and every `out` that others write slices of. What a rank does not have
// is reachable.
Step Collectives::choose(OpState& s) noexcept {
  State& st = state(s);
  group_.map_news();
  if (group_.path == Path::inline_only)
    return refuse(s, group_.rank,
                  s.in_blocks
                      ? fmt::format("path \"inline\" was asked for, but a rank has more than {} bytes",
                                    sizeof(Arrival::both.payload))
                      : fmt::format("path \"inline\" was asked for, but {} bytes are more than {}",
                                    payload_bytes(s), kInlineBytes));
  int obstacle = -1;
  bool foreign = false;  // beyond the kernel's reach, too
  for (int r = 0; r < group_.size && !foreign; ++r) {
    if (from_root(s) && r != s.root) continue;
    const Arrival& a = arrival(r, s);
    if (st.small && (a.word & kPlaced) == 0) {  // it has sent a payload: where its memory lies, nobody knows
      obstacle = r;
      foreign = true;
      break;
    }
    const bool beyond = !reachable(a.places.in) || (sliced(s) && !reachable(a.places.out));
    if (beyond && obstacle < 0) obstacle = r;
    foreign = beyond && (group_.single_copy < needed(s) || a.places.in.kind == Buffer::foreign ||
                         (sliced(s) && a.places.out.kind == Buffer::foreign));
  }
  if (group_.path == Path::direct && obstacle >= 0)
    return refuse(s, obstacle,
                  fmt::format("path \"direct\" was asked for, but rank {}'s memory is not shared", obstacle));
  if (group_.path == Path::single && foreign)
    return refuse(
        s, obstacle,
        fmt::format("path \"single\" was asked for, but rank {}'s memory is beyond reach", obstacle));
  if (group_.path == Path::single || (obstacle >= 0 && !foreign && group_.path == Path::automatic &&
                                      is_profitable(s, arrival(group_.rank, s).count))) {
    st.phase = Phase::single;
    st.cursor = 0;
  } else if (obstacle >= 0 || group_.path == Path::staged) {
    st.phase = Phase::staged;
    plan(s);
  } else {
    st.phase = Phase::direct;
    st.cursor = 0;
  }
  return Step::advanced;
}

// This rank has finished the call: it reads no more of the peers' lines, unless they are still to be
// compared, and touches no more of their memory.
void Collectives::finish(const OpState& s) noexcept {
  finished_ = s.call + 1;
  RankBlock& block = group_.mine();
  if (state(s).fits)  // the next call is often like this one
    prefetch_to_write(
        &block.arrivals[(s.call + 1) % kRing],
        static_cast<std::int64_t>(offsetof(Arrival, payload)) + s.in_count * size_bytes(s.dtype));
  if (!from_root(s)) block.consumed.store(s.call + 1, std::memory_order_release);
  block.finished.store(s.call + 1, std::memory_order_release);
  // Nobody waits for the end of an inline call; room in the ring comes in halves, and after a broadcast with
  // the comparison.
  if (!state(s).fits || (!from_root(s) && s.call % (kRing / 2) == 0)) group_.wake_all();
  if (from_root(s) && s.root != group_.rank)  // a root runs ahead
    __builtin_prefetch(&group_.of(s.root).arrivals[(s.call + 1) % kRing]);
}

// The direct path's end: this rank's memory is its own again when those who touch it have finished.
Step Collectives::leave(OpState& s) noexcept {
  State& st = state(s);
  for (; st.cursor < group_.size; ++st.cursor) {
    if (st.cursor == group_.rank || !gets(s, st.cursor, group_.rank)) continue;
    if (group_.of(st.cursor).finished.load(std::memory_order_seq_cst) < s.call + 1) return Step::pending;
  }
  return Step::done;
}

std::vector<int> Collectives::missing(const OpState& s) const {
  const State& st = state(s);
  std::vector<int> ranks;
  for (int r = 0; r < group_.size; ++r) {
    if (r == group_.rank) continue;
    const RankBlock& block = group_.of(r);
    bool late = false;
    switch (st.phase) {
      case Phase::unpublished: late = block.consumed.load(std::memory_order_seq_cst) + kRing <= s.call; break;
      case Phase::arriving: late = must_see(s, r) && !has_arrived(r, s); break;
      case Phase::direct:
      case Phase::single: break;
      case Phase::leaving:
        late = gets(s, r, group_.rank) && block.finished.load(std::memory_order_seq_cst) < s.call + 1;
        break;
      case Phase::staged: late = holds_up_staging(s, r) || holds_up_reducing(s, r) || holds_up_copying(s, r);
    }
    if (late) ranks.push_back(r);
  }
  return ranks;
}

// Of many ranks that are there, one is told of for each call that some of them made.
std::string Collectives::story(const OpState& s, std::span<const int> late) const {
  constexpr std::size_t kToldOneByOne = 8;
  const State& st = state(s);
  if (late.empty()) return "every rank is there";
  const bool one = late.size() == 1;
  std::string text =
      fmt::format("{} {}", name_ranks(late),
                  st.phase == Phase::arriving || st.phase == Phase::unpublished ? "had not arrived"
                  : one                                                         ? "has not finished its part"
                        : "have not finished their parts");
  if (st.phase != Phase::arriving) return text;
  std::vector<std::string> told;
  std::size_t there = 0;
  for (int r = 0; r < group_.size; ++r) {
    if (r == group_.rank || !has_arrived(r, s)) continue;
    ++there;
    const std::string called = describe(group_, r, s.call);
    std::string what = called.substr(called.find(" called "));
    if (told.size() >= kToldOneByOne || (group_.size > static_cast<int>(kToldOneByOne) &&
                                         std::find(told.begin(), told.end(), what) != told.end()))
      continue;
    text += fmt::format("; {}", called);
    told.push_back(std::move(what));
  }
  if (there > told.size()) text += fmt::format("; {} more had arrived", there - told.size());
  return text;
}

}  // namespace weft::shm
