// How a collective begins and ends: the arrival line, the comparison of what the ranks called, the choice of
// a path.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "backends/shm/collectives.hpp"

namespace weft::shm {
namespace {

// The bytes that would travel beside the arrival: what this rank gives. A pure function of the call's counts.
std::int64_t payload_bytes(const OpState& s) noexcept {
  const std::int64_t count = s.op == Op::broadcast ? s.out_count : s.in_count;
  return count * size_bytes(s.dtype);
}

// The count that all ranks must agree on.
std::int64_t agreed_count(const OpState& s) noexcept {
  return s.op == Op::all_gather ? s.in_count : s.out_count;
}

// Asks for lines that this rank writes next, which peers still have in their caches: the write itself then
// does not wait. (g++ makes a plain prefetch of __builtin_prefetch(…, 1) for baseline x86-64.)
void prefetch_to_write(const void* from, std::int64_t bytes) noexcept {
  const auto* const first = static_cast<const std::byte*>(from);
  for (std::int64_t i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(first[i]));
#else
    __builtin_prefetch(first + i, 1);
#endif
  }
}

bool reachable(const Buffer& b) noexcept { return b.kind != Buffer::foreign; }

}  // namespace

Collectives::Collectives(const Group& group)
    : group_(group), ins_(static_cast<std::size_t>(group.size)), outs_(static_cast<std::size_t>(group.size)) {
  static_assert(sizeof(State) <= sizeof(OpState::scratch));
}

void Collectives::post(OpState& s) noexcept {
  State& st = state(s);
  st.phase = Phase::unpublished;
  st.cursor = 0;
  st.done = 0;
  const auto bytes = static_cast<std::size_t>(payload_bytes(s));
  st.fits =
      bytes == 0 || (bytes <= kInlineBytes && group_.path != Path::direct && group_.path != Path::staged);
  publish(s);
}

// Writes the arrival line, if it is free. False: a peer is still kRing calls behind.
bool Collectives::publish(OpState& s) noexcept {
  State& st = state(s);
  if (s.call >= everybody_consumed_ + kRing) {
    everybody_consumed_ = s.call;
    // This rank too: it reads its own line until it has finished the call.
    for (int r = 0; r < group_.size; ++r)
      everybody_consumed_ =
          std::min(everybody_consumed_, group_.of(r).consumed.load(std::memory_order_seq_cst));
    if (s.call >= everybody_consumed_ + kRing) return false;
  }
  Arrival& line = group_.mine().arrivals[s.call % kRing];
  line.word = call_word(s, group_.path);
  line.count = agreed_count(s);
  if (st.fits) {
    const std::int64_t bytes = s.in_count * size_bytes(s.dtype);
    if (bytes > 0) std::memcpy(line.payload, s.in, static_cast<std::size_t>(bytes));
  } else {
    const auto element = static_cast<std::size_t>(size_bytes(s.dtype));
    line.places.in = group_.publish(s.in, static_cast<std::size_t>(s.in_count) * element);
    line.places.out = group_.publish(s.out, static_cast<std::size_t>(s.out_count) * element);
  }
  line.sequence.store(s.call + 1, std::memory_order_seq_cst);
  group_.wake_all();
  st.phase = Phase::arriving;
  return true;
}

// Whose arrival this rank needs before it can go on: everybody's, but in a broadcast only the root's.
bool Collectives::must_see(const OpState& s, int peer) const noexcept {
  return peer != group_.rank && (s.op != Op::broadcast || peer == s.root);
}

Step Collectives::poll(OpState& s) noexcept {
  State& st = state(s);
  current_ = &s;
  if (st.phase == Phase::unpublished && !publish(s)) return catch_up();  // peers may wait for the same of us
  Step step = Step::pending;
  switch (st.phase) {
    case Phase::unpublished: break;
    case Phase::arriving: step = arrive(s); break;
    case Phase::direct: step = direct(s); break;
    case Phase::leaving: step = leave(s); break;
    case Phase::staged: step = staged(s); break;
  }
  if (step == Step::done) current_ = nullptr;
  return step == Step::pending && compared_ < finished_ ? catch_up() : step;
}

// A rank goes on when those it needs have arrived and called the same. In most operations these are all. A
// broadcast's receiver needs the root alone and its root nobody, so the comparison with the others is made up
// for later, at the latest in the next call that needs all: until then this rank's `consumed` stays behind
// and nobody rewrites the lines.
Step Collectives::arrive(OpState& s) noexcept {
  State& st = state(s);
  for (; st.cursor < group_.size; ++st.cursor) {
    if (!must_see(s, st.cursor)) continue;
    if (arrival(st.cursor, s).sequence.load(std::memory_order_seq_cst) != s.call + 1) return Step::pending;
    const std::uint64_t first = s.op == Op::broadcast ? s.call : compared_;
    for (std::uint64_t call = first; call <= s.call; ++call)
      if (!agree(st.cursor, call)) return Step::failed;
  }
  if (s.op != Op::broadcast) compared_ = s.call + 1;
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
    for (int r = 0; r < group_.size; ++r)
      if (!agree(r, compared_)) return Step::failed;
  }
  if (compared_ == before) return Step::pending;
  group_.mine().consumed.store(compared_, std::memory_order_seq_cst);
  group_.wake_all();
  return Step::advanced;
}

// Did `peer` call the same as this rank? Raises a mismatch where not.
bool Collectives::agree(int peer, std::uint64_t call) noexcept {
  const Arrival& own = group_.mine().arrivals[call % kRing];
  const Arrival& theirs = group_.of(peer).arrivals[call % kRing];
  if (theirs.word == own.word && theirs.count == own.count) return true;
  std::string mine = describe(group_.rank, own.word, own.count, call);
  mine.erase(mine.find("called "), 7);
  raise(group_, {.code = ErrorCode::mismatch,
                 .text = fmt::format("{}, {}", describe(peer, theirs.word, theirs.count, call), mine),
                 .op = static_cast<Op>(own.word & 0xff),
                 .call = call,
                 .ranks = {std::min(peer, group_.rank), std::max(peer, group_.rank)}});
  return false;
}

Step Collectives::refuse(const OpState& s, std::string why) noexcept {
  raise(group_, {.code = ErrorCode::unsupported,
                 .text = fmt::format("{}: {}", name(s.op), why),
                 .op = s.op,
                 .call = s.call,
                 .ranks = {}});
  return Step::failed;
}

// Direct or staged: a pure function of what the ranks whose memory others touch have published. An all-reduce
// touches every `in` and `out`, all-gather and reduce-scatter every `in`, a broadcast the root's.
Step Collectives::choose(OpState& s) noexcept {
  State& st = state(s);
  group_.map_news();
  int obstacle = -1;
  for (int r = 0; r < group_.size && obstacle < 0; ++r) {
    if (s.op == Op::broadcast && r != s.root) continue;
    const Arrival& a = arrival(r, s);
    if (!reachable(a.places.in) || (s.op == Op::all_reduce && !reachable(a.places.out))) obstacle = r;
  }
  if (group_.path == Path::inline_only)
    return refuse(s, fmt::format("path \"inline\" was asked for, but {} bytes are more than {}",
                                 payload_bytes(s), kInlineBytes));
  if (group_.path == Path::direct && obstacle >= 0)
    return refuse(s,
                  fmt::format("path \"direct\" was asked for, but rank {}'s memory is not shared", obstacle));
  if (obstacle >= 0 || group_.path == Path::staged) {
    st.phase = Phase::staged;
    plan(s);
  } else {
    st.phase = Phase::direct;
  }
  return Step::advanced;
}

// This rank has finished the call: it reads no more of the peers' lines, unless they are still to be
// compared, and touches no more of their memory.
void Collectives::finish(const OpState& s) noexcept {
  finished_ = s.call + 1;
  RankBlock& block = group_.mine();
  if (state(s).fits)  // the next call is often like this one
    prefetch_to_write(&block.arrivals[(s.call + 1) % kRing],
                      static_cast<std::int64_t>(offsetof(Arrival, payload)) + payload_bytes(s));
  if (s.op != Op::broadcast) {
    if (state(s).fits &&
        s.call % (kRing / 2) != 0) {  // nobody waits for just this; room in the ring comes in halves
      block.consumed.store(s.call + 1, std::memory_order_release);
      block.finished.store(s.call + 1, std::memory_order_release);
      return;
    }
    block.consumed.store(s.call + 1, std::memory_order_seq_cst);
  }
  block.finished.store(s.call + 1, std::memory_order_seq_cst);
  group_.wake_all();
}

// The direct path's end: this rank's memory is its own again when those who touch it have finished.
Step Collectives::leave(OpState& s) noexcept {
  State& st = state(s);
  for (; st.cursor < group_.size; ++st.cursor) {
    if (st.cursor == group_.rank || (s.op == Op::broadcast && group_.rank != s.root)) continue;
    if (group_.of(st.cursor).finished.load(std::memory_order_seq_cst) < s.call + 1) return Step::pending;
  }
  return Step::done;
}

std::vector<int> Collectives::missing(const OpState& s, std::string& story) const {
  const State& st = state(s);
  std::vector<int> ranks, there;
  for (int r = 0; r < group_.size; ++r) {
    if (r == group_.rank) continue;
    const RankBlock& block = group_.of(r);
    bool late = false;
    switch (st.phase) {
      case Phase::unpublished: late = block.consumed.load(std::memory_order_seq_cst) + kRing <= s.call; break;
      case Phase::arriving:
        late = must_see(s, r) && arrival(r, s).sequence.load(std::memory_order_seq_cst) != s.call + 1;
        break;
      case Phase::direct: break;
      case Phase::leaving: late = block.finished.load(std::memory_order_seq_cst) < s.call + 1; break;
      case Phase::staged:
        late = block.finished.load(std::memory_order_seq_cst) < s.call + 1 &&
               (s.op != Op::broadcast || r == s.root || group_.rank == s.root);
        break;
    }
    (late ? ranks : there).push_back(r);
  }
  if (ranks.empty()) {
    story = "every rank is there";
    return ranks;
  }
  const bool one = ranks.size() == 1;
  story = fmt::format("rank{} {} {}", one ? "" : "s", fmt::join(ranks, ", "),
                      st.phase == Phase::arriving || st.phase == Phase::unpublished ? "had not arrived"
                      : one ? "has not finished its part"
                            : "have not finished their parts");
  if (st.phase == Phase::arriving) {
    for (const int r : there) {
      const Arrival& a = arrival(r, s);
      if (a.sequence.load(std::memory_order_seq_cst) == s.call + 1)
        story += fmt::format("; {}", describe(r, a.word, a.count, s.call));
    }
  }
  return ranks;
}

}  // namespace weft::shm
