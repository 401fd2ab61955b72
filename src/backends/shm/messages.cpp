#include "backends/shm/messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "backends/reduce.hpp"
#include "backends/shm/prefetch.hpp"
#include "base/mutant.hpp"

namespace weft::shm {
namespace {

std::int64_t bytes_of(DType dtype, std::int64_t count) { return count * size_bytes(dtype); }

}  // namespace

Messages::Messages(const Group& group)
    : group_(group), peers_(static_cast<std::size_t>(group.size)), peer_memory_(group) {
  static_assert(sizeof(State) <= sizeof(OpState::scratch));
  for (Peer& p : peers_) {
    for (auto* list : {&p.unposted, &p.outstanding, &p.wanted, &p.streams}) list->reserve(kLetters);
  }
}

void Messages::notify(int r) noexcept {
  group_.of(r).mail.fetch_add(1, std::memory_order_seq_cst);
  if (r != group_.rank) group_.wake_fenced(r);
}

// Is there room for a letter? Where there is none, the receiver is asked to look: it may wait for others.
bool Messages::has_room(int dst) {
  Peer& peer = peers_[static_cast<std::size_t>(dst)];
  if (peer.posted < peer.room_to) return true;
  peer.room_to = group_.control.pair(group_.rank, dst).drained.load(std::memory_order_seq_cst) + kMailRing;
  if (peer.posted < peer.room_to) return true;
  notify(dst);
  return false;
}

void Messages::post(OpState& s) {
  State& st = state(s);
  Peer& peer = peers_[static_cast<std::size_t>(s.peer)];
  if (s.op == Op::send) {
    st = {Phase::queued, 0, 0, bytes_of(s.dtype, s.in_count), {}};
    peer.unposted.push_back(&s);
    flush(s.peer);
    return;
  }
  st = {Phase::queued, 0, 0, bytes_of(s.dtype, s.out_count), {}};
  const auto letter =
      std::find_if(peer.kept.begin(), peer.kept.end(), [&](const Kept& k) { return k.tag == s.tag; });
  if (letter == peer.kept.end()) {
    peer.wanted.push_back(&s);
    return;
  }
  match(s, *letter, letter->payload.data());
  peer.kept.erase(letter);
}

// Writes letters while the ring has room, in the order of the sends.
bool Messages::flush(int dst) {
  Peer& peer = peers_[static_cast<std::size_t>(dst)];
  Pair& pair = group_.control.pair(group_.rank, dst);
  bool moved = false;
  while (!peer.unposted.empty() && has_room(dst)) {
    OpState& s = *peer.unposted.front();
    State& st = state(s);
    Letter& letter = pair.letters[peer.posted % kMailRing];
    const bool eager = st.bytes <= static_cast<std::int64_t>(kEagerBytes);
    if (eager) {
      constexpr std::int64_t kHead = kLine - offsetof(Letter, payload);
      const std::int64_t head = std::min(st.bytes, kHead);
      copy_bytes(letter.payload + head, s.in + head, st.bytes - head);
      copy_bytes(letter.payload, s.in, head);
      st.phase = Phase::done;
    } else {
      st.number =
          static_cast<std::uint32_t>(__builtin_ctzll(peer.free_numbers));  // never empty: as many as slots
      peer.free_numbers &= peer.free_numbers - 1;
      letter.number = st.number;
      st.place = dst == group_.rank ? Buffer{Buffer::pointer, 0, reinterpret_cast<std::uint64_t>(s.in)}
                                    : group_.publish(s.in, static_cast<std::size_t>(st.bytes), dst);
      if (group_.by_kernel(dst, st.place) && !own_memory_.copyable(s.in, static_cast<std::size_t>(st.bytes)))
        st.place = {Buffer::foreign, 0, 0};
      letter.place = st.place;
      st.phase = Phase::posted;
      peer.outstanding.push_back(&s);
    }
    letter.tag = s.tag;
    letter.dtype = s.dtype;
    letter.count = s.in_count;
    letter.eager = eager;
    letter.sequence.store(++peer.posted, std::memory_order_release);
    if (dst != group_.rank) group_.wake(dst);
    if (eager)  // the next message is often like this one, and its lines are the reader's
      prefetch_to_write(&pair.letters[peer.posted % kMailRing],
                        static_cast<std::int64_t>(offsetof(Letter, payload)) + st.bytes);
    peer.unposted.erase(peer.unposted.begin());
    moved = true;
  }
  return moved;
}

template <class AnyLetter>
void Messages::match(OpState& recv, const AnyLetter& letter, const std::byte* payload) {
  State& st = state(recv);
  if (letter.dtype != recv.dtype || letter.count != recv.out_count) {
    trouble_ = {.code = ErrorCode::mismatch,
                .text = fmt::format("rank {} sent {} x{} with tag {}, rank {} receives {} x{}", recv.peer,
                                    name(letter.dtype), letter.count, recv.tag, group_.rank, name(recv.dtype),
                                    recv.out_count),
                .op = Op::recv,
                .call = recv.call,
                .ranks = {std::min(recv.peer, group_.rank), std::max(recv.peer, group_.rank)}};
    return;
  }
  if (letter.eager) {
    copy_bytes(recv.out, payload, st.bytes);
    st.phase = Phase::done;
    return;
  }
  st.number = letter.number;
  st.place = letter.place;
  st.phase = Phase::matched;
  if (letter.place.kind == Buffer::shared || letter.place.kind == Buffer::pointer) return;
  group_.map_news();  // so that the next one may be read where it lies
  if (letter.place.kind != Buffer::foreign) return;
  std::vector<OpState*>& streams = peers_[static_cast<std::size_t>(recv.peer)].streams;
  streams.push_back(&recv);
}

// Takes letters out of the ring: to the recv that wants them, or to the kept ones.
bool Messages::drain(int src) {
  Pair& pair = group_.control.pair(src, group_.rank);
  Peer& peer = peers_[static_cast<std::size_t>(src)];
  const auto next = [&]() -> const Letter* {
    const Letter& letter = pair.letters[peer.taken % kMailRing];
    return letter.sequence.load(std::memory_order_seq_cst) == peer.taken + 1 ? &letter : nullptr;
  };
  const std::uint64_t before = peer.taken;
  for (const Letter* letter = next(); letter != nullptr; letter = next()) {
    const auto recv = std::find_if(peer.wanted.begin(), peer.wanted.end(), [&](const OpState* s) {
      return s->tag == letter->tag || WEFT_MUTANT("any_tag");
    });
    if (recv != peer.wanted.end()) {
      match(**recv, *letter, letter->payload);
      peer.wanted.erase(recv);
    } else {
      Kept kept{letter->tag, letter->dtype, letter->eager, letter->number, letter->count, {}, {}};
      if (letter->eager) {
        kept.payload.assign(letter->payload, letter->payload + bytes_of(letter->dtype, letter->count));
      } else {
        kept.place = letter->place;
      }
      peer.kept.push_back(std::move(kept));
    }
    ++peer.taken;
    if (peer.taken - peer.told < kMailRing / 2) continue;  // the sender hears of room now and then
    // Only a sender that found the ring full waits for this. It posts first and looks for room after, here it
    // is the other way round, so one of the two sees the other.
    const Letter& last = pair.letters[(peer.told + kMailRing - 1) % kMailRing];
    const std::uint64_t full = peer.told + kMailRing;
    pair.drained.store(peer.told = peer.taken, std::memory_order_seq_cst);
    if (last.sequence.load(std::memory_order_seq_cst) == full) notify(src);
  }
  return peer.taken != before;
}

bool Messages::collect() {
  bool moved = false;
  for (int r = 0; r < group_.size; ++r) moved |= drain(r);
  return moved;
}

bool Messages::answers(int dst) {
  Peer& peer = peers_[static_cast<std::size_t>(dst)];
  Pair& pair = group_.control.pair(group_.rank, dst);
  bool moved = false;
  for (std::size_t i = 0; i < peer.outstanding.size();) {
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
  const std::uint64_t mail = group_.mine().mail.load(std::memory_order_seq_cst);
  if (mail == seen_) return false;
  seen_ = mail;
  bool moved = false;
  for (int r = 0; r < group_.size && trouble() == nullptr; ++r) {
    if (drain(r)) moved = true;
    if (answers(r)) moved = true;
    if (flush(r)) moved = true;
  }
  return moved;
}

Step Messages::stream_out(OpState& s) {
  State& st = state(s);
  Pair& pair = group_.control.pair(group_.rank, s.peer);
  const std::uint64_t sent = pair.sent.load(std::memory_order_relaxed);
  if (sent - pair.received.load(std::memory_order_seq_cst) >= 2) return Step::pending;
  const std::int64_t chunk = std::min(st.bytes - st.moved_bytes, static_cast<std::int64_t>(kStreamBytes));
  std::memcpy(pair.stream[sent % 2], s.in + st.moved_bytes, static_cast<std::size_t>(chunk));
  st.moved_bytes += chunk;
  pair.sent.store(sent + 1, std::memory_order_seq_cst);
  notify(s.peer);
  if (st.moved_bytes < st.bytes) return Step::advanced;
  st.phase = Phase::done;
  return Step::done;
}

Step Messages::receive(OpState& s) {
  State& st = state(s);
  Peer& peer = peers_[static_cast<std::size_t>(s.peer)];
  Pair& pair = group_.control.pair(s.peer, group_.rank);
  if (st.place.kind == Buffer::foreign) {
    if (peer.streams.front() != &s) return Step::pending;
    if (st.phase == Phase::matched) {
      st.phase = Phase::streaming;
      pair.answers[st.number].store(Pair::granted, std::memory_order_seq_cst);
      notify(s.peer);
      return Step::advanced;
    }
    const std::uint64_t received = pair.received.load(std::memory_order_relaxed);
    if (pair.sent.load(std::memory_order_seq_cst) == received) return Step::pending;
    const std::int64_t chunk = std::min(st.bytes - st.moved_bytes, static_cast<std::int64_t>(kStreamBytes));
    std::memcpy(s.out + st.moved_bytes, pair.stream[received % 2], static_cast<std::size_t>(chunk));
    st.moved_bytes += chunk;
    pair.received.store(received + 1, std::memory_order_seq_cst);
    notify(s.peer);
    if (st.moved_bytes < st.bytes) return Step::advanced;
    peer.streams.erase(peer.streams.begin());
  } else {
    const std::int64_t chunk = std::min(st.bytes - st.moved_bytes, static_cast<std::int64_t>(kChunkBytes));
    if (!group_.enter(s.call)) return Step::failed;
    if (group_.in_chunk) group_.in_chunk(s.call);
    bool copied = true;
    if (group_.by_kernel(s.peer, st.place)) {
      copied = peer_memory_.read(s, s.peer, st.place.offset + static_cast<std::uint64_t>(st.moved_bytes),
                                 s.out + st.moved_bytes, chunk);
    } else {
      copy_bytes(s.out + st.moved_bytes, group_.reach(s.peer, st.place) + st.moved_bytes, chunk);
    }
    if (!group_.leave() || !copied) return Step::failed;
    st.moved_bytes += chunk;
    if (st.moved_bytes < st.bytes) return Step::advanced;
    pair.answers[st.number].store(Pair::taken, std::memory_order_seq_cst);
    notify(s.peer);
  }
  st.phase = Phase::done;
  return Step::done;
}

Step Messages::poll(OpState& s) {
  bool moved = s.op == Op::recv && state(s).phase == Phase::queued && drain(s.peer);
  if (advance()) moved = true;
  if (trouble() != nullptr) {
    raise(group_, trouble_);
    return Step::failed;
  }
  const State& st = state(s);
  Step step = Step::pending;
  if (st.phase == Phase::done) return Step::done;
  if (s.op == Op::send) {
    if (st.phase == Phase::streaming) step = stream_out(s);
  } else if (st.phase != Phase::queued) {
    step = receive(s);
  }
  return step == Step::pending && moved ? Step::advanced : step;
}

std::vector<int> Messages::awaited() const {
  std::vector<int> ranks;
  for (int r = 0; r < group_.size; ++r) {
    const Peer& p = peers_[static_cast<std::size_t>(r)];
    if (!p.unposted.empty() || !p.outstanding.empty() || !p.wanted.empty() || !p.streams.empty())
      ranks.push_back(r);
  }
  return ranks;
}

}  // namespace weft::shm
