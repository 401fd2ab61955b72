// Moves the messages that PeerMessages has matched by Gloo.
#include <fmt/format.h>

#include "backends/gloo/link_parts.hpp"
#include "base/signals.hpp"

namespace weft::gloo_backend {
namespace {

void* writable(const std::byte* p) { return const_cast<std::byte*>(p); }

}  // namespace

// `s` itself belongs to the group's thread, so a found source is reported to that thread.
void Links::done(OpState& s, const MessageInfo& found) {
  if (s.op == Op::wait_message || s.peer == any_source) return events_.found(s, found);
  events_.finished(s);
}

// The thread of that peer fetches the message, because it may block.
void Links::fetch(OpState& recv, int source, std::uint64_t number) {
  Peer& peer = *peers_[static_cast<std::size_t>(source)];
  peer.to_fetch.emplace_back(&recv, number);
  if (!peer.awake) peer.in->abortWaitRecv();
}

// Waits for a message that its sender has offered, only as long as its bytes take.
void Links::fetch_one(Peer& peer, OpState& recv, std::uint64_t number) {
  const auto bytes = static_cast<std::size_t>(recv.out_count * size_bytes(recv.dtype));
  const UnboundBuffer buffer = context_->createUnboundBuffer(recv.out, bytes);
  buffer->recv(peer.rank, kData + number);
  buffer->waitRecv(kForever);
  write(peer, ControlMessage{.kind = ControlMessage::Kind::taken, .number = number});
  const std::lock_guard lock(mutex_);
  messages_.received(recv);
}

// Call this when a message or an offer has arrived.
void Links::take_message(Peer& peer, const ControlMessage& control, const std::byte* payload) {
  const MessageHead head{.dtype = control.dtype,
                         .tag = control.tag,
                         .count = control.count,
                         .offered = control.kind == ControlMessage::Kind::offer,
                         .number = control.number};
  std::optional<Failure> refusal;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    peer.awake = true;
    refusal = messages_.arrived(peer.rank, head, {payload, static_cast<std::size_t>(head.bytes())});
    peer.awake = false;
  }
  if (refusal) events_.fail(*refusal);
}

// Call this when a message that this rank has offered has arrived.
void Links::take_taken(Peer& peer, std::uint64_t number) {
  Peer::Offered offered;
  {
    const std::lock_guard lock(mutex_);
    const auto found = peer.offers.find(number);
    if (closed_ || found == peer.offers.end()) return;
    offered = std::move(found->second);
    peer.offers.erase(found);
  }
  offered.buffer->waitSend(kForever);  // the bytes have arrived, so this does not wait
  const std::lock_guard lock(mutex_);
  messages_.sent(*offered.send);
}

std::optional<MessageInfo> Links::probe(int source, int tag) {
  const std::lock_guard lock(mutex_);
  return closed_ ? std::nullopt : messages_.probe(source, tag);
}

void Links::start(OpState& s) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    if (const std::vector<int> lost = messages_.lost(s); !lost.empty())
      return events_.refuse(s, left(lost, &s));
    if (s.op != Op::send) return messages_.receive(s);
    if (s.peer == context_->rank) return messages_.send_to_self(s);
    send(s);
  } catch (const std::exception&) {
    // The connection has broken; the peer's thread notices and reports that.
  }
}

// Called with mutex_ held. Two sends with one tag are matched in the order of their control messages. A
// `leave` of the peer is also answered under the lock, so this rank knows whether the peer has left when it
// writes the message.
void Links::send(OpState& s) {
  const NoSignals guard;
  Peer& peer = *peers_[static_cast<std::size_t>(s.peer)];
  const auto bytes = static_cast<std::size_t>(s.in_count * size_bytes(s.dtype));
  ControlMessage control{
      .kind = ControlMessage::Kind::message, .tag = s.tag, .dtype = s.dtype, .count = s.in_count};
  messages_.begin_send(s);
  if (bytes > kEagerBytes) {
    control.kind = ControlMessage::Kind::offer;
    control.number = peer.next_offer++;
    Peer::Offered& offered = peer.offers[control.number];
    offered = {context_->createUnboundBuffer(writable(s.in), bytes), &s};
    offered.buffer->send(s.peer, kData + control.number);
    return write(peer, control);
  }
  write(peer, control, s.in, bytes);
  messages_.sent(s);
}

}  // namespace weft::gloo_backend
