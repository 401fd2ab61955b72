// A Backend over streams of bytes between pairs of ranks.
//
// A message is an envelope and its elements; they go through the stream to the receiver, which matches them. A send is
// done when the stream has taken all of it. Beside messages, streams carry the roll-call's questions and answers, and
// that a rank leaves. Ranks learn of a failure from the store (FirstCause). Only post(), poll(), ask() and answer()
// call the host's functions, so that nothing touches a caller's memory outside of them.
#include "capi/transport/host_backend.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>

#include "base/errors/caught.hpp"
#include "base/hash.hpp"
#include "capi/transport/host_channel.hpp"
#include "host/cores/usable_cores.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/backends/host_ranks.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/matching.hpp"
#include "weft/backends/roll_call_messages.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/base/storage.hpp"

namespace weft::capi {
namespace {

struct Envelope {
  enum Kind : std::uint16_t { message, ask, answer, leave };
  std::int32_t tag = 0;  // of a question or an answer: its number
  std::uint16_t kind = message;
  std::uint16_t dtype = 0;
  std::int64_t count = 0;  // elements; of an answer: bytes
};
constexpr std::uint64_t kLayout = digest_of(sizeof(Envelope), offsetof(Envelope, kind),
                                            offsetof(Envelope, dtype), offsetof(Envelope, count));
constexpr std::size_t kReadAtOnce = std::size_t{1} << 20;  // from one rank in one poll

// An unexpected message. A program may leave many of them: they lie in local memory, which its allocator may give.
struct Kept {
  DType dtype = DType::f32;
  std::int64_t count = 0;
  Storage bytes;  // empty where there are none
};

class HostBackend final : public Backend {
 public:
  HostBackend(const GroupInit& b, std::shared_ptr<const HostTransport> host)
      : context_(b.context),
        rank_(b.rank),
        size_(b.size),
        cause_(b.size > 1 ? b.store : nullptr, b.token),
        matcher_(b.size, UnexpectedLimits::from_env()),
        peers_(static_cast<std::size_t>(b.size)),
        roll_call_(b.rank, b.size),
        channel_(std::move(host), b.rank) {
    open(b);
  }
  ~HostBackend() override {
    if (!failed_) say_goodbye();
  }

  const Traits& traits() const noexcept override { return traits_; }

  void post(OpState& s) noexcept override {
    Transfer& t = *new (s.scratch.data()) Transfer;
    if (s.op == Op::recv && s.peer == any_source) step();  // what has come, from whomever
    const Inside inside(*this);
    guarded([&] {
      if (failed_) return;
      if (s.op == Op::wait_message) {
        waits_.push_back(&s);
      } else if (s.op == Op::recv) {
        if (const int source = matcher_.source_of(s.peer, s.tag); source >= 0) s.peer = source;
        const auto take = [&](const Kept& kept) { deliver(s, kept.dtype, kept.count, kept.bytes.data()); };
        if (s.peer == any_source || !matcher_.take_message(s.peer, s.tag, take))
          matcher_.post(s.peer, s.tag, s);
      } else if (s.peer == rank_) {
        const auto bytes = static_cast<std::size_t>(s.in_count * size_bytes(s.dtype));
        Storage copy = room_for(bytes);
        if (bytes > 0) std::memcpy(copy.data(), s.in, bytes);
        message_arrived(
            rank_, Envelope{.tag = s.tag, .dtype = static_cast<std::uint16_t>(s.dtype), .count = s.in_count},
            std::move(copy));
        t.done = true;
      } else {
        peer(s.peer).out.push_back(
            {.envelope = {.tag = s.tag, .dtype = static_cast<std::uint16_t>(s.dtype), .count = s.in_count},
             .bytes = s.in,
             .count = static_cast<std::size_t>(s.in_count * size_bytes(s.dtype)),
             .send = &s});
        flush(s.peer);
      }
    });
  }

  Step poll(OpState& s) noexcept override {
    if (failed_) return Step::failed;
    const bool moved = !Transfer::of(s).done && step();
    if (failed_) return Step::failed;
    if (s.op == Op::wait_message) look(s);
    if (Transfer::of(s).done) return Step::done;
    return moved ? Step::advanced : Step::pending;
  }

  bool healthy() noexcept override {
    if (failed_) return false;
    if (const auto cause = cause_.look()) learn(*cause);
    each_other([&](int r) {
      if (failed_) return;
      if (peer(r).left && (awaits(r) || sends_to(r)))
        lose({&r, 1}, "left the group");
      else if (!peer(r).left && ranks_.is_here(r) && !ranks_.alive(r))
        lose({&r, 1}, "died");
    });
    if (!failed_ && awaits_any()) {
      std::vector<int> left;
      each_other([&](int r) {
        if (peer(r).left) left.push_back(r);
      });
      if (size_ > 1 && static_cast<int>(left.size()) == size_ - 1) lose(left, "left the group");
    }
    return !failed_;
  }

  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    std::vector<int> ranks = awaited_by(s);
    story = tell(ranks, roll_call_.found(ranks), [&](std::span<const int> who) {
      if (s.op == Op::wait_message || s.peer == any_source) return not_sent(s, who, rank_, size_);
      return fmt::format("{} {} not {} it", name_ranks(who), who.size() == 1 ? "has" : "have",
                         s.op == Op::recv ? "sent" : "taken");
    });
    return ranks;
  }

  bool ask(const OpState& s) noexcept override {
    guarded([&] {
      if (const std::uint32_t number = roll_call_.begin(s.op, s.call); number != 0)
        each_other([&](int r) {
          if (!peer(r).left) control(r, Envelope::ask, number, {});
        });
    });
    step();
    return failed_ || roll_call_.settled(awaited_by(s));
  }
  void answer() noexcept override { step(); }
  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    step();
    return kept(source, tag);
  }

  void fail(const Failure& why) noexcept override {
    learn(cause_.raise(why));
    ranks_.ring_all();
  }
  Failure failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  bool quiet() const noexcept override { return !inside_; }
  bool quiesce(Deadline deadline, std::span<const MemoryRange>) noexcept override {
    constexpr useconds_t kPause = 100;
    while (!quiet() && !deadline.passed()) ::usleep(kPause);
    return quiet();
  }
  void announce_sleep(bool) noexcept override {}  // the traits say that nobody rings
  std::vector<int> gone() const noexcept override {
    std::vector<int> ranks;
    each_other([&](int r) {
      const Peer& p = peers_[static_cast<std::size_t>(r)];
      if (p.left || p.lost || (ranks_.is_here(r) && !ranks_.alive(r))) ranks.push_back(r);
    });
    return ranks;
  }

 private:
  struct Transfer {  // in OpState::scratch
    bool done = false;
    static Transfer& of(OpState& s) noexcept {
      return *std::launder(reinterpret_cast<Transfer*>(s.scratch.data()));
    }
  };
  struct Outgoing {
    Envelope envelope;
    const std::byte* bytes = nullptr;
    std::size_t count = 0;
    OpState* send = nullptr;       // null: of weft's own
    std::vector<std::byte> own{};  // where `send` is null
    std::size_t written = 0;       // of the envelope and the bytes
  };
  struct Peer {
    std::deque<Outgoing> out;
    // What comes in: the envelope, then its bytes, to the receive that waits for them or into memory of ours.
    Envelope in;
    std::size_t in_read = 0;
    OpState* receive = nullptr;
    Storage message;
    std::vector<std::byte> control;
    std::byte* place() noexcept {
      if (receive != nullptr) return receive->out;
      return in.kind == Envelope::message ? message.data() : control.data();
    }
    std::atomic<bool> left{false}, lost{false};
  };
  // While it lives this rank may be inside callers' memory. Set before failed_ is read: who fails the group sees it.
  struct Inside {
    explicit Inside(HostBackend& b) : backend(b) { backend.inside_ = true; }
    ~Inside() { backend.inside_ = false; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    HostBackend& backend;
  };

  // While it lives this rank reads a message; an answer that it writes then reads none.
  struct Pulling {
    explicit Pulling(HostBackend& b) : backend(b) { backend.pulling_ = true; }
    ~Pulling() { backend.pulling_ = false; }
    Pulling(const Pulling&) = delete;
    Pulling& operator=(const Pulling&) = delete;
    HostBackend& backend;
  };

  const HostTransport& host() const { return channel_.host(); }
  Peer& peer(int r) { return peers_[static_cast<std::size_t>(r)]; }
  std::vector<int> awaited_by(const OpState& s) const {
    return s.op == Op::send ? std::vector<int>{s.peer} : awaited_sources(s, rank_, size_);
  }
  bool waits_for(int source) const {
    return std::any_of(waits_.begin(), waits_.end(), [&](const OpState* s) {
      return s->peer == source && matcher_.source_of(source, s->tag) < 0;
    });
  }
  // Whether calls in flight wait for a message of that rank, or of any.
  bool awaits(int r) const { return matcher_.awaits(r) || waits_for(r); }
  bool awaits_any() const { return matcher_.awaits_any() || waits_for(any_source); }
  std::optional<MessageInfo> kept(int source, std::int32_t tag) const {
    const int from = matcher_.source_of(source, tag);
    if (from < 0) return std::nullopt;
    const Kept& message = *matcher_.message(from, tag);
    return MessageInfo{from, tag, message.dtype, message.count};
  }
  // Ends a wait_message whose message has come.
  void look(OpState& s) {
    const std::optional<MessageInfo> found = kept(s.peer, s.tag);
    if (!found) return;
    s.peer = found->source;
    s.dtype = found->dtype;
    s.out_count = found->count;
    std::erase(waits_, &s);
    Transfer::of(s).done = true;
  }
  template <class F>
  void each_other(const F& f) const {
    for (int r = 0; r < size_; ++r)
      if (r != rank_) f(r);
  }
  bool sends_to(int r) {
    const auto& out = peer(r).out;
    return std::any_of(out.begin(), out.end(), [](const Outgoing& o) { return o.send != nullptr; });
  }

  // What `f` throws fails the group.
  template <class F>
  void guarded(const F& f) noexcept {
    try {
      f();
    } catch (const Error& e) {
      fail({.code = e.code(), .text = e.what(), .ranks = {e.ranks().begin(), e.ranks().end()}});
    } catch (...) {
      fail({.code = ErrorCode::system,
            .text = fmt::format("transport {}: rank {}: {}", host().name, rank_, caught_words()),
            .ranks = {rank_}});
    }
  }

  // What `f` throws of a rank that is lost is remembered.
  template <class F>
  auto about(int r, const F& f) {
    try {
      return f();
    } catch (const Error& e) {
      if (e.code() == ErrorCode::peer_lost) peer(r).lost = true;
      throw;
    }
  }

  void open(const GroupInit& b) {
    const HostPlaces places = meet_over(channel_.host(), b, kLayout);
    bool all_here = true;
    if (b.size > 1) {
      ranks_ = HostRanks(b, places.addresses);
      each_other([&](int r) { all_here = all_here && ranks_.is_here(r); });
    }
    channel_.open(b, places.transport_ranks);
    traits_.name = host().name;
    traits_.ops = op_bit(Op::send) | op_bit(Op::recv) | op_bit(Op::wait_message);
    traits_.dtypes = (DTypeSet{1} << kDTypeCount) - 1;
    traits_.guarantees = {.deadline = true,
                          .names_absent = true,
                          .detects_death = host().calls.detects_death || all_here,
                          .survives_death = true,
                          .revocable = true,
                          .quiesces = true};
    traits_.spin = host().calls.spin && b.ranks_here <= CpuShare::usable().count();
    traits_.rings = false;
    try {  // nobody writes to a channel whose other end is not open
      if (b.size > 1) join(b, "host/opened", {}, kLayout);
    } catch (...) {
      channel_.close();
      throw;
    }
    if (b.size > 1) withdraw(b, "host/open");  // who has come to the second one has read the first
  }
  // Goes on with all that can be written and read now. True: something moved.
  bool step() noexcept {
    const Inside inside(*this);
    bool moved = false;
    guarded([&] {
      each_other([&](int r) {
        if (failed_) return;
        moved = flush(r) || moved;
        moved = pull(r) || moved;
      });
    });
    return moved;
  }

  bool flush(int r) {
    Peer& p = peer(r);
    bool moved = false;
    while (!p.out.empty() && !failed_) {
      Outgoing& o = p.out.front();
      while (o.written < sizeof(Envelope) + o.count) {
        const bool head = o.written < sizeof(Envelope);
        const std::byte* const from = head ? reinterpret_cast<const std::byte*>(&o.envelope) + o.written
                                           : o.bytes + (o.written - sizeof(Envelope));
        const std::size_t most = head ? sizeof(Envelope) - o.written : o.count + sizeof(Envelope) - o.written;
        const std::size_t taken = write(r, from, most);
        if (taken == 0) return moved;
        o.written += taken;
        moved = true;
      }
      if (o.send != nullptr) Transfer::of(*o.send).done = true;
      p.out.pop_front();
    }
    return moved;
  }

  std::size_t write(int r, const std::byte* from, std::size_t most) {
    try {
      return about(r, [&] { return channel_.write(r, from, most); });
    } catch (const Error& e) {
      if (e.code() != ErrorCode::peer_lost || pulling_) throw;
      // Where it has left and closed its end, its last words are still to be read.
      while (pull(r)) {}
      if (!peer(r).left) throw;
      lose({&r, 1}, "left the group");
      return 0;
    }
  }
  std::size_t read(int r, std::byte* to, std::size_t most) {
    return about(r, [&] { return channel_.read(r, to, most); });
  }
  bool pull(int r) {
    const Pulling here(*this);
    Peer& p = peer(r);
    std::size_t all = 0;
    while (!failed_ && !p.left && all < kReadAtOnce) {
      if (p.in_read < sizeof(Envelope)) {
        const std::size_t got =
            read(r, reinterpret_cast<std::byte*>(&p.in) + p.in_read, sizeof(Envelope) - p.in_read);
        if (got == 0) break;
        all += got;
        p.in_read += got;
        if (p.in_read < sizeof(Envelope)) continue;
        begin_message(r);
        if (failed_) break;
      }
      const std::size_t bytes = payload_of(p.in), done = p.in_read - sizeof(Envelope);
      if (done < bytes) {
        const std::size_t got = read(r, p.place() + done, bytes - done);
        if (got == 0) break;
        all += got;
        p.in_read += got;
        if (p.in_read < sizeof(Envelope) + bytes) continue;
      }
      if (p.receive != nullptr)
        Transfer::of(*std::exchange(p.receive, nullptr)).done = true;
      else if (p.in.kind == Envelope::message)
        message_arrived(r, p.in, std::exchange(p.message, {}));
      else
        control_arrived(r, p.in, p.control);
      p.in_read = 0;
    }
    return all > 0;
  }

  static std::size_t payload_of(const Envelope& e) {
    const auto count = static_cast<std::size_t>(e.count);
    return e.kind == Envelope::message
               ? count * static_cast<std::size_t>(size_bytes(static_cast<DType>(e.dtype)))
               : count;
  }
  // The envelope of a message has come. Its elements go where they belong, if a receive waits for them.
  void begin_message(int r) {
    Peer& p = peer(r);
    constexpr std::int64_t kMostCount = std::int64_t{1} << 56;
    constexpr std::int64_t kMostControl = std::int64_t{1} << 20;
    const bool message = p.in.kind == Envelope::message;
    if (p.in.kind > Envelope::leave || p.in.dtype >= kDTypeCount || p.in.count < 0 ||
        p.in.count > (message ? kMostCount : kMostControl)) {
      fail({.code = ErrorCode::system,
            .text =
                fmt::format("transport {}: what rank {} read from rank {} is no message of weft: bytes are "
                            "lost, or in another order",
                            host().name, rank_, r),
            .ranks = {r}});
      return;
    }
    if (message) {
      if (OpState* const receive = matcher_.take_receive(r, p.in.tag)) {
        receive->peer = r;
        if (fits(*receive, static_cast<DType>(p.in.dtype), p.in.count)) p.receive = receive;
        return;
      }
      const auto bytes = static_cast<std::int64_t>(payload_of(p.in));
      if (!matcher_.has_room(bytes)) {
        fail(matcher_.refusal(rank_, r, p.in.tag, bytes));
        return;
      }
      p.message = room_for(payload_of(p.in));
    } else {
      p.control.resize(payload_of(p.in));
    }
  }
  Storage room_for(std::size_t bytes) {
    return bytes > 0 ? Storage::allocate(context_, Memory::local, bytes) : Storage();
  }
  // A whole message is in memory of ours.
  void message_arrived(int r, const Envelope& e, Storage bytes) {
    const auto dtype = static_cast<DType>(e.dtype);
    if (OpState* const receive = matcher_.take_receive(r, e.tag)) {
      receive->peer = r;
      deliver(*receive, dtype, e.count, bytes.data());
      return;
    }
    Kept& kept = matcher_.keep(r, e.tag, e.count * size_bytes(dtype));
    kept = {dtype, e.count, std::move(bytes)};
  }
  void control_arrived(int r, const Envelope& e, std::span<const std::byte> bytes) {
    switch (static_cast<Envelope::Kind>(e.kind)) {
      case Envelope::message: return;  // see message_arrived
      case Envelope::ask: {
        std::vector<int> awaited;
        each_other([&](int q) {
          if (awaits(q) || awaits_any() || peer(q).receive != nullptr || sends_to(q)) awaited.push_back(q);
        });
        control(r, Envelope::answer, static_cast<std::uint32_t>(e.tag),
                RollCallMessages::encode(awaited, size_));
        flush(r);
        return;
      }
      case Envelope::answer: roll_call_.answered(r, static_cast<std::uint32_t>(e.tag), bytes); return;
      case Envelope::leave: peer(r).left = true; return;
    }
  }
  void deliver(OpState& receive, DType dtype, std::int64_t count, const std::byte* bytes) {
    if (!fits(receive, dtype, count)) return;
    const auto size = static_cast<std::size_t>(count * size_bytes(dtype));
    if (size > 0) std::memcpy(receive.out, bytes, size);
    Transfer::of(receive).done = true;
  }
  bool fits(const OpState& receive, DType dtype, std::int64_t count) {
    if (dtype == receive.dtype && count == receive.out_count) return true;
    fail(message_mismatch(receive, rank_, dtype, count));
    return false;
  }

  void control(int r, Envelope::Kind kind, std::uint32_t number, std::vector<std::byte> bytes) {
    const std::size_t count = bytes.size();
    Outgoing o{.envelope = {.tag = static_cast<std::int32_t>(number),
                            .kind = kind,
                            .count = static_cast<std::int64_t>(count)},
               .count = count,
               .own = std::move(bytes)};
    o.bytes = o.own.data();  // moving a vector leaves its elements where they are
    peer(r).out.push_back(std::move(o));
  }
  // Where a stream takes nothing for so long, that rank hears nothing.
  void say_goodbye() noexcept {
    constexpr auto kLongest = std::chrono::milliseconds(500);
    constexpr useconds_t kPause = 100;
    const Deadline deadline = Deadline::after(kLongest);
    try {
      each_other([&](int r) {
        if (!peer(r).left) control(r, Envelope::leave, 0, {});
      });
      for (bool more = true; more && !failed_ && !deadline.passed();) {
        more = false;
        each_other([&](int r) {
          if (peer(r).left || peer(r).lost) return;
          try {
            flush(r);
          } catch (const Error&) {  // it cannot be told
            peer(r).out.clear();
          }
          more = more || !peer(r).out.empty();
        });
        if (more) ::usleep(kPause);
      }
    } catch (...) {}  // no memory: they learn it from the host's transport, or at their deadline
  }

  void lose(std::span<const int> ranks, const char* how) noexcept {
    fail({.code = ErrorCode::peer_lost,
          .text = fmt::format("{} {} {}", name_ranks(ranks), ranks.size() == 1 ? "has" : "have", how),
          .ranks = {ranks.begin(), ranks.end()}});
  }
  void learn(const Failure& cause) noexcept {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    failure_ = cause;
    failed_ = true;
  }

  Context& context_;
  const int rank_, size_;
  const FirstCause cause_;
  HostRanks ranks_;
  Traits traits_{};
  MessageMatcher<OpState, Kept> matcher_;
  std::vector<OpState*> waits_;  // wait_message, in flight
  std::vector<Peer> peers_;
  RollCallMessages roll_call_;
  HostChannel channel_;
  bool pulling_ = false;
  std::atomic<bool> inside_{false}, failed_{false};
  mutable std::mutex mutex_;  // fail() and failure() come from any thread
  Failure failure_;
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(const GroupInit& b, std::shared_ptr<const HostTransport> host) {
  return std::make_unique<HostBackend>(b, std::move(host));
}

}  // namespace weft::capi
