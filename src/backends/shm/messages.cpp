#include "backends/shm/messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "backends/shm/collectives/call.hpp"
#include "backends/shm/paths.hpp"
#include "base/mutant.hpp"
#include "host/prefetch.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {
namespace {

std::int64_t bytes_of(DType dtype, std::int64_t count) { return count * size_bytes(dtype); }

// The lists of a peer get memory with the first message, because most ranks send to few others.
void add(std::vector<OpState*>& list, OpState& s) {
  if (list.capacity() == 0) list.reserve(kLargeMessages);
  list.push_back(&s);
}

}  // namespace

Messages::Messages(const Group& group, PairMemory& memory, UnexpectedLimits limits)
    : group_(group),
      memory_(memory),
      peers_(static_cast<std::size_t>(group.size)),
      matcher_(group.size, limits),
      peer_memory_(group) {
  static_assert(sizeof(State) <= sizeof(OpState::scratch));
  waits_.reserve(kLargeMessages);
}

void Messages::notify(int r) noexcept {
  group_.of(r).inbox.fetch_add(1, std::memory_order_seq_cst);
  if (r != group_.rank) group_.wake_fenced(r);
}

// Makes the memory of a pair, at the first message to that rank. The memory may have had another use, so this
// clears all words that one rank reads before the other has written them. touch_envelopes() clears the
// envelopes.
void Messages::make_pair(int dst) {
  Pair& pair = *reinterpret_cast<Pair*>(memory_.make(dst, sizeof(Pair)));
  pair.sent.store(0, std::memory_order_relaxed);
  pair.drained.store(0, std::memory_order_relaxed);
  pair.received.store(0, std::memory_order_relaxed);
  pair.helped.store(0, std::memory_order_relaxed);
  pair.taken_from.store(0, std::memory_order_relaxed);
  pair.held.store(0, std::memory_order_relaxed);
  pair.found.store(0, std::memory_order_relaxed);
  for (auto& answer : pair.answers) answer.store(Pair::waiting, std::memory_order_relaxed);
  pair.envelopes[0].sequence.store(0, std::memory_order_relaxed);
  peer(dst).to = &pair;
  const std::uint64_t place = memory_.place(reinterpret_cast<std::byte*>(&pair), sizeof(Pair));
  peer(dst).mapped = memory_.is_mapped(dst, place);
  group_.control.pair(group_.rank, dst).store(place, std::memory_order_seq_cst);
}

// Returns whether that rank has sent something, and this rank reaches the pair's memory.
bool Messages::find_pair(int src) {
  // taken from this rank's own data, and not from a word that other processes may have overwritten
  if (src == group_.rank) {
    peer(src).from = peer(src).to;
  } else if (const std::uint64_t place =
                 group_.control.pair(src, group_.rank).load(std::memory_order_seq_cst);
             place != 0) {
    guarded(src, group_.rank,
            [&] { peer(src).from = reinterpret_cast<Pair*>(memory_.find(src, place, sizeof(Pair))); });
    if (Pair* const pair = peer(src).from) {
      pair->found.store(1, std::memory_order_release);
      group_.wake(src);
    }
  }
  return peer(src).from != nullptr;
}

void Messages::find_pairs() {
  for (int r = 0; r < group_.size && trouble() == nullptr; ++r)
    if (peer(r).from == nullptr) find_pair(r);
}

bool Messages::is_mapped(Peer& to) noexcept {
  if (!to.mapped) [[unlikely]]
    to.mapped = to.to->found.load(std::memory_order_seq_cst) != 0;
  return to.mapped;
}

// Called while a ring is filled for the first time. Clears the next envelope and the one behind it before the
// receiver polls them. So the sender accesses each envelope first, and the envelopes lie on its memory node.
void Messages::touch_envelopes(Peer& to) noexcept {
  to.room_to = to.posted + 1;
  for (std::uint64_t k = to.posted; k <= to.room_to && k < kEnvelopeRing; ++k)
    to.to->envelopes[k].sequence.store(0, std::memory_order_relaxed);
}

// Returns whether there is room for an envelope. If not, notifies the receiver, which may be waiting for
// other ranks.
bool Messages::has_room(int dst) {
  Peer& peer = this->peer(dst);
  if (peer.posted < peer.room_to) return true;
  if (peer.posted < kEnvelopeRing) {
    if (peer.to == nullptr && !guarded(group_.rank, dst, [&] { make_pair(dst); })) return false;
    touch_envelopes(peer);
    return true;
  }
  const std::uint64_t drained = peer.to->drained.load(std::memory_order_seq_cst);
  if (drained > peer.posted) {
    say(group_.rank, dst,
        damaged(dst, "its count of envelopes received", drained,
                fmt::format("up to {}, as many as were sent", peer.posted)));
    return false;
  }
  peer.room_to = drained + kEnvelopeRing;
  if (peer.posted < peer.room_to) return true;
  notify(dst);
  return false;
}

void Messages::post(OpState& s) {
  State& st = state(s);
  if (s.op == Op::send) {
    st = {Phase::queued, 0, 0, bytes_of(s.dtype, s.in_count), {}, 0, 0};
    add(peer(s.peer).unposted, s);
    flush(s.peer);
    return;
  }
  st = {Phase::queued, 0, 0, bytes_of(s.dtype, s.out_count), {}, 0, 0};
  if (s.op == Op::wait_message) return waits_.push_back(&s);
  if (s.peer == any_source) {
    // so that a source whose ring is not polled does not wait because of many messages of another source
    collect();
    const int source = matcher_.source_of(any_source, s.tag);
    if (source < 0) return matcher_.post(any_source, s.tag, s);
    s.peer = source;
  }
  const bool found = matcher_.take_message(
      s.peer, s.tag, [&](const UnexpectedMessage& message) { match(s, message, message.payload.data()); });
  if (!found) return matcher_.post(s.peer, s.tag, s);
  if (held_) {  // the queue has room again for envelopes that are in the rings: advance() must look
    held_ = false;
    seen_ = ~seen_;
  }
}

// Returns the place at which the receiver finds the bytes of a message.
Buffer Messages::place(const OpState& s) const noexcept {
  if (s.peer == group_.rank) return {Buffer::pointer, 0, reinterpret_cast<std::uint64_t>(s.in)};
  return group_.publish(s.in, static_cast<std::size_t>(state(s).bytes), s.peer);
}

// Writes envelopes while the ring has room, in the order of the sends.
bool Messages::flush(int dst) {
  Peer& peer = this->peer(dst);
  bool moved = false;
  while (!peer.unposted.empty() && has_room(dst)) {
    Pair& pair = *peer.to;
    OpState& s = *peer.unposted.front();
    State& st = state(s);
    Envelope& envelope = pair.envelopes[peer.posted % kEnvelopeRing];
    if (st.bytes > kExposedFrom) st.place = place(s);
    const bool eager =
        st.bytes <= kExposedFrom || (st.bytes <= static_cast<std::int64_t>(kEagerBytes) &&
                                     st.place.kind != Buffer::pointer && st.place.kind != Buffer::shared);
    // Between the first and the last store to the envelope's first line there are only stores, because a
    // receiver that polls the line meanwhile would fetch it away.
    const std::int32_t tag = s.tag;
    const DType dtype = s.dtype;
    const std::int64_t count = s.in_count;
    const std::uint64_t sequence = ++peer.posted;
    st.envelope = sequence;
    if (eager) {
      constexpr std::int64_t kHead = kLine - offsetof(Envelope, payload);
      const std::int64_t head = std::min(st.bytes, kHead);
      // This rank may end when the send is done, and then its memory cannot be mapped any more.
      st.phase = is_mapped(peer) ? Phase::done : Phase::unmapped;
      copy_bytes(envelope.payload + head, s.in + head, st.bytes - head);
      copy_bytes(envelope.payload, s.in, head);
    } else {
      // free_numbers is never empty: there are as many numbers as slots.
      st.number = static_cast<std::uint32_t>(__builtin_ctzll(peer.free_numbers));
      peer.free_numbers &= peer.free_numbers - 1;
      envelope.number = st.number;
      if (group_.by_kernel(dst, st.place) && !own_memory_.copyable(s.in, static_cast<std::size_t>(st.bytes)))
        st.place = {Buffer::foreign, 0, 0};
      envelope.place = st.place;
      st.phase = Phase::posted;
      add(peer.outstanding, s);
    }
    envelope.tag = tag;
    envelope.dtype = dtype;
    envelope.count = count;
    envelope.eager = eager;
    envelope.sequence.store(sequence, std::memory_order_release);
    if (dst != group_.rank) group_.wake(dst);
    // prefetches for the next message, which is often like this one; the reader has these lines in its cache
    if (eager)
      prefetch_to_write(&pair.envelopes[sequence % kEnvelopeRing],
                        static_cast<std::int64_t>(offsetof(Envelope, payload)) + st.bytes);
    peer.unposted.erase(peer.unposted.begin());
    moved = true;
  }
  return moved;
}

void Messages::match(OpState& recv, const UnexpectedMessage& head, const std::byte* payload) {
  State& st = state(recv);
  if (head.dtype != recv.dtype || head.count != recv.out_count) {
    trouble_ = message_mismatch(recv, recv.peer, group_.rank, head.dtype, head.count,
                                head.eager ? payload : nullptr);
    return;
  }
  if (head.eager) {
    copy_bytes(recv.out, payload, st.bytes);
    st.phase = Phase::done;
    return;
  }
  st.number = head.number;
  st.place = head.place;
  st.envelope = head.envelope;
  st.end = st.bytes;
  if (recv.peer == group_.rank && !find_own(recv, head.envelope, st.place)) return;
  st.phase = Phase::matched;
  if (st.place.kind == Buffer::shared || st.place.kind == Buffer::pointer) return;
  Peer& peer = this->peer(recv.peer);
  group_.map_news(recv.peer);  // so that the next message may be read in place
  if (st.place.kind == Buffer::foreign) {
    add(peer.streams, recv);
  } else {
    ++peer.read;
  }
}

// Finds the place of a message of this rank to itself. It comes from the send, and not from the envelope,
// which other processes may have overwritten.
bool Messages::find_own(const OpState& recv, std::uint64_t number, Buffer& place) {
  for (const OpState* const send : peer(group_.rank).outstanding) {
    if (state(*send).envelope != number || send->in_count != recv.out_count) continue;
    place = state(*send).place;
    return true;
  }
  say(group_.rank, group_.rank,
      damaged(group_.rank, "the number of a message to itself", number, "that of one that is not received"));
  return false;
}

void Messages::say(int from, int to, Failure why) {
  if (trouble() != nullptr) return;
  why.text = fmt::format("message from rank {} to rank {}: {}", from, to, why.text);
  trouble_ = std::move(why);
}

// Runs body(). If it throws, the group fails with that error, and the function returns false.
template <class Body>
bool Messages::guarded(int from, int to, const Body& body) {
  try {
    body();
    return true;
  } catch (const std::bad_alloc&) {
    say(from, to, {.code = ErrorCode::system, .text = "out of memory", .ranks = {group_.rank}});
  } catch (const Error& e) {
    say(from, to, {.code = e.code(), .text = e.what(), .ranks = {e.ranks().begin(), e.ranks().end()}});
  }
  return false;
}

// Reads the head of the next envelope. Returns false, and the group fails, if no sender writes such a head.
bool Messages::read_head(int src, const Envelope& envelope, UnexpectedMessage& head) {
  head.dtype = read_once(envelope.dtype);
  head.count = read_once(envelope.count);
  head.eager = read_once(envelope.eager);
  head.envelope = peer(src).taken + 1;
  const auto known = static_cast<DType>(kDTypeCount - 1);
  if (known_or(head.dtype, known, known) != head.dtype) {
    say(src, group_.rank,
        damaged(src, "the number of an envelope's dtype", static_cast<int>(head.dtype),
                fmt::format("0 to {}", kDTypeCount - 1)));
    return false;
  }
  const std::int64_t most =
      head.eager ? static_cast<std::int64_t>(kEagerBytes) : std::numeric_limits<std::int64_t>::max();
  if (head.count < 0 || head.count > most / size_bytes(head.dtype)) {
    say(src, group_.rank,
        damaged(src, "an envelope's count of elements", head.count,
                head.eager ? fmt::format("those of up to {} bytes", kEagerBytes)
                           : std::string("0 or more, of bytes that fit 64 bits")));
    return false;
  }
  if (head.eager) return true;
  head.number = read_once(envelope.number);
  head.place = place_in(envelope.place);
  if (head.number >= kLargeMessages) {
    say(src, group_.rank,
        damaged(src, "the number of an envelope's answer", head.number,
                fmt::format("0 to {}", kLargeMessages - 1)));
    return false;
  }
  const Buffer::Kind kind = head.place.kind;
  if (kind == Buffer::shared || kind == Buffer::foreign ||
      (kind == Buffer::pointer && (group_.one_process || src == group_.rank)) ||
      (kind == Buffer::remote && group_.single_copy != SingleCopy::off))
    return true;
  say(src, group_.rank,
      damaged(src, "the kind of an envelope's place", static_cast<std::uint32_t>(kind),
              "a kind of memory that this rank reaches"));
  return false;
}

// Takes envelopes out of the ring, and gives each to the recv that waits for it, or to the unexpected queue.
bool Messages::drain(int src) {
  Peer& peer = this->peer(src);
  if (peer.from == nullptr && !find_pair(src)) return false;
  Pair& pair = *peer.from;
  const auto next = [&]() -> const Envelope* {
    const Envelope& envelope = pair.envelopes[peer.taken % kEnvelopeRing];
    return envelope.sequence.load(std::memory_order_seq_cst) == peer.taken + 1 ? &envelope : nullptr;
  };
  const std::uint64_t before = peer.taken;
  // Takes at most as many as the ring holds, because a sender may fill the ring as fast as it is emptied, and
  // other sources must have their turn.
  for (std::uint64_t i = 0; i < kEnvelopeRing; ++i) {
    const Envelope* const envelope = next();
    UnexpectedMessage head;
    if (envelope == nullptr || !read_head(src, *envelope, head)) break;
    const std::int32_t tag = read_once(envelope->tag);
    if (OpState* const recv = matcher_.take_receive(src, tag)) {
      recv->peer = src;
      match(*recv, head, envelope->payload);
    } else if (!keep(src, head, tag, envelope->payload)) {
      hold(src, head, tag);
      break;
    }
    ++peer.taken;
    if (peer.taken - peer.acknowledged >= kEnvelopeRing / 2)
      acknowledge(src);  // notifies the sender of free room from time to time
  }
  if (peer.held && next() == nullptr) {
    peer.held = false;
    pair.held.store(0, std::memory_order_release);
  }
  return peer.taken != before;
}

// Reports to the sender how many envelopes this rank has taken. Only a sender that has found the ring full
// waits for this. The sender stores an envelope and then reads `drained`. This rank stores `drained` and then
// reads the last envelope. So one of the two sees the other's store.
void Messages::acknowledge(int src) {
  Peer& peer = this->peer(src);
  Pair& pair = *peer.from;
  const Envelope& last = pair.envelopes[(peer.acknowledged + kEnvelopeRing - 1) % kEnvelopeRing];
  const std::uint64_t full = peer.acknowledged + kEnvelopeRing;
  pair.drained.store(peer.acknowledged = peer.taken, std::memory_order_seq_cst);
  if (last.sequence.load(std::memory_order_seq_cst) == full) notify(src);
}

// Keeps the next envelope for a later recv. Returns false if there is no room.
bool Messages::keep(int src, UnexpectedMessage& head, std::int32_t tag, const std::byte* payload) {
  const std::int64_t bytes = head.eager ? bytes_of(head.dtype, head.count) : 0;
  if (!matcher_.has_room(bytes)) return false;
  UnexpectedMessage& unexpected = matcher_.keep(src, tag, bytes);
  std::swap(head.payload, unexpected.payload);  // swapped, so that the memory is reused
  unexpected = std::move(head);
  if (unexpected.eager) unexpected.payload.assign(payload, payload + bytes);
  return true;
}

// Leaves the next envelope in the ring, so that its sender waits. If a recv waits for another envelope of
// that sender, which may lie behind this one, the group fails instead.
void Messages::hold(int src, const UnexpectedMessage& head, std::int32_t tag) {
  if (trouble() != nullptr) return;
  if (awaits(src)) {
    trouble_ = matcher_.refusal(group_.rank, src, tag, head.eager ? bytes_of(head.dtype, head.count) : 0);
    return;
  }
  Peer& peer = this->peer(src);
  held_ = true;
  if (peer.taken != peer.acknowledged) acknowledge(src);  // because the next envelope may arrive much later
  if (peer.held) return;
  peer.held = true;
  peer.from->held.store(1, std::memory_order_release);
}

std::vector<int> Messages::held_back() const {
  std::vector<int> ranks;
  for (int r = 0; r < group_.size; ++r)
    if (peer(r).held) ranks.push_back(r);
  return ranks;
}

bool Messages::held_by(int peer) const noexcept {
  const Pair* const pair = this->peer(peer).to;
  return pair != nullptr && pair->held.load(std::memory_order_acquire) != 0;
}

bool Messages::collect() {
  bool moved = false;
  for (int i = 0; i < group_.size; ++i) moved |= drain((next_source_ + i) % group_.size);
  next_source_ = (next_source_ + 1) % group_.size;
  return moved;
}

// Drains the rings of the ranks for which a receive waits: its source, or all ranks, beginning with a
// different rank each time.
bool Messages::drain_for(OpState& s) { return s.peer == any_source ? collect() : drain(s.peer); }

std::optional<MessageInfo> Messages::probe(int source, std::int32_t tag) {
  if (source == any_source) {
    collect();
  } else {
    drain(source);
  }
  const int from = matcher_.source_of(source, tag);
  if (from < 0) return std::nullopt;
  const UnexpectedMessage& message = *matcher_.message(from, tag);
  return MessageInfo{from, tag, message.dtype, message.count};
}

// Returns whether the message for which a wait_message waits has arrived.
bool Messages::found(OpState& wait) {
  const auto message = probe(wait.peer, wait.tag);
  if (!message) return false;
  wait.peer = message->source;
  wait.dtype = message->dtype;
  wait.out_count = message->count;
  std::erase(waits_, &wait);
  return true;
}

bool Messages::answers(int dst) {
  Peer& peer = this->peer(dst);
  bool moved = false;
  for (std::size_t i = 0; i < peer.outstanding.size();) {
    Pair& pair = *peer.to;
    State& st = state(*peer.outstanding[i]);
    const std::uint32_t answer = pair.answers[st.number].load(std::memory_order_seq_cst);
    if (answer == Pair::waiting) {
      ++i;
      continue;
    }
    moved = true;
    st.phase = answer == Pair::granted ? Phase::streaming : Phase::done;
    pair.answers[st.number].store(Pair::waiting, std::memory_order_seq_cst);
    peer.free_numbers |= std::uint64_t{1} << st.number;
    peer.outstanding.erase(peer.outstanding.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return moved;
}

bool Messages::advance() {
  const std::uint64_t inbox = group_.mine().inbox.load(std::memory_order_seq_cst);
  if (inbox == seen_) return false;
  seen_ = inbox;
  bool moved = false;
  for (int r = 0; r < group_.size && trouble() == nullptr; ++r) {
    if (drain(r)) moved = true;
    if (answers(r)) moved = true;
    if (flush(r)) moved = true;
  }
  return moved;
}

// Copies the next part of a message, up to `end`, into a chunk. Returns false if no chunk is free, or if no
// part is left.
bool Messages::fill_chunk(OpState& s, std::int64_t end) {
  State& st = state(s);
  Pair& pair = *peer(s.peer).to;
  const std::uint64_t sent = pair.sent.load(std::memory_order_relaxed);
  if (st.moved_bytes >= end || sent - pair.received.load(std::memory_order_seq_cst) >= 2) return false;
  const std::int64_t bytes =
      std::clamp<std::int64_t>(st.bytes - st.moved_bytes, 0, static_cast<std::int64_t>(kStreamBytes));
  std::memcpy(pair.stream[sent % 2], s.in + st.moved_bytes, static_cast<std::size_t>(bytes));
  pair.chunks[sent % 2] = {st.envelope, st.moved_bytes};
  st.moved_bytes += bytes;
  pair.sent.store(sent + 1, std::memory_order_seq_cst);
  notify(s.peer);
  return true;
}

Step Messages::stream_out(OpState& s) {
  State& st = state(s);
  if (!fill_chunk(s, st.bytes)) return Step::pending;
  if (st.moved_bytes < st.bytes) return Step::advanced;
  st.phase = Phase::done;
  return Step::done;
}

// Returns whether the sender, while it waits, copies a part of the message.
bool Messages::helps(const OpState& s) const noexcept {
  const State& st = state(s);
  return !group_.oversubscribed && st.bytes >= kHelpFrom && group_.by_kernel(s.peer, st.place);
}

// Copies the sender's part of a message that its receiver reads by the kernel.
Step Messages::help(OpState& s) {
  const State& st = state(s);
  if (st.phase != Phase::posted || !helps(s) || peer(s.peer).outstanding.size() != 1) return Step::pending;
  const Pair& pair = *peer(s.peer).to;
  if (pair.helped.load(std::memory_order_seq_cst) != st.envelope) return Step::pending;
  const std::int64_t end = std::min(pair.taken_from.load(std::memory_order_seq_cst), st.bytes);
  return fill_chunk(s, end) ? Step::advanced : Step::pending;
}

// Copies the oldest chunk if it belongs to this message, and drops a chunk whose message has already been
// received. Returns false if it did neither.
bool Messages::empty_chunk(OpState& s) {
  State& st = state(s);
  const Peer& peer = this->peer(s.peer);
  Pair& pair = *peer.from;
  const std::uint64_t received = pair.received.load(std::memory_order_relaxed);
  if (pair.sent.load(std::memory_order_seq_cst) == received) return false;
  const Pair::Chunk& filled = pair.chunks[received % 2];
  const Pair::Chunk chunk{read_once(filled.envelope), read_once(filled.offset)};
  if (chunk.envelope == st.envelope) {
    if (chunk.offset != st.moved_bytes) {
      say(s.peer, group_.rank,
          damaged(s.peer, "the offset of a chunk", chunk.offset, fmt::format("{}", st.moved_bytes)));
      return false;
    }
    const std::int64_t bytes = std::min(st.bytes - chunk.offset, static_cast<std::int64_t>(kStreamBytes));
    std::memcpy(s.out + chunk.offset, pair.stream[received % 2], static_cast<std::size_t>(bytes));
    st.moved_bytes = chunk.offset + bytes;
  } else {
    for (const OpState* other : {peer.helped, peer.streams.empty() ? nullptr : peer.streams.front()})
      if (other != nullptr && state(*other).envelope == chunk.envelope) return false;
  }
  pair.received.store(received + 1, std::memory_order_seq_cst);
  notify(s.peer);
  return true;
}

Step Messages::receive_stream(OpState& s) {
  State& st = state(s);
  Peer& peer = this->peer(s.peer);
  if (peer.streams.front() != &s) return Step::pending;
  if (st.phase == Phase::matched) {
    st.phase = Phase::streaming;
    peer.from->answers[st.number].store(Pair::granted, std::memory_order_seq_cst);
    notify(s.peer);
    return Step::advanced;
  }
  if (!empty_chunk(s)) return Step::pending;
  if (st.moved_bytes < st.bytes) return Step::advanced;
  peer.streams.erase(peer.streams.begin());
  st.phase = Phase::done;
  return Step::done;
}

// Reads a part of a message from the sender's memory. Returns false if the group has failed.
bool Messages::read(OpState& s, std::int64_t from, std::int64_t bytes) {
  const State& st = state(s);
  if (!group_.enter(s.call)) return false;
  if (group_.in_chunk) group_.in_chunk(s.call);
  bool copied = true;
  if (group_.by_kernel(s.peer, st.place)) {
    copied =
        peer_memory_.read(s, s.peer, st.place.offset + static_cast<std::uint64_t>(from), s.out + from, bytes);
  } else {
    const std::byte* const source = s.peer == group_.rank
                                        ? reinterpret_cast<const std::byte*>(st.place.offset) + from
                                        : group_.reach(s.peer, st.place, from, bytes);
    copied = source != nullptr;
    if (copied)
      copy_bytes(s.out + from, source, bytes);
    else
      group_.say_damaged(s, s.peer, st.place, from, bytes);
  }
  return group_.leave() && copied;
}

// Notifies the sender that its message has arrived.
void Messages::take(OpState& s) {
  State& st = state(s);
  peer(s.peer).from->answers[st.number].store(Pair::taken, std::memory_order_seq_cst);
  notify(s.peer);
  if (st.place.kind == Buffer::remote) --peer(s.peer).read;
  st.phase = Phase::done;
}

// Empties the chunk that the sender has filled from the front. If there is none, reads a piece from the back.
Step Messages::receive_helped(OpState& s) {
  State& st = state(s);
  Peer& peer = this->peer(s.peer);
  Pair& pair = *peer.from;
  if (peer.helped == nullptr) {
    peer.helped = &s;
    pair.taken_from.store(st.end, std::memory_order_seq_cst);
    pair.helped.store(st.envelope, std::memory_order_seq_cst);
    notify(s.peer);
  }
  if (!empty_chunk(s)) {
    const std::int64_t bytes = std::min(st.end - st.moved_bytes, static_cast<std::int64_t>(kStreamBytes));
    pair.taken_from.store(st.end - bytes, std::memory_order_seq_cst);
    if (!read(s, st.end - bytes, bytes)) return Step::failed;
    st.end -= bytes;
  }
  if (st.moved_bytes < st.end) return Step::advanced;
  pair.helped.store(0, std::memory_order_seq_cst);
  peer.helped = nullptr;
  take(s);
  return Step::done;
}

Step Messages::receive(OpState& s) {
  State& st = state(s);
  if (st.place.kind == Buffer::foreign) return receive_stream(s);
  const Peer& peer = this->peer(s.peer);
  const bool alone = peer.helped == nullptr && peer.read == 1 && !matcher_.awaits(s.peer);
  if (peer.helped == &s || (alone && st.moved_bytes == 0 && helps(s))) return receive_helped(s);
  const std::int64_t bytes = std::min(st.bytes - st.moved_bytes, peer_memory_.most());
  if (!read(s, st.moved_bytes, bytes)) return Step::failed;
  st.moved_bytes += bytes;
  if (st.moved_bytes < st.bytes) return Step::advanced;
  take(s);
  return Step::done;
}

Step Messages::poll(OpState& s) {
  if (s.op == Op::wait_message && trouble() == nullptr && found(s)) return Step::done;
  bool moved = s.op == Op::recv && state(s).phase == Phase::queued && drain_for(s);
  if (advance()) moved = true;
  if (trouble() != nullptr) {
    raise(group_, trouble_);
    return Step::failed;
  }
  const State& st = state(s);
  Step step = Step::pending;
  if (st.phase == Phase::done || (st.phase == Phase::unmapped && is_mapped(peer(s.peer)))) return Step::done;
  if (s.op == Op::send) {
    step = st.phase == Phase::streaming ? stream_out(s) : help(s);
  } else if (st.phase != Phase::queued) {  // a wait_message stays queued
    step = receive(s);
    if (trouble() != nullptr) {  // a chunk is damaged
      raise(group_, trouble_);
      return Step::failed;
    }
  }
  return step == Step::pending && moved ? Step::advanced : step;
}

bool Messages::has_chunk_from(int src) const noexcept {
  const Pair& pair = *peer(src).from;
  return pair.sent.load(std::memory_order_seq_cst) != pair.received.load(std::memory_order_relaxed);
}

std::vector<int> Messages::awaited_by_name() const {
  std::vector<int> ranks;
  for (int r = 0; r < group_.size; ++r) {
    const Peer& p = peer(r);
    const bool waits =
        std::any_of(waits_.begin(), waits_.end(), [&](const OpState* s) { return s->peer == r; });
    // If chunks have arrived, the receive waits for no rank: the sender may have left.
    const bool streams = !p.streams.empty() && !has_chunk_from(r);
    const bool unmapped = p.to != nullptr && !p.mapped && p.to->found.load(std::memory_order_seq_cst) == 0;
    if (!p.unposted.empty() || !p.outstanding.empty() || unmapped || matcher_.awaits(r) || streams || waits)
      ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> Messages::awaited() const {
  if (!awaits_any()) return awaited_by_name();
  std::vector<int> ranks;
  for (int r = 0; r < group_.size; ++r)
    if (r != group_.rank) ranks.push_back(r);
  return ranks;
}

bool Messages::awaits_any() const noexcept {
  return matcher_.awaits_any() ||
         std::any_of(waits_.begin(), waits_.end(), [](const OpState* s) { return s->peer == any_source; });
}

// Returns whether this rank waits for a message of that sender, which may be behind an envelope that stays in
// the ring. (A receive from any_source does not count: its message may come from another rank.)
bool Messages::awaits(int src) const noexcept {
  return matcher_.awaits(src) ||
         std::any_of(waits_.begin(), waits_.end(), [&](const OpState* s) { return s->peer == src; });
}

}  // namespace weft::shm
