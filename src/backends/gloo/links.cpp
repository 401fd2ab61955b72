// The connection of two ranks: a dedicated thread reads control messages, in order.

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <cstddef>

#include "backends/gloo/link_parts.hpp"
#include "backends/last_calls.hpp"
#include "base/hash.hpp"
#include "base/signals.hpp"
#include "weft/backends/blocking.hpp"

namespace weft::gloo_backend {
namespace {

constexpr auto kGoodBye = std::chrono::seconds(2);
// After this many control messages, this rank notifies the peer that it has read them.
constexpr std::uint64_t kUnacknowledged = 32;

}  // namespace

std::uint64_t Links::layout() noexcept {
  return digest_of(sizeof(ControlMessage), offsetof(ControlMessage, kind), offsetof(ControlMessage, tag),
                   offsetof(ControlMessage, dtype), offsetof(ControlMessage, count),
                   offsetof(ControlMessage, number), offsetof(ControlMessage, acknowledged),
                   offsetof(ControlMessage, announcement), static_cast<int>(ControlMessage::Kind::pong),
                   kEagerBytes, kControlMessages, kData, RollCallMessages::kLastCallBytes);
}

Links::Links(std::shared_ptr<::gloo::Context> context, UnexpectedLimits limits, LinkEvents events)
    : context_(std::move(context)),
      events_(std::move(events)),
      messages_(*this, context_->rank, context_->size, limits),
      calls_(context_->rank, context_->size) {
  for (int r = 0; r < size(); ++r) {
    peers_.push_back(std::make_unique<Peer>());
    Peer& peer = *peers_.back();
    peer.rank = r;
    if (r == context_->rank) continue;  // messages of a rank to itself are copied in start()
    peer.in = context_->createUnboundBuffer(peer.incoming.data(), peer.incoming.size());
    try {
      peer.in->recv(r, kControlMessages);
    } catch (const ::gloo::Exception& e) {  // the peer has made the group, and has already left
      throw Error(Failure{.code = ErrorCode::peer_lost,
                          .text = fmt::format("rank {} was lost while the group was made: {}", r, e.what()),
                          .ranks = {r}});
    }
  }
  const NoSignals inherited;
  try {
    for (auto& peer : peers_)
      if (peer->rank != context_->rank) peer->thread = std::thread([this, p = peer.get()] { read(*p); });
  } catch (...) {  // no more threads: the running threads are ended first
    interrupt();
    end_threads();
    throw;
  }
}

void Links::end_threads() noexcept {
  for (auto& peer : peers_)
    if (peer->thread.joinable()) peer->thread.join();
}

Links::~Links() {
  bool well = false;
  {
    const std::lock_guard lock(mutex_);
    well = !closed_;
  }
  if (well) {
    const NoSignals guard;
    for (int i = 1; i < size(); ++i) {
      Peer& peer = *peers_[static_cast<std::size_t>((context_->rank + i) % size())];
      if (events_.before_leave) events_.before_leave(peer.rank);
      try {
        write(peer, ControlMessage{.kind = ControlMessage::Kind::leave});
      } catch (const std::exception&) {}
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kGoodBye, [&] {
      return std::all_of(peers_.begin(), peers_.end(),
                         [&](const auto& p) { return p->rank == context_->rank || p->released || p->gone; });
    });
  }
  interrupt();
  end_threads();
}

void Links::interrupt() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    changed_.notify_all();
  }
  if (size() == 1) return;
  // When one wait times out, Gloo closes all pairs of a context and wakes all threads that wait for them.
  try {
    std::byte nothing{};
    context_->createUnboundBuffer(&nothing, 1)->waitRecv(std::chrono::milliseconds(1));
  } catch (const std::exception&) {}
  // But Gloo does not wake a thread that waits for a message of which a part has arrived.
  for (auto& peer : peers_)
    if (peer->in) peer->in->abortWaitRecv();
}

bool Links::stays(int rank) {
  const std::lock_guard lock(mutex_);
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  return !closed_ && !peer.leaves && !peer.released;
}

bool Links::has_left(int rank) const {
  const std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(rank)]->leaves;
}

Failure Links::left(const std::vector<int>& ranks, const OpState* s) const {
  Failure f{.code = ErrorCode::peer_lost, .text = left_text(s ? s->op : Op::none, ranks), .ranks = ranks};
  if (s) f.op = s->op, f.call = s->call;
  return f;
}

void Links::write(Peer& peer, ControlMessage control, const void* payload, std::size_t bytes) {
  const std::lock_guard lock(peer.writing);
  const std::uint64_t acknowledged = peer.acknowledged.load(std::memory_order_acquire);
  for (; peer.first_sent < acknowledged && !peer.sent.empty(); ++peer.first_sent) peer.sent.pop_front();
  control.acknowledged = peer.read.load(std::memory_order_acquire);
  peer.acknowledgement_sent = control.acknowledged;
  Peer::Sent& sent = peer.sent.emplace_back();
  sent.bytes.resize(sizeof(ControlMessage) + bytes);
  std::memcpy(sent.bytes.data(), static_cast<const void*>(&control), sizeof(ControlMessage));
  if (bytes > 0) std::memcpy(sent.bytes.data() + sizeof(ControlMessage), payload, bytes);
  sent.buffer = context_->createUnboundBuffer(sent.bytes.data(), sent.bytes.size());
  sent.buffer->send(peer.rank, kControlMessages);
}

// Fetches the elements of messages that receives have claimed.
void Links::fetch_matched(Peer& peer) {
  for (;;) {
    std::pair<OpState*, std::uint64_t> task;
    {
      const std::lock_guard lock(mutex_);
      if (closed_) throw std::runtime_error("closed");
      if (peer.to_fetch.empty()) return;
      task = peer.to_fetch.front();
      peer.to_fetch.pop_front();
    }
    fetch_one(peer, *task.first, task.second);
  }
}

// The thread of one peer. It reads until the connection ends, even after the peer has answered this rank's
// `leave`. The peer's own `leave` may follow, and needs an answer. If a rank stopped reading earlier, the
// peer would wait until the connection ends, and other ranks would wait for the peer, perhaps in a circle.
void Links::read(Peer& peer) noexcept {
  ::pthread_setname_np(::pthread_self(), "weft-gloo");
  try {
    for (;;) {
      fetch_matched(peer);
      if (!peer.in->waitRecv(kForever)) continue;  // woken for to_fetch
      std::array<std::byte, sizeof(ControlMessage) + kEagerBytes> bytes;
      bytes = peer.incoming;
      peer.read.fetch_add(1, std::memory_order_release);
      ControlMessage control;
      std::memcpy(static_cast<void*>(&control), bytes.data(), sizeof(ControlMessage));
      peer.in->recv(peer.rank, kControlMessages);
      peer.acknowledged.store(control.acknowledged, std::memory_order_release);
      take(peer, control, bytes.data() + sizeof(ControlMessage));
      bool tell = false;
      {
        const std::lock_guard lock(peer.writing);
        tell = peer.read.load(std::memory_order_relaxed) - peer.acknowledgement_sent >= kUnacknowledged;
      }
      if (tell) write(peer, ControlMessage{.kind = ControlMessage::Kind::acknowledged});
    }
  } catch (const std::exception&) {  // one of the two sides has closed the connection, or it has broken
  }
  bool died = false;
  {
    const std::lock_guard lock(mutex_);
    died = !closed_ && !peer.leaves && !peer.released;
    peer.gone = true;
    messages_.left(peer.rank);
    changed_.notify_all();
  }
  if (died)
    events_.fail(Failure{.code = ErrorCode::peer_lost,
                         .text = fmt::format("rank {} was lost: its connection broke", peer.rank),
                         .ranks = {peer.rank}});
}

void Links::take(Peer& peer, const ControlMessage& control, const std::byte* payload) {
  switch (control.kind) {
    case ControlMessage::Kind::acknowledged: return;
    case ControlMessage::Kind::message:
    case ControlMessage::Kind::offer: return take_message(peer, control, payload);
    case ControlMessage::Kind::taken: return take_taken(peer, control.number);
    case ControlMessage::Kind::announce: {
      const std::lock_guard lock(mutex_);
      calls_.arrived(peer.rank, control.announcement);
      messages_.called(peer.rank, control.announcement.record);
      changed_.notify_all();
      return;
    }
    case ControlMessage::Kind::leave: return take_leave(peer);
    case ControlMessage::Kind::ping:
    case ControlMessage::Kind::pong: {
      const std::lock_guard lock(mutex_);
      messages_.received_notice(
          peer.rank, control.kind == ControlMessage::Kind::ping ? Notice::ping : Notice::pong,
          static_cast<std::uint32_t>(control.number), {payload, static_cast<std::size_t>(control.count)});
      return;
    }
    case ControlMessage::Kind::farewell: {
      const std::lock_guard lock(mutex_);
      peer.released = true;
      changed_.notify_all();
      return;
    }
  }
}

void Links::take_leave(Peer& peer) {
  std::vector<int> lost;
  {
    const std::lock_guard lock(mutex_);
    peer.leaves = true;
    messages_.left(peer.rank);
    lost = messages_.lost();
    changed_.notify_all();
  }
  write(peer, ControlMessage{.kind = ControlMessage::Kind::farewell});
  if (!lost.empty()) events_.fail(left(lost, nullptr));
}

}  // namespace weft::gloo_backend
