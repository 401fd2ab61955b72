// Messages between two ranks: posted, matched, fetched.
#include <fmt/format.h>

#include <algorithm>

#include "backends/gloo/link_parts.hpp"
#include "backends/last_calls.hpp"
#include "base/signals.hpp"

namespace weft::gloo_backend {
namespace {

void* writable(const std::byte* p) { return const_cast<std::byte*>(p); }

}  // namespace

// Gives the message to its receive: at once, or, where it is an offer, by fetch(). Returns true where fetch()
// follows.
bool Links::match(OpState& recv, int source, const Envelope& envelope) {
  if (envelope.dtype != recv.dtype || envelope.count != recv.out_count) {
    events_.refuse(recv, message_mismatch(recv, source, context_->rank, envelope.dtype, envelope.count));
    return false;
  }
  if (envelope.offer) return true;
  if (!envelope.payload.empty()) std::memcpy(recv.out, envelope.payload.data(), envelope.payload.size());
  received(recv, source);
  return false;
}

void Links::received(OpState& recv, int source) {
  if (recv.peer != any_source) return events_.finished(recv);
  events_.found(recv, {source, recv.tag, recv.dtype, recv.out_count});
}

// Keeps a message for a receive to come; whoever waits for one like it is told.
void Links::keep(int source, std::int32_t tag, std::int64_t bytes, Envelope&& envelope) {
  const MessageInfo info{source, tag, envelope.dtype, envelope.count};
  matcher_.keep(source, tag, bytes) = std::move(envelope);
  std::erase_if(waits_, [&](OpState* wait) {
    if (wait->tag != tag || (wait->peer != source && wait->peer != any_source)) return false;
    events_.found(*wait, info);
    return true;
  });
}

std::optional<MessageInfo> Links::look(int source, std::int32_t tag) const {
  const int from = matcher_.source_of(source, tag);
  if (from < 0) return std::nullopt;
  const Envelope& envelope = *matcher_.message(from, tag);
  return MessageInfo{from, tag, envelope.dtype, envelope.count};
}

std::optional<MessageInfo> Links::probe(int source, int tag) {
  const std::lock_guard lock(mutex_);
  return closed_ ? std::nullopt : look(source, tag);
}

void Links::wait_for_message(OpState& s) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  if (const auto message = look(s.peer, s.tag)) return events_.found(s, *message);
  if (auto why = nobody_left(s)) return events_.refuse(s, *std::move(why));
  waits_.push_back(&s);
}

// Waits for a message that its sender has offered: only as long as its bytes take.
void Links::fetch(Peer& peer, OpState& recv, std::uint64_t number) {
  const auto bytes = static_cast<std::size_t>(recv.out_count * size_bytes(recv.dtype));
  const UnboundBuffer buffer = context_->createUnboundBuffer(recv.out, bytes);
  buffer->recv(peer.rank, kData + number);
  {
    const std::lock_guard lock(mutex_);
    peer.fetching = true;
  }
  buffer->waitRecv(kForever);
  {
    const std::lock_guard lock(mutex_);
    peer.fetching = false;
  }
  write(peer, ControlMessage{.kind = ControlMessage::Kind::taken, .number = number});
  received(recv, peer.rank);
}

// A message or an offer has come.
void Links::take_message(Peer& peer, const ControlMessage& control, const std::byte* payload) {
  Envelope envelope{.dtype = control.dtype,
                    .count = control.count,
                    .offer = control.kind == ControlMessage::Kind::offer,
                    .number = control.number,
                    .payload = {}};
  const std::int64_t bytes = envelope.offer ? 0 : control.count * size_bytes(control.dtype);
  envelope.payload.assign(payload, payload + bytes);
  OpState* recv = nullptr;
  std::optional<Failure>
      refusal;  // other control messages, of collectives too, are behind it: nobody can wait
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    recv = matcher_.take_receive(peer.rank, control.tag);
    if (recv == nullptr && matcher_.has_room(bytes)) {
      return keep(peer.rank, control.tag, bytes, std::move(envelope));
    }
    if (recv == nullptr) refusal = matcher_.refusal(context_->rank, peer.rank, control.tag, bytes);
    if (recv != nullptr && !match(*recv, peer.rank, envelope)) return;
  }
  if (refusal) return events_.fail(*refusal);
  fetch(peer, *recv, control.number);
}

// A message that this rank has offered has arrived.
void Links::take_taken(Peer& peer, std::uint64_t number) {
  Peer::Offered offered;
  {
    const std::lock_guard lock(mutex_);
    const auto found = peer.offers.find(number);
    if (closed_ || found == peer.offers.end()) return;
    offered = std::move(found->second);
    peer.offers.erase(found);
  }
  offered.buffer->waitSend(kForever);  // the bytes are there, so this does not wait
  events_.finished(*offered.send);
}

void Links::ended(const OpState& s) noexcept {
  const std::lock_guard lock(in_flight_mutex_);
  std::erase_if(in_flight_, [&](const auto& entry) { return entry.first == &s; });
}

void Links::start(OpState& s) noexcept {
  try {
    if (is_users_message(s)) {
      const std::lock_guard lock(in_flight_mutex_);
      in_flight_.emplace_back(&s, message_of(s));
    }
    if (s.op == Op::recv) return receive(s);
    if (s.op == Op::wait_message) return wait_for_message(s);
    const NoSignals guard;
    if (s.peer == context_->rank) return send_to_self(s);
    send(s);
  } catch (const std::exception&) {
    // The connection broke; the peer's thread sees it too and says so.
  }
}

void Links::send_to_self(OpState& s) {
  const auto bytes = s.in_count * size_bytes(s.dtype);
  Envelope envelope{.dtype = s.dtype, .count = s.in_count, .payload = {}};
  envelope.payload.assign(s.in, s.in + bytes);
  const std::lock_guard lock(mutex_);
  if (OpState* const recv = matcher_.take_receive(s.peer, s.tag)) {
    match(*recv, s.peer, envelope);
  } else if (matcher_.has_room(bytes)) {
    keep(s.peer, s.tag, bytes, std::move(envelope));
  } else {
    return events_.refuse(s, matcher_.refusal(context_->rank, s.peer, s.tag, bytes));
  }
  events_.finished(s);
}

void Links::send(OpState& s) {
  Peer& peer = *peers_[static_cast<std::size_t>(s.peer)];
  const auto bytes = static_cast<std::size_t>(s.in_count * size_bytes(s.dtype));
  ControlMessage control{
      .kind = ControlMessage::Kind::message, .tag = s.tag, .dtype = s.dtype, .count = s.in_count};
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    if (peer.leaves || peer.gone) return events_.refuse(s, left(s.peer, &s));
    // What follows under the lock, too: two sends of one tag are matched in the order of their control messages; and the peer,
    // whose leave is answered under the lock, cannot have left when the message is written, which nobody would notice.
    if (bytes > kEagerBytes) {
      control.kind = ControlMessage::Kind::offer;
      control.number = peer.next_offer++;
      Peer::Offered& offered = peer.offers[control.number];
      offered = {context_->createUnboundBuffer(writable(s.in), bytes), &s};
      offered.buffer->send(s.peer, kData + control.number);
      return write(peer, control);
    }
    write(peer, control, s.in, bytes);
  }
  events_.finished(s);
}

void Links::receive(OpState& s) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  const int source = matcher_.source_of(s.peer, s.tag);
  if (source < 0) {
    if (auto why = nobody_left(s)) return events_.refuse(s, *std::move(why));
    return matcher_.post(s.peer, s.tag, s);
  }
  bool offered = false;
  std::uint64_t number = 0;
  matcher_.take_message(source, s.tag, [&](const Envelope& envelope) {
    offered = match(s, source, envelope);
    number = envelope.number;
  });
  if (!offered) return;
  Peer& peer = *peers_[static_cast<std::size_t>(source)];
  peer.to_fetch.emplace_back(&s, number);
  peer.in->abortWaitRecv();
}

}  // namespace weft::gloo_backend
