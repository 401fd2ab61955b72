#include "backends/gloo/links.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "base/hash.hpp"
#include "base/signals.hpp"
#include "weft/backends/blocking.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::gloo_backend {
namespace {

// Slots of our own, apart from those of Gloo's collectives, whose first byte is 1 to 8.
constexpr std::uint64_t kControlMessages = 0x40ull << 56;
constexpr std::uint64_t kData = 0x41ull << 56;  // and the message's number
// Gloo's way to wait without a limit: the group watches the deadlines.
constexpr auto kForever = std::chrono::hours(24 * 30);
constexpr auto kGoodBye = std::chrono::seconds(2);
constexpr std::uint64_t kUnacknowledged =
    32;  // control messages of a peer after which it is told that they were read

void* writable(const std::byte* p) { return const_cast<std::byte*>(p); }

}  // namespace

struct Links::ControlMessage {
  enum class Kind : std::uint32_t {
    message,       // payload follows
    offer,         // a large message, which waits in slot kData + number
    taken,         // that one has arrived
    announce,      // a collective
    acknowledged,  // only for its field `acknowledged`
    leave,         // this rank leaves the group
    farewell,      // the answer: everything before it was read; the answering rank's own leave may still come
    ping,          // whoever runs answers with
    pong,          // payload: whom it waits for
  };
  Kind kind = Kind::acknowledged;
  std::int32_t tag = 0;
  DType dtype = DType::u8;
  std::int64_t count = 0;
  std::uint64_t number = 0;
  std::uint64_t acknowledged =
      0;  // control messages of the receiver that the sender has read: their memory may go
  Announcement announcement{};
};

std::uint64_t Links::layout() noexcept {
  return digest_of(sizeof(ControlMessage), offsetof(ControlMessage, kind), offsetof(ControlMessage, tag),
                   offsetof(ControlMessage, dtype), offsetof(ControlMessage, count),
                   offsetof(ControlMessage, number), offsetof(ControlMessage, acknowledged),
                   offsetof(ControlMessage, announcement), static_cast<int>(ControlMessage::Kind::pong),
                   kEagerBytes, kControlMessages, kData);
}

// A message that has come. `number`: of an offer; otherwise it is in payload.
struct Links::Envelope {
  DType dtype = DType::u8;
  std::int64_t count = 0;
  bool offer = false;
  std::uint64_t number = 0;
  std::vector<std::byte> payload;
};

struct Links::Peer {
  struct Sent {
    std::vector<std::byte> bytes;
    UnboundBuffer buffer;
  };
  struct Offered {
    UnboundBuffer buffer;
    OpState* send = nullptr;
  };
  int rank = 0;
  std::thread thread;

  std::mutex writing;  // the order of control messages
  std::deque<Sent> sent;
  std::uint64_t first_sent = 0;  // number of sent.front()
  std::atomic<std::uint64_t> read{0}, acknowledged{0};
  std::uint64_t acknowledgement_sent = 0;

  std::array<std::byte, sizeof(ControlMessage) + kEagerBytes> incoming{};
  UnboundBuffer in;

  // Under Links::mutex_:
  std::deque<std::pair<OpState*, std::uint64_t>> to_fetch;  // matched by start(): for the thread
  std::map<std::uint64_t, Offered> offers;
  std::uint64_t next_offer = 0;
  std::deque<Announcement> announced;
  std::uint64_t calls = 0;  // it has announced those below
  bool leaves = false;      // it has said leave
  bool released = false;    // it has answered ours
  bool gone = false;        // its thread has ended
  bool fetching = false;    // its thread waits for the bytes of a large message
};

Links::Links(std::shared_ptr<::gloo::Context> context, UnexpectedLimits limits, LinkEvents events)
    : context_(std::move(context)),
      events_(std::move(events)),
      matcher_(context_->size, limits),
      roll_(context_->rank, context_->size) {
  for (int r = 0; r < size(); ++r) {
    peers_.push_back(std::make_unique<Peer>());
    Peer& peer = *peers_.back();
    peer.rank = r;
    if (r == context_->rank) continue;  // what a rank sends itself is copied in start()
    peer.in = context_->createUnboundBuffer(peer.incoming.data(), peer.incoming.size());
    try {
      peer.in->recv(r, kControlMessages);
    } catch (const ::gloo::Exception& e) {  // it has made the group, and is gone already
      throw Error(Failure{.code = ErrorCode::peer_lost,
                          .text = fmt::format("rank {} was lost while the group was made: {}", r, e.what()),
                          .ranks = {r}});
    }
  }
  const NoSignals inherited;
  try {
    for (auto& peer : peers_)
      if (peer->rank != context_->rank) peer->thread = std::thread([this, p = peer.get()] { read(*p); });
  } catch (...) {  // no more threads: those that run end first
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
  // Gloo closes all pairs of a context, and wakes all threads that wait for them, when one wait times out.
  try {
    std::byte nothing{};
    context_->createUnboundBuffer(&nothing, 1)->waitRecv(std::chrono::milliseconds(1));
  } catch (const std::exception&) {}
  // But not a thread that waits for a message of which a part has come.
  for (auto& peer : peers_)
    if (peer->in) peer->in->abortWaitRecv();
}

bool Links::stays(int rank) {
  const std::lock_guard lock(mutex_);
  const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
  return !closed_ && !peer.leaves && !peer.released;
}

Failure Links::left(int rank, const OpState* s) const {
  Failure f{.code = ErrorCode::peer_lost,
            .text = fmt::format("{}rank {} left the group", s ? fmt::format("{}: ", name(s->op)) : "", rank),
            .ranks = {rank}};
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

// The thread of one peer. It reads until the connection ends, even after the peer has answered this rank's
// `leave`: the peer's own `leave` may follow, and needs an answer. A rank that stopped earlier would keep the
// peer waiting until the connection ends, and that peer another one, perhaps in a circle.
void Links::read(Peer& peer) noexcept {
  ::pthread_setname_np(::pthread_self(), "weft-gloo");
  try {
    for (;;) {
      for (;;) {
        std::pair<OpState*, std::uint64_t> task;
        {
          const std::lock_guard lock(mutex_);
          if (closed_) throw std::runtime_error("closed");
          if (peer.to_fetch.empty()) break;
          task = peer.to_fetch.front();
          peer.to_fetch.pop_front();
        }
        fetch(peer, *task.first, task.second);
      }
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
  } catch (const std::exception&) {  // closed by one of the two sides, or broken
  }
  bool died = false;
  {
    const std::lock_guard lock(mutex_);
    died = !closed_ && !peer.leaves && !peer.released;
    peer.gone = true;
    changed_.notify_all();
  }
  if (died)
    events_.fail(Failure{.code = ErrorCode::peer_lost,
                         .text = fmt::format("rank {} was lost: its connection broke", peer.rank),
                         .ranks = {peer.rank}});
}

Failure Links::wrong_size(const OpState& recv, const Envelope& envelope) const {
  return {.code = ErrorCode::mismatch,
          .text = fmt::format("rank {} sent {} x{} with tag {}, rank {} receives {} x{}", recv.peer,
                              name(envelope.dtype), envelope.count, recv.tag, context_->rank,
                              name(recv.dtype), recv.out_count),
          .op = Op::recv,
          .call = recv.call,
          .ranks = {std::min(recv.peer, context_->rank), std::max(recv.peer, context_->rank)}};
}

// Gives the message to its receive: at once, or, where it is an offer, by fetch(). Returns true where fetch()
// follows.
bool Links::match(OpState& recv, const Envelope& envelope) {
  if (envelope.dtype != recv.dtype || envelope.count != recv.out_count) {
    events_.refuse(recv, wrong_size(recv, envelope));
    return false;
  }
  if (envelope.offer) return true;
  if (!envelope.payload.empty()) std::memcpy(recv.out, envelope.payload.data(), envelope.payload.size());
  events_.finished(recv);
  return false;
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
  events_.finished(recv);
}

void Links::take(Peer& peer, const ControlMessage& control, const std::byte* payload) {
  switch (control.kind) {
    case ControlMessage::Kind::acknowledged: return;
    case ControlMessage::Kind::message:
    case ControlMessage::Kind::offer: {
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
          matcher_.keep(peer.rank, control.tag, bytes) = std::move(envelope);
          return;
        }
        if (recv == nullptr) refusal = matcher_.refusal(context_->rank, peer.rank, control.tag, bytes);
        if (recv != nullptr && !match(*recv, envelope)) return;
      }
      if (refusal) return events_.fail(*refusal);
      fetch(peer, *recv, control.number);
      return;
    }
    case ControlMessage::Kind::taken: {
      Peer::Offered offered;
      {
        const std::lock_guard lock(mutex_);
        const auto found = peer.offers.find(control.number);
        if (closed_ || found == peer.offers.end()) return;
        offered = std::move(found->second);
        peer.offers.erase(found);
      }
      offered.buffer->waitSend(kForever);  // the bytes are there, so this does not wait
      events_.finished(*offered.send);
      return;
    }
    case ControlMessage::Kind::announce: {
      const std::lock_guard lock(mutex_);
      peer.announced.push_back(control.announcement);
      ++peer.calls;
      changed_.notify_all();
      return;
    }
    case ControlMessage::Kind::leave: {
      bool owed = false;
      {
        const std::lock_guard lock(mutex_);
        peer.leaves = true;
        owed = matcher_.awaits(peer.rank) || !peer.offers.empty();
        changed_.notify_all();
      }
      write(peer, ControlMessage{.kind = ControlMessage::Kind::farewell});
      if (owed) events_.fail(left(peer.rank, nullptr));
      return;
    }
    case ControlMessage::Kind::ping: {
      std::vector<std::byte> awaits;
      {
        const std::lock_guard lock(mutex_);
        awaits = RollCallMessages::encode(awaited(), std::min(size(), static_cast<int>(8 * kEagerBytes)));
      }
      return write(peer,
                   ControlMessage{.kind = ControlMessage::Kind::pong,
                                  .count = static_cast<std::int64_t>(awaits.size()),
                                  .number = control.number},
                   awaits.data(), awaits.size());
    }
    case ControlMessage::Kind::pong: {
      const std::lock_guard lock(mutex_);
      roll_.answered(peer.rank, static_cast<std::uint32_t>(control.number),
                     {payload, static_cast<std::size_t>(control.count)});
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

void Links::start(OpState& s) noexcept {
  Peer& peer = *peers_[static_cast<std::size_t>(s.peer)];
  const bool self = s.peer == context_->rank;
  try {
    if (s.op == Op::send) {
      const auto bytes = static_cast<std::size_t>(s.in_count * size_bytes(s.dtype));
      ControlMessage control{
          .kind = ControlMessage::Kind::message, .tag = s.tag, .dtype = s.dtype, .count = s.in_count};
      const NoSignals guard;
      if (self) {
        Envelope envelope{.dtype = s.dtype, .count = s.in_count, .payload = {}};
        envelope.payload.assign(s.in, s.in + bytes);
        const auto kept_bytes = static_cast<std::int64_t>(bytes);
        const std::lock_guard lock(mutex_);
        if (OpState* const recv = matcher_.take_receive(s.peer, s.tag)) {
          match(*recv, envelope);
        } else if (matcher_.has_room(kept_bytes)) {
          matcher_.keep(s.peer, s.tag, kept_bytes) = std::move(envelope);
        } else {
          return events_.refuse(s, matcher_.refusal(context_->rank, s.peer, s.tag, kept_bytes));
        }
        events_.finished(s);
        return;
      }
      if (bytes > kEagerBytes) {
        const std::lock_guard lock(mutex_);
        if (closed_) return;
        if (peer.leaves || peer.gone) return events_.refuse(s, left(s.peer, &s));
        control.kind = ControlMessage::Kind::offer;
        control.number = peer.next_offer++;
        Peer::Offered& offered = peer.offers[control.number];
        offered = {context_->createUnboundBuffer(writable(s.in), bytes), &s};
        offered.buffer->send(s.peer, kData + control.number);
        // The control message under the lock, too: two sends of one tag are matched in the order of their
        // control messages.
        write(peer, control);
        return;
      }
      {
        const std::lock_guard lock(mutex_);
        if (closed_) return;
        if (peer.leaves || peer.gone) return events_.refuse(s, left(s.peer, &s));
      }
      write(peer, control, s.in, bytes);
      events_.finished(s);
      return;
    }
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    bool offered = false;
    std::uint64_t number = 0;
    const bool found = matcher_.take_message(s.peer, s.tag, [&](const Envelope& envelope) {
      offered = match(s, envelope);
      number = envelope.number;
    });
    if (!found) {
      if (peer.leaves || peer.gone) return events_.refuse(s, left(s.peer, &s));
      return matcher_.post(s.peer, s.tag, s);
    }
    if (!offered) return;
    peer.to_fetch.emplace_back(&s, number);
    peer.in->abortWaitRecv();
  } catch (const std::exception&) {
    // The connection broke; the peer's thread sees it too and says so.
  }
}

void Links::agree(const OpState& s) {
  const int n = size(), self = context_->rank;
  const Announcement mine = announcement_of(s, n);
  {
    const std::lock_guard lock(mutex_);
    current_ = s.call;
  }
  const auto expected_of = [&](int r) {
    Announcement a = mine;
    announce_to(a, s, r, n);
    return a;
  };
  for (int r = 0; r < n; ++r)
    if (r != self)
      write(*peers_[static_cast<std::size_t>(r)],
            ControlMessage{.kind = ControlMessage::Kind::announce, .announcement = expected_of(r)});
  for (int r = 0; r < n; ++r) {
    if (r == self) continue;
    Peer& peer = *peers_[static_cast<std::size_t>(r)];
    Announcement theirs;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || peer.leaves || peer.gone || !peer.announced.empty(); });
      if (closed_) throw std::runtime_error("the group has failed");
      if (peer.announced.empty()) {
        if (peer.leaves) throw Error(left(r, &s));
        throw std::runtime_error("the connection broke");
      }
      theirs = peer.announced.front();
      peer.announced.pop_front();
    }
    const Announcement here = expected_of(r);
    if (theirs.record != here.record) throw Error(mismatch(r, theirs.record, self, here.record));
    if (theirs.gives != here.expects || theirs.expects != here.gives)
      throw Error(Failure{
          .code = ErrorCode::mismatch,
          .text = fmt::format("{}: rank {} gives rank {} {} elements, which expects {}; rank {} gives rank "
                              "{} {} elements, which expects {} [call {}]",
                              name(s.op), r, self, theirs.gives, here.expects, self, r, here.gives,
                              theirs.expects, s.call),
          .op = s.op,
          .call = s.call,
          .ranks = {std::min(r, self), std::max(r, self)}});
  }
}

void Links::over() noexcept {
  const std::lock_guard lock(mutex_);
  current_.reset();
}

std::vector<int> Links::late(std::uint64_t call) const {
  std::vector<int> ranks;
  for (const auto& peer : peers_)
    if (peer->rank != context_->rank && peer->calls <= call) ranks.push_back(peer->rank);
  return ranks;
}

// With mutex_ held. Inside a collective of Gloo, a rank may wait for any other.
std::vector<int> Links::awaited_by(const OpState& s) const {
  if (!row(s.op).collective) return {s.peer};
  std::vector<int> ranks = late(s.call);
  for (int r = 0; r < size() && ranks.empty(); ++r)
    if (r != context_->rank) ranks.push_back(r);
  return ranks;
}

// The ranks that calls in flight wait for. With mutex_ held.
std::vector<int> Links::awaited() const {
  std::vector<int> ranks = current_ ? late(*current_) : std::vector<int>();
  const bool inside = current_ && ranks.empty();
  for (const auto& peer : peers_)
    if (peer->rank != context_->rank &&
        (inside || peer->fetching || matcher_.awaits(peer->rank) || !peer->offers.empty()))
      ranks.push_back(peer->rank);
  return ranks;
}

bool Links::ask(const OpState& s) {
  const NoSignals guard;
  std::uint32_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return true;
    number = roll_.begin(s.op, s.call);
  }
  for (const auto& peer : peers_) {
    if (number == 0 || peer->rank == context_->rank) continue;
    try {
      write(*peer, ControlMessage{.kind = ControlMessage::Kind::ping, .number = number});
    } catch (const std::exception&) {}  // the connection broke: it will not answer
  }
  const std::lock_guard lock(mutex_);
  return closed_ || roll_.settled(awaited_by(s));
}

std::vector<int> Links::missing(const OpState& s, std::string& story) {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks = awaited_by(s);
  const HoldUp found = roll_.found(ranks);
  if (row(s.op).collective && late(s.call).empty()) {
    story = "all ranks had arrived";
    if (!found.silent || found.ranks.empty()) return {};
    story +=
        fmt::format("; {} {} not answer", name_ranks(found.ranks), found.ranks.size() == 1 ? "does" : "do");
    return found.ranks;
  }
  const auto simple = [&](std::span<const int> these) {
    if (!row(s.op).collective)
      return fmt::format("rank {} {} with tag {}", s.peer,
                         s.op == Op::send ? "has not received the message" : "has sent no message", s.tag);
    std::string text;
    for (const int r : these) text += fmt::format("{}rank {} had not arrived", text.empty() ? "" : "; ", r);
    return text;
  };
  story = tell(ranks, found, simple, true);
  return ranks;
}

}  // namespace weft::gloo_backend
