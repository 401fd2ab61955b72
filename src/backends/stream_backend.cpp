// A message is an envelope and its elements. Both go through the stream to the receiver, which matches them
// (PeerMessages). A send is done when the stream has taken the whole message. In addition to messages,
// streams carry the roll-call's questions and answers, and the notice that a rank leaves. Ranks learn of a
// failure from the store (FirstCause). Only post(), poll(), healthy(), ask(), answer() and probe() use the
// streams, so that nothing accesses a caller's memory outside these functions.
#include "weft/backends/stream_backend.hpp"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <utility>

#include "backends/messages/peer_messages.hpp"
#include "base/errors/caught.hpp"
#include "base/hash.hpp"
#include "base/text/printable.hpp"
#include "host/cores/usable_cores.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/backends/host_ranks.hpp"
#include "weft/backends/join.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/base/storage.hpp"

namespace weft {
namespace {

struct Envelope {
  enum Kind : std::uint16_t { message, ask, answer, leave };
  std::int32_t tag = 0;  // in a question or an answer: its number
  std::uint16_t kind = message;
  std::uint16_t dtype = 0;
  std::int64_t count = 0;  // elements; in an answer: bytes
};
constexpr std::uint64_t kLayout = digest_of(sizeof(Envelope), offsetof(Envelope, kind),
                                            offsetof(Envelope, dtype), offsetof(Envelope, count));
constexpr std::size_t kReadAtOnce = std::size_t{1} << 20;  // bytes read from one rank in one poll

// A flag is set while this object exists.
template <class Flag>
class During {
 public:
  explicit During(Flag& flag) : flag_(flag), outer_(flag) { flag_ = true; }
  ~During() { flag_ = outer_; }
  During(const During&) = delete;
  During& operator=(const During&) = delete;

 private:
  Flag& flag_;
  const bool outer_;
};

class StreamBackend final : public Backend, private MessageMedium {
 public:
  StreamBackend(const GroupInit& b, StreamTransport transport)
      : context_(b.context),
        transport_(std::move(transport)),
        rank_(b.rank),
        size_(b.size),
        cause_(b.size > 1 ? b.store : nullptr, b.token),
        messages_(*this, b.rank, b.size, UnexpectedLimits::from_env()),
        peers_(static_cast<std::size_t>(b.size)) {
    open(b);
  }
  ~StreamBackend() override {
    if (!failed_) say_goodbye();
  }

  const Traits& traits() const noexcept override { return traits_; }

  void post(OpState& s) noexcept override {
    new (s.scratch.data()) Transfer;
    if (s.op == Op::recv && s.peer == any_source) step();  // steps also take arrived messages of any source
    const During inside(inside_);
    guarded([&] {
      if (failed_) return;
      if (s.op != Op::send) {
        messages_.receive(s);
      } else if (s.peer == rank_) {
        messages_.send_to_self(s);
      } else {
        messages_.begin_send(s);
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
    if (Transfer::of(s).done) return Step::done;
    messages_.waits_in(s);
    return moved ? Step::advanced : Step::pending;
  }

  bool healthy() noexcept override {
    if (failed_) return false;
    if (const auto cause = cause_.look()) learn(*cause);
    if (const std::vector<int> left = messages_.lost(); !failed_ && !left.empty())
      lose(left, "left the group without it");
    each_other([&](int r) {
      if (failed_ || messages_.has_left(r) || !ranks_.is_here(r) || ranks_.alive(r)) return;
      read_last_of(r);
      if (!failed_ && !messages_.has_left(r)) lose({&r, 1}, "died");
    });
    return !failed_;
  }

  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    return messages_.missing(s, story);
  }

  bool ask(const OpState& s) noexcept override {
    guarded([&] { messages_.ask(s); });
    step();
    return failed_ || messages_.settled(messages_.awaited_by(s));
  }
  void answer() noexcept override { step(); }
  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    step();
    return messages_.probe(source, tag);
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
  void announce_sleep(bool) noexcept override {}  // the traits say that peers do not ring
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
    OpState* send = nullptr;       // null: data of weft's own
    std::vector<std::byte> own{};  // the data if `send` is null
    std::size_t written = 0;       // how much of the envelope and the bytes is written
  };
  struct Peer {
    std::deque<Outgoing> out;
    // Incoming data: the envelope, and then its bytes, which go to the receive that waits for them, or into
    // memory of weft.
    Envelope in;
    std::size_t in_read = 0;
    OpState* receive = nullptr;
    Storage message;
    std::vector<std::byte> control;
    std::byte* place() noexcept {
      if (receive != nullptr) return receive->out;
      return in.kind == Envelope::message ? message.data() : control.data();
    }
    std::atomic<bool> left{false}, lost{false};  // gone() may be called from any thread
  };
  Peer& peer(int r) { return peers_[static_cast<std::size_t>(r)]; }

  // MessageMedium.
  void notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) override {
    control(to, notice == Notice::ping ? Envelope::ask : Envelope::answer, number,
            {bytes.begin(), bytes.end()});
    if (notice == Notice::pong) flush(to);
  }
  // Never called: streams offer nothing, because elements follow their envelope.
  void fetch(OpState&, int, std::uint64_t) override {}
  void done(OpState& s, const MessageInfo& found) override {
    s.peer = found.source;
    if (s.op == Op::wait_message) {
      s.dtype = found.dtype;
      s.out_count = found.count;
    }
    Transfer::of(s).done = true;
  }
  void refuse(OpState&, Failure why) override { fail(why); }
  // A program may leave many messages unreceived, so they lie in local memory, which the program's allocator
  // may provide.
  Storage room_for(std::size_t bytes) override {
    return bytes > 0 ? Storage::allocate(context_, Memory::local, bytes) : Storage();
  }

  template <class F>
  void each_other(const F& f) const {
    for (int r = 0; r < size_; ++r)
      if (r != rank_) f(r);
  }
  // If `f` throws, the group fails.
  template <class F>
  void guarded(const F& f) noexcept {
    try {
      f();
    } catch (const Error& e) {
      fail({.code = e.code(), .text = e.what(), .ranks = {e.ranks().begin(), e.ranks().end()}});
    } catch (...) {
      fail({.code = ErrorCode::system,
            .text = fmt::format("transport {}: rank {}: {}", transport_.name, rank_, caught_words()),
            .ranks = {rank_}});
    }
  }

  // If `f` throws because a rank is lost, the exception is remembered.
  template <class F>
  auto about(int r, const F& f) {
    try {
      return f();
    } catch (const Error& e) {
      if (e.code() == ErrorCode::peer_lost) peer(r).lost = true;
      throw;
    }
  }

  void check_transport(const GroupInit& b) const {
    const auto wrong = [&](const std::string& text) {
      throw Error(ErrorCode::bad_argument,
                  fmt::format("group \"{}\": StreamTransport::{} [rank {}]", b.name, text, b.rank));
    };
    if (transport_.name.empty()) wrong("name is empty");
    if (transport_.name.find('\n') != std::string::npos)
      wrong(fmt::format("name is \"{}\"; expected no line feed", printable(transport_.name)));
    if (!transport_.open)
      wrong("open is empty; expected a function that opens this rank's end of the streams");
  }
  void open(const GroupInit& b) {
    check_transport(b);
    const Places places = meet(b);
    bool all_here = true;
    if (b.size > 1) {
      ranks_ = HostRanks(b, places.hosts);
      each_other([&](int r) { all_here = all_here && ranks_.is_here(r); });
    }
    // moved out, so that the function's captures are destroyed at once
    streams_ = std::exchange(transport_.open, {})(places.addresses);
    if (streams_ == nullptr)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("group \"{}\": StreamTransport::open of {} returned null; expected this rank's end of "
                      "the streams [rank {}]",
                      b.name, transport_.name, b.rank));
    traits_ = stream_traits(transport_.name, transport_.spin && b.ranks_here <= CpuShare::usable().count());
    traits_.guarantees.detects_death = transport_.detects_death || all_here;
    if (b.size > 1) join(b, "streams/opened", {}, kLayout);  // no rank writes before the other end is open
    streams_->all_open();
    if (b.size > 1) withdraw(b, "streams/open");  // a rank that has come to the second one has read the first
  }
  struct Places {  // by rank
    std::vector<std::string> hosts, addresses;
  };
  Places meet(const GroupInit& b) const {
    // "name\naddress of HostRanks\naddress of the transport"
    const std::string own =
        fmt::format("{}\n{}\n{}", transport_.name, HostRanks::address(b), transport_.address);
    std::vector<std::string> infos{own};
    if (b.size > 1) infos = join(b, "streams/open", own, kLayout);
    Places places;
    for (const std::string& info : infos) {
      const int r = static_cast<int>(places.hosts.size());
      const std::size_t first = std::min(info.find('\n'), info.size()),
                        second = std::min(info.find('\n', first + 1), info.size());
      if (const std::string name = info.substr(0, first); name != transport_.name)
        throw Error(
            Failure{.code = ErrorCode::mismatch,
                    .text = fmt::format("group \"{}\": rank {} has the transport {}, rank {} {} [rank {}]",
                                        b.name, r, name, b.rank, transport_.name, b.rank),
                    .ranks = {std::min(r, b.rank), std::max(r, b.rank)}});
      places.hosts.push_back(info.substr(std::min(first + 1, info.size()), second - first - 1));
      places.addresses.push_back(info.substr(std::min(second + 1, info.size())));
    }
    return places;
  }
  // Writes and reads everything that is possible now. Returns true if any data moved.
  bool step() noexcept {
    const During inside(inside_);
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

  // The process of rank r has ended. Its last messages, and the notice that it left, may still be unread.
  void read_last_of(int r) noexcept {
    const During inside(inside_);
    guarded([&] {
      while (pull(r)) {}
    });
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
      if (o.send != nullptr) messages_.sent(*o.send);
      p.out.pop_front();
    }
    return moved;
  }

  std::size_t write(int r, const std::byte* from, std::size_t most) {
    try {
      return about(r, [&] { return expected("write", streams_->write(r, from, most), most, "to", r); });
    } catch (const Error& e) {
      if (e.code() != ErrorCode::peer_lost || pulling_) throw;
      // If the rank has left and closed its end, its last data must still be read.
      while (pull(r)) {}
      if (!peer(r).left) throw;
      lose({&r, 1}, "left the group");
      return 0;
    }
  }
  std::size_t read(int r, std::byte* to, std::size_t most) {
    return about(r, [&] { return expected("read", streams_->read(r, to, most), most, "from", r); });
  }
  // Checks the number of bytes that a function of the streams has returned. Such a function can report a
  // failure only by an exception. A -1 would be a very large number.
  std::size_t expected(const char* function, std::size_t bytes, std::size_t most, const char* side, int r) {
    if (bytes > most)
      throw Error(
          Failure{.code = ErrorCode::system,
                  .text = fmt::format("transport {}: rank {}: {}() returned {} bytes {} rank {}; expected "
                                      "0 to {}",
                                      transport_.name, rank_, function, bytes, side, r, most),
                  .ranks = {rank_}});
    return bytes;
  }
  bool pull(int r) {
    const During here(pulling_);
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
        messages_.received(*std::exchange(p.receive, nullptr));
      else if (p.in.kind == Envelope::message)
        messages_.completed(r, head_of(p.in), std::exchange(p.message, {}));
      else
        control_arrived(r, p.in, p.control);
      p.in_read = 0;
    }
    return all > 0;
  }

  static MessageHead head_of(const Envelope& e) {
    return {.dtype = static_cast<DType>(e.dtype), .tag = e.tag, .count = e.count};
  }
  static std::size_t payload_of(const Envelope& e) {
    const auto count = static_cast<std::size_t>(e.count);
    return e.kind == Envelope::message
               ? count * static_cast<std::size_t>(size_bytes(static_cast<DType>(e.dtype)))
               : count;
  }
  // Call this when the envelope of a message has arrived. If a receive waits for the message, the elements
  // go directly to its `out`.
  void begin_message(int r) {
    Peer& p = peer(r);
    constexpr std::int64_t kMostCount = std::int64_t{1} << 56;
    constexpr std::int64_t kMostControl = std::int64_t{1} << 20;
    const bool message = p.in.kind == Envelope::message;
    if (p.in.kind > Envelope::leave || p.in.dtype >= kDTypeCount || p.in.count < 0 ||
        p.in.count > (message ? kMostCount : kMostControl)) {
      fail({.code = ErrorCode::system,
            .text = fmt::format(
                "transport {}: the data that rank {} read from rank {} is no message of weft: bytes are "
                "lost, or in another order",
                transport_.name, rank_, r),
            .ranks = {r}});
      return;
    }
    if (message) {
      const MessageHead head = head_of(p.in);
      p.receive = messages_.claim(r, head);
      if (p.receive != nullptr || failed_) return;
      if (const auto why = messages_.no_room(r, head)) {
        fail(*why);
        return;
      }
      p.message = room_for(payload_of(p.in));
    } else {
      p.control.resize(payload_of(p.in));
    }
  }
  void control_arrived(int r, const Envelope& e, std::span<const std::byte> bytes) {
    switch (static_cast<Envelope::Kind>(e.kind)) {
      case Envelope::message: return;  // see pull()
      case Envelope::ask:
        return messages_.received_notice(r, Notice::ping, static_cast<std::uint32_t>(e.tag), bytes);
      case Envelope::answer:
        return messages_.received_notice(r, Notice::pong, static_cast<std::uint32_t>(e.tag), bytes);
      case Envelope::leave:
        messages_.left(r);
        peer(r).left = true;
        return;
    }
  }

  void control(int r, Envelope::Kind kind, std::uint32_t number, std::vector<std::byte> bytes) {
    const std::size_t count = bytes.size();
    Outgoing o{.envelope = {.tag = static_cast<std::int32_t>(number),
                            .kind = kind,
                            .count = static_cast<std::int64_t>(count)},
               .count = count,
               .own = std::move(bytes)};
    o.bytes = o.own.data();  // still valid, because moving a vector does not move its elements
    peer(r).out.push_back(std::move(o));
  }
  // If a stream accepts no data for this long, that rank is not notified.
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
          } catch (const Error&) {  // this rank cannot be notified
            peer(r).out.clear();
          }
          more = more || !peer(r).out.empty();
        });
        if (more) ::usleep(kPause);
      }
    } catch (...) {}  // no memory: the peers notice it otherwise, or at their deadline
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
  StreamTransport transport_;
  const int rank_, size_;
  const FirstCause cause_;
  HostRanks ranks_;
  Traits traits_{};
  PeerMessages messages_;
  std::vector<Peer> peers_;
  std::unique_ptr<ByteStreams> streams_;
  bool pulling_ = false;
  std::atomic<bool> inside_{false}, failed_{false};
  mutable std::mutex mutex_;  // any thread may call fail() and failure()
  Failure failure_;
};

}  // namespace

Traits stream_traits(std::string_view name, bool spin) noexcept {
  Traits t{.name = name};
  t.ops = op_bit(Op::send) | op_bit(Op::recv) | op_bit(Op::wait_message);
  t.dtypes = (DTypeSet{1} << kDTypeCount) - 1;
  t.guarantees = {.deadline = true,
                  .names_absent = true,
                  .detects_death = true,
                  .survives_death = true,
                  .revocable = true,
                  .quiesces = true};
  t.spin = spin;
  t.rings = false;
  return t;
}

std::unique_ptr<Backend> make_stream_backend(const GroupInit& b, StreamTransport transport) {
  return std::make_unique<StreamBackend>(b, std::move(transport));
}

}  // namespace weft
